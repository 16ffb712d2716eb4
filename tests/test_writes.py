"""Writes to inputs and buffers are PyTorch's, in place; what lies between them fuses."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fl_pallas as fl
from fl_pallas.capture.writes import parts_between_writes
from fl_pallas.errors import FallbackWarning
from tests.unrun import unrun

LENGTH, ROOM, FEATURES = 8, 40, 16


def attend(q: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    later = torch.arange(keys.shape[-2], device=q.device) > at[:, None]
    return (q @ keys.mT / 4).masked_fill(later, -math.inf).softmax(-1) @ values


def copied(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """As transformers' static cache does it."""
    keys.index_copy_(2, at, k * 2)
    values.index_copy_(2, at, v.tanh())
    return attend(q, keys, values, at)


def assigned(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """As gpt-fast does it; the cache is a result."""
    keys[:, :, at] = k
    values[:, :, at] = v
    return attend(q, keys, values, at), keys


def viewed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Views that are made before writes, of one half, and read after them."""
    near, far = keys[:, :, :20], values[:, :, :20]
    keys[:, :, 4:12] += k
    values[:, :, 4:12].copy_(v)
    return (q @ near.mT / 4).softmax(-1) @ far


def read_before(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """What was there before counts, and what is there then."""
    before = attend(q, keys, values, at)
    keys.index_copy_(2, at, k)
    between = attend(q, keys, values, at)
    values.index_copy_(2, at, between)
    keys.mul_(0.5)
    return before + attend(between, keys, values, at)


def counted(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """A running mean of what comes out, and a mask that is written to before it is used."""
    mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    mask[:, 5:] = True
    out = (q @ k.mT / 4).masked_fill(mask, -1e9).softmax(-1) @ v
    keys.mul_(0.9).add_(out.mean(), alpha=0.1)
    return out * 2


def rounded(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Autocast is around all parts."""
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        keys.index_copy_(2, at, k)
        return (q @ keys.mT / 4).softmax(-1).to(torch.bfloat16) @ values


def of_values(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Scores are made of nothing that is written: they wait for what reads it."""
    values.index_copy_(2, at, v)
    weights = (q @ keys.mT / 4).softmax(-1)
    return weights @ values


def of_keys_before(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Scores are made of what is written later: they do not wait."""
    weights = (q @ keys.mT / 4).softmax(-1)
    values.index_copy_(2, at, v)
    keys.index_copy_(2, at, k)
    return weights @ values


def inputs(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [LENGTH] * 3 + [ROOM] * 2
    made = [torch.randn(2, 3, n, FEATURES, generator=generator).to(device) for n in lengths]
    return [*made, torch.arange(7, 7 + LENGTH, device=device)]


ALL = [copied, assigned, viewed, read_before, counted, rounded, of_values, of_keys_before]


@pytest.mark.parametrize("fn", ALL)
@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
def test_as_in_pytorch(fn: Callable, way: Callable, device: torch.device) -> None:
    """Results, and what is written."""
    compiled = fl.compile(fn)
    ours, theirs = inputs(device), inputs(device)
    with way():
        for _ in range(2):
            torch.testing.assert_close(compiled(*ours), fn(*theirs), atol=3e-2 if fn is rounded else 1e-5, rtol=1e-5)
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "fn, kernels",
    [(copied, 1), (assigned, 1), (viewed, 1), (read_before, 3), (counted, 1), (rounded, 1), (of_values, 1)],
)
def test_what_lies_between_fuses(fn: Callable, kernels: int, device: torch.device) -> None:
    with unrun(), torch.no_grad():
        explained = fl.explain(fn, *inputs(device))
    assert sum(bool(graph.kernels) for graph in explained.graphs) == kernels and not explained.fallbacks


class Scaled(nn.Module):
    """A running scale that a buffer is given, or the memory of an argument."""

    largest: Tensor

    def __init__(self, of_argument: bool):
        super().__init__()
        self.of_argument = of_argument
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.of_argument:
            q.data = q.data * 2
        scores = q @ k.mT
        self.largest.data = torch.maximum(self.largest, scores.detach().abs().amax())
        return (scores / self.largest).softmax(-1) @ v


@pytest.mark.parametrize("of_argument", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_what_gets_other_memory(of_argument: bool, gradients: bool, device: torch.device) -> None:
    """`x.data = y` writes nothing: PyTorch does it all, and says so."""
    outcomes = []
    for compiles in (False, True):
        module = Scaled(of_argument).to(device)
        given = [t.requires_grad_(gradients) for t in inputs(device)[:3]]
        fn = fl.compile(module) if compiles else module
        with pytest.warns(FallbackWarning, match="gets other memory") if compiles else contextlib.nullcontext():
            out = fn(*given)
        grads = torch.autograd.grad(out.sum(), given) if gradients else ()
        outcomes.append((out.detach(), *grads, module.largest, *(t.detach() for t in given)))
    torch.testing.assert_close(*outcomes, atol=1e-5, rtol=1e-5)


class Layer(nn.Module):
    """Attention over a cache, which it has as buffers."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int = 32):
        super().__init__()
        self.given, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, 2, ROOM, width // 2))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.given(F.rms_norm(x, x.shape[-1:])).chunk(3, -1)
        )
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        return x + self.out(attend(q, self.keys, self.values, at).transpose(1, 2).flatten(-2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, at)
        return x


def test_layers_with_caches(device: torch.device) -> None:
    """A prompt, and tokens one by one."""
    torch.manual_seed(0)
    ours = Decoder().to(device)
    theirs, compiled = copy.deepcopy(ours), fl.compile(ours)
    with torch.no_grad():
        for first, last in ((0, 12), (12, 13), (13, 14)):
            x, at = torch.randn(1, last - first, 32, device=device), torch.arange(first, last, device=device)
            torch.testing.assert_close(compiled(x, at), theirs(x, at), atol=1e-5, rtol=1e-5)
            for (_, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        with unrun():
            explained = fl.explain(ours, torch.randn(1, 12, 32, device=device), torch.arange(12, device=device))
    assert sum(bool(graph.kernels) for graph in explained.graphs) == 3 and not explained.fallbacks


def test_parts() -> None:
    """What no later part takes is let go."""
    graph = torch.fx.symbolic_trace(copied)
    parts = parts_between_writes(graph, inputs(torch.device("cpu")))
    assert parts is not None and [part.writes for part in parts] == [False, True, False]
    # The mask is made where it is asked for.
    assert parts[0].gives == ("mul", "tanh") and "mul" in parts[1].done and "keys" not in parts[1].done
    q, k, v, *_, at = inputs(torch.device("cpu"))
    assert parts_between_writes(torch.fx.symbolic_trace(attend), [q, k, v, at]) is None
