"""What a distance decides by costly steps is stored once for each distance."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.passes import distances
from fl_pallas.schedule.text import plan_text
from tests.oracle import check_gradients
from tests.unrun import unrun


def bucket(far: Tensor) -> Tensor:
    return torch.where(far < 4, far, (4 + torch.log(far.clamp(min=1) / 4) * 3).long().clamp(max=11))


def causal(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """T5's decoder: table [12,h]."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    far = i[:, None] - j
    scores = q @ k.mT / 4 + F.embedding(bucket(far.clamp(min=0)), table).permute(2, 0, 1)
    return scores.masked_fill(far < 0, -math.inf).softmax(-1) @ v


def both_ways(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [12,h], added and multiplied; keys and queries of other lengths."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    near = table[bucket((j - i[:, None]).abs())].permute(2, 0, 1)
    return ((q @ k.mT / 4 + near) * near.sigmoid()).softmax(-1) @ v


def by_sum(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A place that the sum of two positions decides, shifted by the head."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    at = (torch.sqrt((i[:, None] + j + 3).float()).long() % 12).expand(q.shape[1], -1, -1)
    heads = torch.arange(q.shape[1], device=q.device)[:, None, None]
    return (q @ k.mT / 4 + table[at, heads]).softmax(-1) @ v


def two_distances(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A place that no one distance decides: of rows and of columns."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    rows, columns = i[:, None] // 8 - j // 8, i[:, None] % 8 - j % 8
    far = bucket((rows * rows + columns * columns).float().sqrt().long())
    return (q @ k.mT / 4 + table[far].permute(2, 0, 1)).softmax(-1) @ v


def kerple(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes [12,h], of which the first two count: a logarithm of a distance, of each head."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    scale, rate = (s.abs()[:, None, None] for s in slopes[:2])
    return (q @ k.mT / 4 - scale * torch.log1p(rate * (i[:, None] - j).abs())).softmax(-1) @ v


def waves(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Two costly steps after each other, and one by themselves; a mask of one of them."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    near = torch.log1p((i[:, None] - j).abs().to(q.dtype))
    turned = (slopes[0][:, None, None] * near).cos()
    return ((q @ k.mT / 4 + turned) * near).masked_fill(near > 4, -math.inf).softmax(-1) @ v


def inputs(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator) for n in (length, length + 5, length + 5))
    return [x.to(dtype).to(device) for x in (q, k, v, torch.randn(12, 3, generator=generator))]


@pytest.fixture
def eager_to_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short lengths as long ones."""
    monkeypatch.setattr(distances, "LEAST", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fn", [causal, both_ways, by_sum, two_distances, kerple, waves])
@pytest.mark.usefixtures("eager_to_store")
def test_gradients(fn: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn), inputs(75, dtype, device))


@pytest.mark.parametrize("fn, tables", [(causal, 1), (both_ways, 1), (by_sum, 1), (two_distances, 0), (kerple, 1)])
@pytest.mark.usefixtures("eager_to_store")
def test_one_table_serves_all_kernels(fn: Callable[..., Tensor], tables: int, device: torch.device) -> None:
    """Those of queries and of keys look from either side."""
    given = [x.requires_grad_() for x in inputs(512, torch.bfloat16, device)]
    with unrun():
        graphs = fl.explain(fn, *given).graphs
    for graph in graphs:
        assert not graph.fallbacks
        stores = [s for plan in graph.kernels for s in plan.stores if "_x" in s.name]
        assert [s.shape for s in stores] == [(3, 512 + 517 - 1)] * tables
        costly = [plan for plan in graph.kernels if plan.loops and "log(f32" in plan_text(plan)]
        assert not tables or not any(len(loop.steps) > 1 for plan in costly for loop in plan.loops)


def test_few_elements_are_not_worth_a_launch(device: torch.device) -> None:
    with unrun():
        assert fl.explain(causal, *inputs(100, torch.bfloat16, device)).kernel_count == 1


def waves_added(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """A learned bias of each head: w [12,h], the first half frequencies, the others how much they count."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    rates, shares = w.T.chunk(2, -1)
    bias = (shares[:, None, None] * torch.cos((i[:, None] - j)[..., None] * rates[:, None, None] / 8)).sum(-1)
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sums_by_distance(dtype: torch.dtype, device: torch.device) -> None:
    """One bias for each distance, and one number of each diagonal for all its gradients: none for each pair."""
    check_gradients(waves_added, fl.compile(waves_added), inputs(75, dtype, device))
    given = [x.requires_grad_() for x in inputs(512, dtype, device)]
    with unrun():
        graphs = fl.explain(waves_added, *given).graphs
    stores = [s for graph in graphs for plan in graph.kernels for s in plan.stores]
    assert not any(graph.fallbacks for graph in graphs)
    assert any(s.shape == (3, 1028) for s in stores) and not any({512, 517} <= {*s.shape} for s in stores)
