"""Weights that are added up: the backward pass reads each softmax's own result, and takes no loop for its row sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fl_pallas as fl
from fl_pallas.capture.terms import offer_terms
from fl_pallas.schedule.text import plan_text
from tests.oracle import check_gradients
from tests.unrun import explain

ANOTHER = "takes another pass"


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def causal(q: Tensor, k: Tensor) -> Tensor:
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1)


def mixture(q: Tensor, k: Tensor, k2: Tensor, k3: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    gate = gate.softmax(-1)
    return (gate[..., :1] * causal(q, k) + gate[..., 1:2] * weights(q, k2) - weights(q, k3) / 3) @ v


def by_einsum(q: Tensor, k: Tensor, k2: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Everything [b, s, h, d], lam [h]."""
    p1, p2 = (torch.einsum("bqhd,bkhd->bhqk", q, t).softmax(-1) for t in (k, k2))
    return torch.einsum("bhqk,bkhd->bqhd", p1 - lam[:, None, None] * p2, v)


def transposed(q: Tensor, k: Tensor, k2: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """The weights of a query are a column."""
    p1, p2 = ((t @ q.mT / 4).softmax(-2) for t in (k, k2))
    return (v.mT @ (p1 - lam * p2)).mT


def pairs_of_heads(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Microsoft's differential attention: one softmax, whose heads are subtracted two by two."""
    b, h, s, _ = q.shape
    p = weights(q, k).view(b, h // 2, 2, s, s)
    return (p[:, :, 0] - lam * p[:, :, 1]) @ v


def every_other_head(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Of three heads, the middle one has other values: its sums lie elsewhere."""
    p = weights(q, k)
    return p[:, ::2] @ v, p[:, 1::2] @ w


def read_twice(q: Tensor, k: Tensor, k2: Tensor, v: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    p = weights(q, k)
    return (p - lam * weights(q, k2)) @ v, p @ v


def gated_keys(q: Tensor, k: Tensor, k2: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (weights(q, k) - gate * weights(q, k2)) @ v


def rectified(q: Tensor, k: Tensor, k2: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    return torch.relu(weights(q, k) - lam * weights(q, k2)) @ v


HEADS, TOKENS = (2, 2, 40, 16), (2, 40, 3, 16)
# The variant, shapes of its inputs, and whether each row sum is known.
VARIANTS: dict[Callable[..., Any], tuple[list[tuple[int, ...]], bool]] = {
    mixture: ([*[HEADS] * 5, (2, 2, 40, 3)], True),
    by_einsum: ([*[TOKENS] * 4, (3,)], True),
    transposed: ([*[HEADS] * 4, ()], True),
    pairs_of_heads: ([(2, 4, 40, 16), (2, 4, 40, 16), (2, 2, 40, 32), ()], True),
    read_twice: ([*[HEADS] * 4, ()], True),
    every_other_head: ([(2, 3, 40, 16), (2, 3, 40, 16), (2, 2, 40, 16), (2, 1, 40, 16)], False),
    gated_keys: ([*[HEADS] * 4, (2, 2, 1, 40)], False),
    rectified: ([*[HEADS] * 4, ()], False),
}


def drawn(fn: Callable[..., Any], dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    return [torch.randn(s, device=device).to(dtype) for s in VARIANTS[fn][0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", VARIANTS)
def test_gradients(fn: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn, fallback="error"), drawn(fn, dtype, device))


@pytest.mark.parametrize("fn", VARIANTS)
def test_row_sums_are_known(fn: Callable[..., Any]) -> None:
    inputs = [t.requires_grad_() for t in drawn(fn, torch.bfloat16)]
    forward, backward = explain(fn, *inputs).graphs
    assert not forward.fallbacks and not backward.fallbacks
    assert VARIANTS[fn][1] == all(ANOTHER not in plan_text(k) for k in backward.kernels)


def test_nothing_is_stored_that_is_not_read() -> None:
    """Gradients go through a rectifier where it lets them: no product of the whole weights tells their sums."""
    inputs = [t.requires_grad_() for t in drawn(rectified, torch.bfloat16)]
    forward, _ = explain(rectified, *inputs).graphs
    stores = [s for k in forward.kernels for s in k.stores]
    assert sum(len(s.shape) == 4 and s.shape[-1] == 16 for s in stores) == 1


def test_one_softmax_is_offered_nothing() -> None:
    def scaled(p: Tensor, v: Tensor) -> Tensor:
        e = p.exp()
        return torch.ops.aten.bmm(2 * (e / e.sum(-1, keepdim=True)), v)

    graph = make_fx(scaled, tracing_mode="fake")(torch.randn(2, 5, 5), torch.randn(2, 5, 3))
    before = len(graph.graph.nodes)
    assert offer_terms(graph) == () and len(graph.graph.nodes) == before
