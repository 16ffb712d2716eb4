"""Products of pairs that are PyTorch's: a batch of them that a norm or a layer goes along lies in no tile."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.passes import joins
from tests.oracle import check_gradients
from tests.unrun import explain

pytestmark = pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")


def triangle(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Multiplication along the third edge of a triangle (AlphaFold 2, algorithm 11): each channel is a product."""
    return F.layer_norm(torch.einsum("bikc,bjkc->bijc", a, b), a.shape[-1:]) @ w


def outer_products(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Their mean over an alignment (algorithm 10), a layer made pairs' features of it: a, b [b,s,n,c], w [c*c,d]."""
    return torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2) @ w / a.shape[1]


def edges(n: int, c: int, device: torch.device | str = "cpu") -> list[Tensor]:
    return [*(torch.randn(1, n, n, c, device=device) for _ in range(2)), torch.randn(c, c, device=device)]


def alignment(s: int, n: int, c: int, device: torch.device | str = "cpu") -> list[Tensor]:
    return [*(torch.randn(1, s, n, c, device=device) for _ in range(2)), torch.randn(c * c, 2 * c, device=device)]


LARGE = [(triangle, edges(256, 64)), (outer_products, alignment(64, 256, 16))]


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("fn, inputs", LARGE)
def test_products_are_pytorchs(fn: Callable, inputs: list[Tensor], wanted: bool) -> None:
    """By kernels the first took 355 ms where PyTorch takes 3.7, the second 21 for 2 (an H200, both passes)."""
    found = explain(fn, *(t.detach().requires_grad_(wanted) for t in inputs))
    assert found.kernel_count == 0


def rows_behind(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Attention along the rows of what the outer products make."""
    z = F.layer_norm(outer_products(a, b, w), w.shape[-1:])
    return z + (z @ z.mT).softmax(-1) @ z


@pytest.mark.long
@pytest.mark.parametrize("wanted", [False, True])
def test_attention_behind_them_is_fused(wanted: bool) -> None:
    """Pairs are what both are about, and only the one is left."""
    inputs = (t.bfloat16().requires_grad_(wanted) for t in alignment(64, 256, 16))
    forward, *_ = explain(rows_behind, *inputs).graphs
    assert len(forward.kernels) == 1 and forward.schedule is not None
    assert any("quicker by themselves" in r.why for r in forward.schedule.rejected)


@pytest.mark.parametrize("fn, inputs", [(triangle, (20, 8)), (outer_products, (5, 20, 8))])
def test_gradients(fn: Callable, inputs: tuple[int, ...], device: torch.device) -> None:
    made = (edges if fn is triangle else alignment)(*inputs, device=device)
    check_gradients(fn, fl.compile(fn), made)


@pytest.mark.long
def test_what_would_take_far_longer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the channels taken for rows, by the estimate."""
    monkeypatch.setattr(joins, "LONG", 1 << 30)
    found = explain(triangle, *(t.bfloat16() for t in edges(256, 128)))
    assert found.kernel_count == 0
    (graph,) = found.graphs
    assert graph.schedule is not None
    assert any("times as long as PyTorch's own operations" in r.why for r in graph.schedule.rejected)


def chunks(x: Tensor, length: int) -> Tensor:
    return x.unflatten(2, (-1, length))


def retention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, length: int = 16) -> Tensor:
    """Within chunks, decays by head (RetNet)."""
    i = torch.arange(length, device=q.device)
    rate = 1 - 2.0 ** (-5 - torch.arange(q.shape[1], device=q.device))
    decay = torch.where(i[:, None] >= i, rate[:, None, None] ** (i[:, None] - i), 0).to(q.dtype)
    return (chunks(q, length) @ chunks(k, length).mT * decay[:, None]) @ chunks(v, length)


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, length: int = 16) -> Tensor:
    """Within chunks, decays by token (gated linear attention)."""
    i = torch.arange(length, device=q.device)
    b = F.logsigmoid(gate).unflatten(2, (-1, length)).cumsum(-1)
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(i[:, None] < i, -math.inf).exp()
    return (chunks(q, length) @ chunks(k, length).mT * decay.to(q.dtype)) @ chunks(v, length)


def shared(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, length: int = 16) -> Tensor:
    """Within chunks, heads that share queries and keys (Mamba-2)."""
    i = torch.arange(length, device=q.device)
    b = F.logsigmoid(gate).unflatten(2, (-1, length)).cumsum(-1)
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(i[:, None] < i, -math.inf).exp()
    c, a, x = chunks(q, length)[:, 0], chunks(k, length)[:, 0], chunks(v, length)
    return torch.einsum("bcln,bcsn,bhcls,bhcsp->bhclp", c, a, decay.to(q.dtype), x)


@pytest.mark.parametrize("fn", [retention, gated, shared])
def test_decays_fuse_however_short(fn: Callable, device: torch.device) -> None:
    """Pairs are as many as features: the weights do not reach memory all the same."""
    inputs = [torch.randn(1, 2, 48, 16, device=device) for _ in range(3)] + [torch.randn(1, 2, 48, device=device)]
    found = explain(fn, *inputs)
    assert found.kernel_count == 1
    assert not any("bmm" in op for graph in found.graphs for op, _ in graph.left)
    check_gradients(fn, fl.compile(fn), inputs)


@pytest.mark.parametrize("grad", [False, True])
def test_keys_of_a_query_of_its_own_are_multiplied_before(grad: bool) -> None:
    """Memories that each query has retrieved, beside the keys of all: with products of those, a kernel fits no tile of
    more rows than 16, and would take twice as long as PyTorch."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        near = (q @ k.mT / 8).masked_fill(i > i[:, None], -torch.inf)
        far = torch.einsum("bhid,bhijd->bhij", q, keys) / 8
        weights = torch.cat((far, near), -1).softmax(-1)
        m = keys.shape[-2]
        return weights[..., m:] @ v + torch.einsum("bhij,bhijd->bhid", weights[..., :m], values)

    shapes = ((1, 8, 2048, 64),) * 3 + ((1, 8, 2048, 32, 64),) * 2
    told = explain(attention, *(torch.zeros(s, dtype=torch.bfloat16, requires_grad=grad) for s in shapes))
    assert not told.fallbacks and len(told.graphs[0].kernels) == 1
