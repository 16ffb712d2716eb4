"""Pairs that are computed of less, and no part of a product of two sides by themselves: they are fused all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

S = 96
RATES = (1 - 2.0 ** (-3 - torch.arange(2.0))).log()[:, None, None]


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RetNet's decays, divided by the root of a row's total, and its scores (Sun et al., 2023, section 2.3)."""
    i = torch.arange(S, device=q.device)
    decays = torch.where(i[:, None] >= i, RATES.to(q.device) * (i[:, None] - i), -torch.inf).exp().to(q.dtype)
    weights = (q @ k.mT / 4) * (decays / decays.sum(-1, keepdim=True).sqrt())
    return weights / weights.detach().abs().sum(-1, keepdim=True).clamp(min=1) @ v


def mean_of_those_seen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(S, S, device=q.device, dtype=q.dtype).tril()
    return F.relu(q @ k.mT) * seen / seen.sum(-1, keepdim=True) @ v


def by_degrees(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A band, normalised as a graph's adjacency is."""
    i = torch.arange(S, device=q.device)
    band = ((i[:, None] - i).abs() < 20).to(q.dtype)
    scale = band.sum(-1).rsqrt()
    return torch.sigmoid(q @ k.mT / 4) * band * scale[:, None] * scale @ v


@pytest.mark.parametrize("fn", [retention, mean_of_those_seen, by_degrees])
def test_totals_of_what_positions_decide(fn: Callable[..., Tensor], device: torch.device) -> None:
    """Nothing is left to PyTorch, which would store a number for each pair."""
    given = [torch.randn(1, 2, S, 16, device=device) for _ in range(3)]
    for train in (False, True):
        graphs = explain(fn, *[t.cpu().requires_grad_(train) for t in given]).graphs
        assert not any(graph.left or graph.fallbacks for graph in graphs) and len(graphs[0].kernels) == 1
    run_and_check(fn, fl.compile(fn), given, name=fn.__name__)
    check_gradients(fn, fl.compile(fn), given, name=fn.__name__)


def gat(x: Tensor, wl: Tensor, wr: Tensor, a: Tensor) -> Tensor:
    """GATv2 (Brody et al., 2022), each node's features made of fewer."""
    left, right = x @ wl, x @ wr
    scores = F.leaky_relu(left[:, None] + right[None], 0.2) @ a
    return scores.softmax(1) @ (x @ wr)


def test_features_that_a_layer_makes_are_read_by_the_pairs(device: torch.device) -> None:
    """They are of linear size: were they computed in the kernel of the pairs, those would be its results."""
    n, features = 80, 32
    given = [torch.randn(shape, device=device) for shape in ((n, 12), (12, features), (12, features), (features,))]
    for train in (False, True):
        graphs = explain(gat, *[t.cpu().requires_grad_(train) for t in given]).graphs
        assert not any(graph.fallbacks for graph in graphs)
        stored = [s.shape for graph in graphs for k in graph.kernels for s in k.stores]
        assert stored and not any(shape.count(n) > 1 and features in shape for shape in stored)
    run_and_check(gat, fl.compile(gat), given, name="gat")
    check_gradients(gat, fl.compile(gat), given, name="gat")


def performer(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Positive random features, in causal attention (Choromanski et al., 2021)."""

    def features(x: Tensor) -> Tensor:
        u = x @ w.mT / 4 - x.square().sum(-1, keepdim=True) / 32
        return (u - u.amax(-1, keepdim=True).detach()).exp()

    a = torch.tril(features(q) @ features(k).mT)
    return (a @ v) / a.sum(-1, keepdim=True)


@pytest.mark.parametrize("count", [16, 40])
def test_feature_maps_of_queries_and_keys(count: int, device: torch.device) -> None:
    """Also where they have more features than queries have."""
    given = [torch.randn(shape, device=device) * 0.5 for shape in (*[(1, 2, S, 16)] * 3, (count, 16))]
    for train in (False, True):
        graphs = explain(performer, *[t.cpu().requires_grad_(train) for t in given]).graphs
        assert not any(graph.fallbacks for graph in graphs) and len(graphs[0].kernels) == 1
        stored = [s.shape for graph in graphs for k in graph.kernels for s in k.stores]
        assert not any(shape.count(S) > 1 for shape in stored)
    run_and_check(performer, fl.compile(performer), given, name="performer")
    check_gradients(performer, fl.compile(performer), given, name="performer")
