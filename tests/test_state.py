"""Training of modules that keep something: buffers that a step updates, and masks made in evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fl_pallas as fl


class Normed(nn.Module):
    """Patches of an image, batch-normed, attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.qkv = nn.Conv2d(3, 32, 4, 4), nn.BatchNorm2d(32), nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.patches(x)).flatten(2).mT).chunk(3, -1)
        return (q @ k.mT / 32**0.5).softmax(-1) @ v


class Stepping(nn.Module):
    """Scores are divided by what a buffer has come to."""

    def __init__(self, update: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.update, self.layer = update, nn.Linear(32, 32)
        self.register_buffer("state", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x)
        with torch.no_grad():
            self.update(self.state, q)
        return (q @ x.mT / self.state).softmax(-1) @ x


class Masked(nn.Module):
    """Keeps the mask that its first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 96)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.full((x.shape[1], x.shape[1]), -1e9, device=x.device).triu(1)
        q, k, v = self.layer(x).chunk(3, -1)
        return (q @ k.mT + self.mask).softmax(-1) @ v


def _trained(module: nn.Module, call: Callable[[Tensor], Tensor], batches: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x in batches:
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
    return [*module.state_dict().values()]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Normed,
    "counter": lambda: Stepping(lambda state, q: state.add_(1)),
    "average": lambda: Stepping(lambda state, q: state.mul_(0.9).add_(q.abs().mean() * 0.1)),
}


@pytest.mark.parametrize("name", MODULES)
def test_buffers_that_a_step_updates(name: str, device: torch.device) -> None:
    module = MODULES[name]().to(device)
    other = copy.deepcopy(module)
    shape = (4, 3, 32, 32) if name == "batch norm" else (2, 50, 32)
    batches = torch.randn(3, *shape, device=device)
    for a, b in zip(_trained(module, fl.compile(module), batches), _trained(other, other, batches), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_mask_of_inference(device: torch.device) -> None:
    module, x = Masked().to(device), torch.randn(2, 50, 32, device=device)
    compiled = fl.compile(module)
    with torch.inference_mode():
        compiled(x)
    assert module.mask is not None and module.mask.is_inference()
    compiled(x).sum().backward()
    found = module.layer.weight.grad
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(found, module.layer.weight.grad, rtol=1e-3, atol=1e-4)


def test_results_that_are_views_of_what_is_saved(device: torch.device) -> None:
    """Keys and values of a packed projection, for a cache: they lie as PyTorch's do, with its gaps."""

    def attention(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.view(2, 50, 2, 16).transpose(1, 2) for t in (x @ w).split(32, -1))
        return (q @ k.mT).softmax(-1) @ v, k, v

    x, w = torch.randn(2, 50, 32, device=device), torch.randn(32, 96, device=device, requires_grad=True)
    outs, wanted = fl.compile(attention)(x, w), attention(x, w)
    assert [t.stride() for t in outs[1:]] == [t.stride() for t in wanted[1:]]
    for a, b in zip(outs, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_mask_written_at_many_positions(device: torch.device) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        s = q @ k.mT
        s[..., i[0], i[1]] = float("-inf")
        return s.softmax(-1) @ v

    q, k, v = torch.randn(3, 2, 65, 32, device=device)
    later = torch.triu_indices(65, 65, 1, device=device)
    torch.testing.assert_close(fl.compile(attention)(q, k, v, later), attention(q, k, v, later), rtol=1e-3, atol=1e-4)
