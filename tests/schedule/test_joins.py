"""Where regions begin and end, for programs whose scores are no products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check


def mean_shift(x: Tensor, width: Tensor) -> Tensor:
    """Two steps of mean shift: the points that the first finishes are queries, keys and values of the second."""
    for _ in range(2):
        weights = torch.exp((x[:, None] - x[None]).square().sum(-1) / (-2 * width * width))
        x = weights @ x / weights.sum(-1, keepdim=True)
    return x


def forces(x: Tensor, width: Tensor) -> Tensor:
    """Two steps along the gradient of a potential, a sum of differences over distances."""
    for _ in range(2):
        d = x[:, None] - x[None]
        x = x - 0.01 * (d * (width + d.square().sum(-1, keepdim=True)).rsqrt()).sum(1)
    return x


@pytest.mark.parametrize("fn", [mean_shift, forces])
def test_layers_of_distances(fn: object, device: torch.device) -> None:
    """A layer is a region, and nothing between them has a value for each pair."""
    x, width = torch.randn(100, 4, device=device), torch.tensor(1.5, device=device)
    run_and_check(fn, fl.compile(fn, fallback="error"), (x, width), name="layers")
    explained = fl.explain(fn, x, width)
    assert explained.kernel_count == 2
    stored = [s.shape for graph in explained.graphs for plan in graph.kernels for s in plan.stores]
    assert stored == [(100, 4), (100, 4)]


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_gradients_of_layers_of_distances(device: torch.device) -> None:
    inputs = torch.randn(100, 4, device=device), torch.tensor(1.5, device=device)
    check_gradients(mean_shift, fl.compile(mean_shift), inputs)
