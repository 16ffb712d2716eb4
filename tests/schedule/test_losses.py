"""Losses of all pairs, as their authors write them: nothing of the size of the pairs is stored."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain


def moco(q: Tensor, k: Tensor, queue: Tensor, temperature: Tensor) -> Tensor:
    """A positive for each row, by itself, beside a queue of negatives."""
    logits = torch.cat([torch.einsum("nc,nc->n", q, k)[:, None], q @ queue], 1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def aligned(turned: Tensor, moved: Tensor, points: Tensor) -> Tensor:
    """AlphaFold's: every point in the axes of every frame."""
    local = torch.einsum("fji,fpj->fpi", turned, points[None] - moved[:, None])
    return ((local**2).sum(-1) + 1e-4).sqrt().clamp(max=10).mean()


def in_axes(turned: Tensor, moved: Tensor, points: Tensor) -> Tensor:
    """Weights of points that a frame sees, by a matrix product of each pair's own."""
    local = ((points[None] - moved[:, None])[:, :, None] @ turned[:, None]).squeeze(2)
    return (-(local * local).sum(-1)).softmax(-1) @ points


PROGRAMS = {
    "moco": (moco, lambda n: [torch.randn(n, 32), torch.randn(n, 32), torch.randn(32, 6 * n), torch.tensor(0.7)]),
    "aligned": (aligned, lambda n: [torch.randn(n, 3, 3), torch.randn(n, 3), torch.randn(3 * n, 3)]),
    "in_axes": (in_axes, lambda n: [torch.randn(n, 3, 3), torch.randn(n, 3), torch.randn(3 * n, 3)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_pair_is_stored(name: str, device: torch.device) -> None:
    fn, draw = PROGRAMS[name]
    inputs = [x.to(device) for x in draw(256)]
    with torch.no_grad():
        graphs = explain(fn, *inputs).graphs
    graphs += explain(fn, *(x.requires_grad_() for x in inputs)).graphs
    assert not any(g.fallbacks for g in graphs)
    least = 256 * 768
    assert all(math.prod(s.shape) < least for g in graphs for plan in g.kernels for s in plan.stores)


@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name: str, device: torch.device) -> None:
    fn, draw = PROGRAMS[name]
    inputs = [x.to(device) for x in draw(20)]
    compiled = fl.compile(fn)
    with torch.no_grad():
        run_and_check(fn, compiled, inputs)
    check_gradients(fn, compiled, inputs)
