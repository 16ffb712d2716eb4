"""Sums over a batch that few programs take: shared out, and added up again, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.plan import KernelPlan
from tests.oracle import check_gradients
from tests.unrun import unrun


def windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention in windows that share a bias [heads, n, n]."""
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


def gated(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The bias's gradient is a function of the sum over all windows."""
    return ((q @ k.mT / 4 + bias.exp()).softmax(-1)) @ v


def inputs(batch: int, n: int = 25, device: torch.device | str = "cpu") -> list[Tensor]:
    q, k, v = (torch.randn(batch, 3, n, 16, device=device) for _ in range(3))
    return [q, k, v, torch.randn(3, n, n, device=device)]


def kernels(batch: int, n: int = 25) -> list[KernelPlan]:
    with unrun():
        wanted = [t.requires_grad_() for t in inputs(batch, n)]
        return [p for p in fl.explain(windows, *wanted).graphs[1].kernels if p.grid and p.grid[0].name == "p0"]


def test_as_many_as_processors_want() -> None:
    """3 programs for each of two on a processor, and each part of 16 windows at least."""
    for batch, parts in ((31, None), (32, 2), (100, 4), (1024, 64), (4096, 64)):
        found = kernels(batch)
        assert [p.grid[0].extent for p in found] == ([parts] if parts else []), batch
    (plan,) = kernels(100)
    assert plan.stores[0].shape == (4, 3, 25, 25) and plan.stores[0].dtype == "f32"
    assert "a sum is split into 4 parts, for 3 programs" in plan.notes[-1]


def test_many_programs_are_left_alone() -> None:
    assert not kernels(64, 640)


@pytest.mark.parametrize("batch", [32, 37, 64, 127])
@pytest.mark.parametrize("attend", [windows, gated])
def test_computes_the_same(attend, batch: int, device: torch.device) -> None:
    """Parts of equal lengths, and a last one that goes beyond the end."""
    check_gradients(attend, fl.compile(attend), inputs(batch, device=device))
