"""Two products of pairs with a softmax between them that is none: over slots, of what the first ends with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

S, SLOTS = 96, 11


def masked(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    """Bounded-memory control, in its parallel form (Peng et al., ABC, 2022)."""
    seen = torch.ones(S, S, device=q.device, dtype=q.dtype).tril()
    p = (((q @ k.mT) * seen) @ e).softmax(-1)
    return ((p @ e.mT) * seen) @ v


def decayed(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    """Gated slots, with one decay (Zhang et al., 2024)."""
    i = torch.arange(S, device=q.device)
    d = torch.where(i[:, None] >= i, 0.9 ** (i[:, None] - i), 0.0).to(q.dtype)
    return (((((q @ k.mT) * d) @ e).softmax(-1) @ e.mT) * d) @ v


@pytest.mark.long
@pytest.mark.parametrize("fn", [masked, decayed])
def test_both_hops_are_fused(fn: Callable[..., Tensor], device: torch.device) -> None:
    shapes = ((1, 2, S, n) for n in (16, 16, 16, SLOTS))
    given = [torch.randn(shape, device=device) * 0.3 for shape in shapes]
    for train in (False, True):
        graphs = explain(fn, *[t.cpu().requires_grad_(train) for t in given]).graphs
        assert not any(graph.fallbacks for graph in graphs) and len(graphs[0].kernels) == 2
        assert not any("bmm" in name for graph in graphs for name, _ in graph.left)
        stored = [s.shape for graph in graphs for k in graph.kernels for s in k.stores]
        assert not any(shape.count(S) > 1 for shape in stored)
    run_and_check(fn, fl.compile(fn), given, name=fn.__name__)
    check_gradients(fn, fl.compile(fn), given, name=fn.__name__)
