"""Expressions are graphs, whose nodes are shared: what walks over them meets each node once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.build import op, select
from fl_pallas.schedule.expr import Axis, Expr, const, free_axes, index, load, loads, outer_loads, walk
from tests.oracle import check_gradients

STEPS = 64


def bisected() -> Expr:
    """Each step reads both ends of the one before, twice."""
    i = Axis("i", 16)
    low, high = load("low", (index(i),), "f32"), load("high", (index(i),), "f32")
    for step in range(STEPS):
        middle = op("mul", op("add", low, high, dtype="f32"), const(0.5, "f32"), dtype="f32")
        large = op("ge", load(f"sum{step}", (index(i),), "f32"), const(1.0, "f32"), dtype="bool")
        low, high = select(large, middle, low), select(large, high, middle)
    return low


def test_shared_nodes_are_met_once() -> None:
    e = bisected()
    assert len({*outer_loads(e)}) == len(outer_loads(e)) == STEPS + 2
    assert {*outer_loads(e)} == {*loads(e)} and len(free_axes(e)) == 1
    assert len([*walk(e)]) < 10 * STEPS


def sparsemax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By bisection, causal."""
    i = torch.arange(q.shape[2], device=q.device)
    z = (q @ k.mT / 4).masked_fill(i[:, None] < i, -1e4)
    low = z.detach().amax(-1, keepdim=True) - 1
    high = low + 1
    for _ in range(24):
        middle = (low + high) / 2
        large = (z.detach() - middle).relu().sum(-1, keepdim=True) >= 1
        low, high = torch.where(large, middle, low), torch.where(large, high, middle)
    return (z - low).relu() @ v


@pytest.mark.parametrize("n", [19, 35])
def test_bisection(n: int, device: torch.device) -> None:
    torch.manual_seed(n)
    args = [torch.randn(2, 2, n, 16, device=device, requires_grad=True) for _ in range(3)]
    check_gradients(sparsemax, fl.compile(sparsemax, dynamic=False), args)
