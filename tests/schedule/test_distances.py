"""Gradients of tables by distance: nothing is stored for each pair, whatever the table's length."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import unrun


def _distances(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(q.shape[-2], device=q.device)[:, None] - torch.arange(k.shape[-2], device=q.device)


def buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """T5's decoder: table [16,h], causal."""
    far = _distances(q, k).clamp(min=0)
    spread = 8 + (torch.log(far.float().clamp(min=1) / 8) / math.log(16) * 8).long()
    bias = F.embedding(torch.where(far < 8, far, spread.clamp(max=15)), table).permute(2, 0, 1)
    return (q @ k.mT + bias).masked_fill(_distances(q, k) < 0, -1e9).softmax(-1) @ v


def every_distance(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [h,2n-1]."""
    return (q @ k.mT / 4 + table[:, _distances(q, k) + q.shape[-2] - 1]).softmax(-1) @ v


def every_distance_embedded(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [2n-1,h], of which one row has no gradient."""
    bias = F.embedding(_distances(q, k) + q.shape[-2] - 1, table, padding_idx=3).permute(2, 0, 1)
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


def shared_factor(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [41]: a factor that heads and batch share."""
    return (q @ k.mT / 4 * table[_distances(q, k).abs().clamp(max=40)]).softmax(-1) @ v


def by_sum(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [h,91], of the sum of two positions."""
    at = torch.arange(q.shape[-2], device=q.device)
    return (q @ k.mT / 4 + table[:, (at[:, None] + at).clamp(max=90)]).softmax(-1) @ v


def relative_keys(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [11,d], of what queries are multiplied with."""
    near = table[_distances(q, k).clamp(-5, 5) + 5]
    return ((q @ k.mT + torch.einsum("bhid,ijd->bhij", q, near)) / 4).softmax(-1) @ v


def relative_queries(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [11,d], of what keys are multiplied with."""
    near = F.embedding(_distances(q, k).clamp(-5, 5) + 5, table)
    return ((q @ k.mT + torch.einsum("bhjd,ijd->bhij", k, near)) / 4).softmax(-1) @ v


def relative_keys_and_values(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [11,2,d]."""
    near = table[_distances(q, k).clamp(-5, 5) + 5]
    weights = ((q @ k.mT + torch.einsum("bhid,ijd->bhij", q, near[..., 0, :])) / 4).softmax(-1)
    return weights @ v + torch.einsum("bhij,ijd->bhid", weights, near[..., 1, :])


def every_relative_key(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [2n-1,d]."""
    all_ = table[_distances(q, k) + q.shape[-2] - 1]
    return ((q @ k.mT + torch.einsum("bhid,ijd->bhij", q, all_)) / 4).softmax(-1) @ v


def far(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """More distances than each may ask of every pair, those beyond as one; table [l,h]."""
    most = len(table) // 2
    bias = table[_distances(q, k).clamp(-most, most) + most]
    return ((q @ k.mT) / 4 + bias.permute(2, 0, 1)).softmax(-1) @ v


def far_either_way(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [l,h], l > n."""
    return ((q @ k.mT) / 4 + F.embedding(_distances(q, k).abs(), table).permute(2, 0, 1)).softmax(-1) @ v


def far_by_twos(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [h,l], l > n."""
    return ((q @ k.mT) / 4 + table[:, _distances(q, k) // 2 + q.shape[-2] // 2]).softmax(-1) @ v


CASES: dict[Callable[..., Tensor], Callable[[int], tuple[int, ...]]] = {
    buckets: lambda n: (16, 2),
    every_distance: lambda n: (2, 2 * n - 1),
    every_distance_embedded: lambda n: (2 * n - 1, 2),
    shared_factor: lambda n: (41,),
    by_sum: lambda n: (2, 91),
    relative_keys: lambda n: (11, 16),
    relative_queries: lambda n: (11, 16),
    relative_keys_and_values: lambda n: (11, 2, 16),
    every_relative_key: lambda n: (2 * n - 1, 16),
    far: lambda n: (141, 2),
    far_either_way: lambda n: (n + 70, 2),
    far_by_twos: lambda n: (2, n + 70),
}


def _inputs(fn: Callable[..., Tensor], n: int, device: torch.device) -> list[Tensor]:
    shapes = [(2, 2, n, 16)] * 3 + [CASES[fn](n)]
    return [torch.randn(*shape, device=device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("fn", CASES)
def test_tables_by_distance(fn: Callable[..., Tensor], device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn, fallback="error"), _inputs(fn, 70, device))


@pytest.mark.parametrize("fn", CASES)
def test_no_pair_is_stored(fn: Callable[..., Tensor]) -> None:
    n = 512
    with unrun():
        explanation = fl.explain(fn, *_inputs(fn, n, torch.device("cpu")))
    assert not any(graph.fallbacks or graph.left for graph in explanation.graphs)
    stored = [math.prod(s.shape) for graph in explanation.graphs for plan in graph.kernels for s in plan.stores]
    assert max(stored) < n * n
