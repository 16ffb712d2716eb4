"""Layers one after another, whose scores share something: a bias, or what the layer before has made of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fl_pallas as fl
from fl_pallas.schedule.plan import fingerprint
from tests.oracle import check_gradients
from tests.unrun import explain

pytestmark = pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
HEADS = 2


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)


class Layers(nn.Module):
    """x [b,n,c], and a bias [b,h,n,n] that all layers add, or features of pairs [b,n,n,4] that a layer makes it of."""

    def __init__(self, c: int, of_features: bool, count: int = 2):
        super().__init__()
        self.bias = nn.Linear(4, HEADS, bias=False) if of_features else None
        self.qkv, self.out = (nn.ModuleList(nn.Linear(c, n * c) for _ in range(count)) for n in (3, 1))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        if self.bias is not None:
            bias = self.bias(bias).permute(0, 3, 1, 2)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (heads(y) for y in qkv(x).chunk(3, -1))
            scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
            x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x


class HandedOn(Layers):
    """Scores are added to the next layer's (RealFormer)."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (heads(y) for y in qkv(x).chunk(3, -1))
            bias = q @ k.mT / math.sqrt(q.shape[-1]) + bias
            x = x + out((bias.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x


MODELS = {
    "given": lambda c: Layers(c, False),
    "of features": lambda c: Layers(c, True),
    "handed on": lambda c: HandedOn(c, False),
}


def inputs(name: str, n: int, c: int, device: torch.device | str = "cpu") -> list[Tensor]:
    bias = torch.randn(2, n, n, 4) if name == "of features" else torch.randn(2, HEADS, n, n)
    return [torch.randn(2, n, c, device=device), bias.to(device)]


@pytest.mark.parametrize("name", MODELS)
def test_each_has_regions_of_its_own(name: str) -> None:
    """No kernel computes a projection: the gradient of the bias is stored by the one, and added to by the other."""
    x, bias = (t.bfloat16() for t in inputs(name, 256, 64))
    forward, backward = explain(MODELS[name](64).bfloat16(), x, bias.requires_grad_()).graphs
    for graph in (forward, backward):
        assert graph.schedule is not None
        assert len(graph.schedule.regions) == 2, str(graph)
        assert not any(graph.schedule.program.by_name[m].projection for r in graph.schedule.regions for m in r.members)
    assert len(backward.kernels) <= 10, str(backward)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, device: torch.device) -> None:
    model = MODELS[name](8).to(device)
    check_gradients(model, fl.compile(model), inputs(name, 18, 8, device))


# --- relative shifts ----------------------------------------------------------------------------


def with_memory(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """Transformer-XL: q [b,h,n,d] after a memory that k and v [b,h,m,d] begin with; r [h,m,d] by distance."""
    n, m = q.shape[-2], k.shape[-2]
    position = F.pad((q + w) @ r.mT, (1, 0)).view(*q.shape[:2], m + 1, n)[:, :, 1:].reshape(*q.shape[:2], n, m)
    later = torch.arange(m, device=q.device) > torch.arange(n, device=q.device)[:, None] + m - n
    scores = ((q + u) @ k.mT + position) / math.sqrt(q.shape[-1])
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def both_ways(x: Tensor, waves: Tensor, layer: Tensor, u: Tensor, w: Tensor, keep: Tensor) -> Tensor:
    """Conformer's: x [b,n,3·h·d] of a layer, as positions are, waves [2n-1,c]; keep [b,n], which hides twice."""
    q, k, v = (heads(y) for y in x.chunk(3, -1))
    r = heads(waves @ layer)
    b, h, n, d = q.shape
    position = F.pad((q + w) @ r.mT, (1, 0)).view(b, h, 2 * n, n)[:, :, 1:].reshape(b, h, n, 2 * n - 1)[..., :n]
    scores = ((q + u) @ k.mT + position) / math.sqrt(d)
    hidden = ~keep[:, None, None]
    return (scores.masked_fill(hidden, -1e4).softmax(-1).masked_fill(hidden, 0) @ v).transpose(1, 2).flatten(2)


def memory(n: int, m: int, d: int, device: torch.device | str = "cpu") -> list[Tensor]:
    shapes = [(2, HEADS, n, d), (2, HEADS, m, d), (2, HEADS, m, d), (HEADS, m, d), (HEADS, 1, d), (HEADS, 1, d)]
    return [torch.randn(*s, device=device) for s in shapes]


def tokens(n: int, d: int, device: torch.device | str = "cpu") -> list[Tensor]:
    shapes = [(2, n, 3 * HEADS * d), (2 * n - 1, 16), (16, HEADS * d), (HEADS, 1, d), (HEADS, 1, d)]
    keep = torch.arange(n) < torch.tensor([[n], [n - 3]])
    return [*(torch.randn(*s, device=device) for s in shapes), keep.to(device)]


@pytest.mark.parametrize("fn, given", [(with_memory, memory(256, 512, 64)), (both_ways, tokens(256, 64))])
def test_shifted_scores_are_made_once_for_queries(fn: Callable, given: list[Tensor]) -> None:
    """Their gradients of keys and of positions come from one kernel; no index of it is a quotient. By quotients of
    quotients a memory's took twenty times as long, by the estimate."""
    given = [t.bfloat16().requires_grad_() if t.is_floating_point() else t for t in given]
    _, backward = explain(fn, *given).graphs
    assert not backward.fallbacks and len([k for k in backward.kernels if not k.name.endswith("_tiles")]) == 3
    assert "% 256" not in str(backward) and "% 512" not in str(backward), str(backward)


@pytest.mark.long
@pytest.mark.parametrize("fn", [with_memory, both_ways])
def test_gradients_of_shifts(fn: Callable, device: torch.device) -> None:
    given = memory(12, 28, 8, device) if fn is with_memory else tokens(14, 8, device)
    check_gradients(fn, fl.compile(fn), given)


class Deep(nn.Module):
    """x [b,n,c] through layers of causal attention, rotated, with fewer keys."""

    def __init__(self, count: int, c: int = 32):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(count))
        self.q, self.out = (nn.ModuleList(nn.Linear(c, c) for _ in range(count)) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(c, c) for _ in range(count))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        i = torch.arange(x.shape[1], device=x.device)
        for norm, to_q, to_kv, out in zip(self.norms, self.q, self.kv, self.out, strict=True):
            y = norm(x)
            q, (k, v) = to_q(y).unflatten(-1, (4, 8)).transpose(1, 2), to_kv(y).unflatten(-1, (2, 2, 8)).unbind(2)
            k, v = (t.transpose(1, 2).repeat_interleave(2, 1) for t in (k, v))
            q, k = (torch.cat([t[..., 4:] * angles, t[..., :4]], -1) for t in (q, k))
            weights = (q @ k.mT).masked_fill(i > i[:, None], -math.inf).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).flatten(2))
        return x


