"""What is reduced over heads for each pair of a query and a key: loops over a batch of products, a tile of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain


def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(1) @ v


def largest_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).amax(1, keepdim=True).softmax(-1) @ v


@pytest.mark.parametrize("fn", [softmax_over_heads, largest_head])
def test_a_tile_of_each_head(fn: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device) -> None:
    inputs = [torch.randn(1, 8, 1024, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
    with torch.no_grad():
        told = explain(fn, *inputs)
    (graph,) = told.graphs
    first, _ = graph.kernels
    (loop,) = first.loops
    assert loop.axis.extent == 8 and first.choices.tile(loop.axis) == 1
    assert all((first.choices.tile(a) or 0) >= 16 for a in first.grid)
    # A number for each pair is stored.
    assert [f.fused for f in graph.fallbacks] and all(f.fused for f in graph.fallbacks)


@pytest.mark.parametrize("fn", [softmax_over_heads, largest_head])
def test_results(fn: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device) -> None:
    inputs = [torch.randn(2, 4, 64, 64, device=device) for _ in range(3)]
    compiled = fl.compile(fn)
    with torch.no_grad():
        run_and_check(fn, compiled, inputs)
    if fn is softmax_over_heads:
        check_gradients(fn, compiled, inputs)
