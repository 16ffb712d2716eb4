"""`@fl.compile` above a class of modules."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import fl_pallas as fl
from tests.unrun import explain


@fl.compile
class Attention(nn.Module):
    """Two heads of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return (q @ k.mT / 4).softmax(-1) @ v


@fl.compile(fallback="error")
class Scaled(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("cls", [Attention, Scaled])
def test_instances_are_compiled(cls: type[nn.Module], device: torch.device) -> None:
    torch.manual_seed(0)
    module, x = cls().to(device), torch.randn(2, 70, 32, device=device)
    assert explain(module, x).kernel_count == 3  # forward, and two for the gradients
    out, wanted = module(x), module.forward(x)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    found, exact = (torch.autograd.grad(o.square().sum(), [*module.parameters()]) for o in (out, wanted))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


def test_an_instance_is_a_module_as_any(device: torch.device) -> None:
    assert (Attention.__name__, Attention.__doc__, Attention.__module__) == ("Attention", "Two heads of 16.", __name__)
    module, x = Attention().to(device), torch.randn(2, 70, 32, device=device)
    assert isinstance(module, Attention) and [*module.state_dict()] == ["qkv.weight", "qkv.bias"]
    called: list[int] = []
    hook = module.register_forward_hook(lambda *_: called.append(1))
    out = nn.Sequential(module, nn.Identity())(x)
    hook.remove()
    assert called == [1]
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.qkv.weight.zero_()
    torch.testing.assert_close(twin(x), out)
    file = io.BytesIO()
    torch.save(twin.requires_grad_(False), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [3, int, None.__class__])
def test_what_cannot_be_compiled_is_refused(other: object) -> None:
    with pytest.raises(TypeError, match="fl.compile takes"):
        fl.compile(other)


class Slow(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return (q @ q.mT / 4).softmax(-1) @ q


def test_a_class_that_has_its_name_stays_as_it_is(device: torch.device) -> None:
    fast, q = fl.compile(Slow), torch.randn(2, 70, 16, device=device)
    assert fast is not Slow and issubclass(fast, Slow) and fast.__qualname__ == "Slow"
    assert "_compiled_call_impl" not in vars(Slow)
    torch.testing.assert_close(fast()(q), Slow()(q), rtol=1e-4, atol=1e-5)


def test_super_by_the_name_of_the_class(device: torch.device) -> None:
    @fl.compile(fallback="error")
    class Old(nn.Module):
        def __init__(self) -> None:
            super(Old, self).__init__()  # noqa: UP008
            self.q = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ x.mT).softmax(-1) @ x

    module, x = Old().to(device), torch.randn(2, 70, 16, device=device)
    torch.testing.assert_close(module(x), module.forward(x), rtol=1e-4, atol=1e-5)
