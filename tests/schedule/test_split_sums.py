"""Sums over a batch that few programs take: shared out, and added up again, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import reductions
from fl_pallas.schedule.inner import is_sequential
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


def radial(q: Tensor, k: Tensor, v: Tensor, at: Tensor, centres: Tensor, w: Tensor) -> Tensor:
    """A bias that a layer makes of distances between points [b,n,3], each by how near it is to centres."""
    d = (at[:, :, None] - at[:, None]).square().sum(-1).add(1e-6).sqrt()
    bias = torch.exp(-10 * (d[..., None] - centres).square()) @ w
    return (q @ k.mT / 4 + bias.permute(0, 3, 1, 2)).softmax(-1) @ v


@pytest.mark.long
def test_few_sums_are_taken_at_once() -> None:
    """One program of 512 sums of 256, each step waiting for the last, took 119 us on an H200."""
    q, k, v = (torch.randn(8, 8, 256, 32, dtype=torch.bfloat16) for _ in range(3))
    points = [torch.randn(8, 256, 3), torch.linspace(0, 3, 64), torch.randn(64, 8)]
    with unrun():
        wanted = [t.bfloat16().requires_grad_() for t in (q, k, v, *points)]
        found = [p for p in fl.explain(radial, *wanted).graphs[1].kernels if not p.loops]
    sums = [(p, r) for p in found for s in p.stores for r in reductions(s.expr) if r.axis.extent == 256]
    assert sums and not any(is_sequential(r, p.choices.tiled) for p, r in sums)
