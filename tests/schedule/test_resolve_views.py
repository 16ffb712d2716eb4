"""Views leave no trace, and a result that is a part of something has only that part stored."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import unrun

N, HEADS, DIM = 65, 2, 16


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 4


def added_in_place(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    s = scores(q, k)
    s.diagonal(dim1=-2, dim2=-1).add_(d)
    return s.softmax(-1) @ v


def embedded(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return (scores(q, k) + torch.diag_embed(d)).softmax(-1) @ v


def sink_for_each_row(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    return torch.cat([scores(q, k), d[..., None]], -1).softmax(-1)[..., :-1] @ v


def first_column(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.cat([s[..., :1] + d[..., None], s[..., 1:]], -1).softmax(-1) @ v


def part_returned(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Of several parts PyTorch keeps what they are parts of: they share its memory."""
    p = (scores(q, k) + d[..., None, :]).softmax(-1)
    return p @ v, p[..., ::9, 3]


def contrasted(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """The positives, returned, are what all the others are compared with, too."""
    s = scores(q, k) + d[..., None, :]
    own = s.diagonal(dim1=-2, dim2=-1)
    return s.logsumexp(-1) - own, own, (s - own[..., None]).softmax(-1) @ v


PROGRAMS = (added_in_place, embedded, sink_for_each_row, first_column, part_returned, contrasted)


def inputs(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(7)
    shapes = [(1, HEADS, N, DIM)] * 3 + [(1, HEADS, N)]
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", PROGRAMS)
def test_right(fn: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn, fallback="error"), inputs(device, dtype))


@pytest.mark.parametrize("fn", PROGRAMS)
def test_nothing_quadratic_is_stored(fn: Callable[..., Tensor]) -> None:
    with unrun():
        explanation = fl.explain(fn, *inputs(torch.device("cpu")))
    assert len(explanation.graphs) == 2
    for graph in explanation.graphs:
        assert graph.schedule and not graph.left
        for plan in (plan for kernels in graph.schedule.kernels for plan in kernels):
            for store in plan.stores:
                assert prod(store.shape) < HEADS * N * N, f"{plan.name} stores {store}"


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first row": lambda o: o[..., 0, :],
    "last row": lambda o: o[..., -1, :],
    "last rows": lambda o: o.transpose(1, 2)[:, -4:],
    "last rows of joined heads": lambda o: o.transpose(1, 2).flatten(2)[:, -4:],
    "every eighth row": lambda o: o[..., ::8, :],
    "features": lambda o: o[..., :4],
    "first row, projected": lambda o: o[..., 0, :].flatten(1) @ torch.eye(HEADS * DIM, device=o.device),
    "first row, gated": lambda o: o[..., 0, :].sigmoid(),
    "reversed": lambda o: o[..., :4, :].flip(-2),
}


@pytest.mark.parametrize("part", [pytest.param(f, id=name) for name, f in PARTS.items()])
def test_part_of_a_result(part: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """A token's row is computed alone where nothing else reads what it is a part of; gradients are right with it."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return part(scores(q, k).softmax(-1) @ v)

    operands = inputs(device)[:3]
    check_gradients(attention, fl.compile(attention, fallback="error"), operands)
    given = [t.detach() for t in operands]
    with unrun():
        explanation = fl.explain(attention, *given)
    stored = [s for g in explanation.graphs for plans in g.schedule.kernels for plan in plans for s in plan.stores]
    result = attention(*given)
    assert max(prod(s.shape) for s in stored) == result.numel(), f"{stored}"


def test_most_of_a_result(device: torch.device) -> None:
    """Of a larger part, with what the backward pass needs of all rows, one kernel computes scores once."""

    def all_but_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores(q, k).softmax(-1) @ v)[..., 1:, :]

    operands = inputs(device)[:3]
    check_gradients(all_but_one, fl.compile(all_but_one, fallback="error"), operands)
    with unrun():
        explanation = fl.explain(all_but_one, *operands)
    assert explanation.graphs[0].schedule and len(explanation.graphs[0].schedule.kernels) == 1


def test_rank_beside_the_positive(device: torch.device) -> None:
    """What is returned may be rounded, and is not what the scores are compared with."""

    def rank(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        s = scores(q, k)
        own = s.diagonal(dim1=-2, dim2=-1)
        return (s > own[..., None]).sum(-1), own

    q, k = (t.detach() for t in inputs(device)[:2])
    run_and_check(rank, fl.compile(rank, fallback="error"), (q, k))