def _digests(fn: Callable, *given: Tensor) -> list[str]:
    return [fingerprint(k) for g in explain(fn, *given).graphs for k in g.kernels]


def test_layers_have_the_same_kernels() -> None:
    """They are compiled, timed and kept on disk once."""
    x, angles = torch.randn(1, 160, 32, requires_grad=True), torch.randn(160, 4)
    one, four = (_digests(Deep(n), x, angles) for n in (1, 4))
    assert len(four) == 4 * len(one)
    # The first layer's input is none of a layer's results, and the last one's result is returned.
    assert len({*four}) <= len({*one}) + 1


def test_names_are_no_part_of_a_kernel() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 4).softmax(-1) @ v

    def renamed(values: Tensor, x0: Tensor, others: Tensor) -> Tensor:
        return (x0 @ others.mT / 4).softmax(-1) @ values

    def otherwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 4).softmax(-1) @ k

    q, k, v = (torch.randn(2, 96, 16) for _ in range(3))
    assert _digests(attention, q, k, v) == _digests(renamed, v, q, k) != _digests(otherwise, q, k, v)


BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "squared": lambda s: F.relu(s).square(),
    "silu": F.silu,
    "softplus": F.softplus,
}


@pytest.mark.parametrize("name", BENT)
def test_tokens_that_a_layer_makes_are_no_weights(name: str, device: torch.device) -> None:
    """Kept as a matrix for the backward pass, whose scores they multiply again."""

    def bent(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return BENT[name](x @ w @ y.mT / 4) @ y

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator).bfloat16() for s in ((2, 96, 16), (16, 16), (2, 80, 16))]
    x, w, y = (t.to(device).requires_grad_() for t in given)
    told = explain(bent, x, w, y)
    assert [bool(g.kernels) for g in told.graphs] == [True, True]
    assert all(math.prod(s.shape) < 96 * 80 * 2 for g in told.graphs for k in g.kernels for s in k.stores)
    check_gradients(bent, fl.compile(bent, fallback="error"), (x.detach(), w.detach(), y.detach()))
