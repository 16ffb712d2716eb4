"""Tables of few rows: products with them are made once for each row, and looked up."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check, check_gradients
from tests.programs import BY_NAME
from tests.unrun import unrun

ROWS = 9


def clamped(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Shaw's keys: a vector for each clamped distance."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    near = (i[:, None] - j).clamp(-4, 4) + 4
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, table[near])
    return (scores / 4).softmax(-1) @ v


def by_keys(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """As DeBERTa gathers them, for keys."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    near = ((j[:, None] - i).clamp(-4, 4) + 4).expand(*k.shape[:2], -1, -1)
    return ((q @ k.mT + torch.gather(k @ table.mT, -1, near).mT) / 4).softmax(-1) @ v


def by_kind(q: Tensor, k: Tensor, v: Tensor, table: Tensor, kind: Tensor) -> Tensor:
    """A vector for each kind of pair, which is data."""
    scores = q @ k.mT + torch.einsum("bhid,bijd->bhij", q, table[kind])
    return (scores / 4).softmax(-1) @ v


def by_kind_of_one_head(q: Tensor, k: Tensor, v: Tensor, table: Tensor, kind: Tensor) -> Tensor:
    """TiSASRec: the vectors of pairs have all axes of the scores."""
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    scores = q @ k.mT + (table[kind] @ q.unsqueeze(-1)).squeeze(-1)
    return (scores / 4).softmax(-1) @ v


def draw(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator) for n in (length, length + 3, length + 3))
    table = torch.randn(ROWS, 16, generator=generator)
    kind = torch.randint(ROWS, (2, length, length + 3), generator=generator)
    return [*(t.to(dtype).to(device) for t in (q, k, v, table)), kind.to(device)]


VARIANTS: list[tuple[Callable, int]] = [(clamped, 4), (by_keys, 4), (by_kind, 5), (by_kind_of_one_head, 5)]


@pytest.mark.parametrize("fn, count", [(clamped, 4), (by_kind, 5), (by_kind_of_one_head, 5)])
def test_a_kernel_stores_what_is_looked_up(fn: Callable, count: int, device: torch.device) -> None:
    with unrun(), torch.no_grad():
        (graph,) = fl.explain(fn, *draw(70, torch.float32, device)[:count]).graphs
    assert not graph.fallbacks
    first, *_ = graph.kernels
    assert [s.shape[-1] for s in first.stores] == [ROWS]


@pytest.mark.parametrize("fn", [by_kind, by_kind_of_one_head])
def test_nothing_of_pairs_is_kept(fn: Callable) -> None:
    """What a pair's vector gives is no statistic of a row: the backward pass looks it up again."""
    inputs = (x.requires_grad_(x.is_floating_point()) for x in draw(70, torch.float32, torch.device("cpu")))
    with unrun():
        forward, _ = fl.explain(fn, *inputs).graphs
    assert not forward.left and not forward.fallbacks
    assert max(math.prod(s.shape) for plan in forward.kernels for s in plan.stores) < 2 * 70 * 73


def test_long_tables_are_not() -> None:
    """As many rows as there are distances: the scores themselves would be no larger."""
    with unrun(), torch.no_grad():
        (graph,) = fl.explain(clamped, *draw(12, torch.float32, torch.device("cpu"))[:4]).graphs
    assert len(graph.kernels) == 1


def test_rows_that_a_position_shifts_are_not() -> None:
    """Gradients of relative positions read keys at i + p: half as many keys as positions, but each once for a query."""
    case = BY_NAME["xlnet"]
    inputs = (x.requires_grad_() for x in case.make_inputs(64, torch.bfloat16, "cpu"))
    with unrun():
        _, backward = fl.explain(case.target(torch.bfloat16, "cpu"), *inputs).graphs
    assert max(math.prod(s.shape) for plan in backward.kernels for s in plan.stores) < 2 * 2 * 64 * 64


@pytest.mark.filterwarnings("ignore::fl_pallas.errors.FallbackWarning")  # gradients of the vectors of all pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn, count", VARIANTS)
def test_matches(fn: Callable, count: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = draw(70, dtype, device)[:count]
    compiled = fl.compile(fn)
    with torch.no_grad():
        check(fn, inputs, compiled(*inputs))
    check_gradients(fn, compiled, inputs)


def test_deberta(device: torch.device) -> None:
    case = BY_NAME["disentangled"]
    inputs = case.make_inputs(100, torch.float32, device)
    check(case.fn, inputs, fl.compile(case.fn)(*inputs))


def in_another_order(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Queries and keys of scores change places, as data says."""
    scores = (q @ k.mT)[:, :, rows][..., columns]
    return (scores / 4).softmax(-1) @ v


def test_scores_whose_rows_and_columns_change_places_are_not_stored(device: torch.device) -> None:
    q, k, v = draw(150, torch.float32, device)[:3]
    inputs = (q, k, v, torch.randperm(150, device=device), torch.randperm(153, device=device))
    (graph,) = fl.explain(in_another_order, *inputs).graphs
    assert graph.schedule is not None and not graph.fallbacks
    (region,) = graph.schedule.regions
    assert region.large and not {s.name for p in graph.schedule.kernels[0] for s in p.stores} & region.large
    check(in_another_order, inputs, fl.compile(in_another_order)(*inputs))
