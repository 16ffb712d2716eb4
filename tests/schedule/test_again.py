"""Scores that wait for an operation of PyTorch's, which waits for a statistic of them, are computed again behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain, unrun

N = 129


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 4


def heavy_hitters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """H2O: keys that all queries together attend to most, and the row's own."""
    i = torch.arange(N, device=q.device)
    s = scores(q, k).masked_fill(i[:, None] < i, -torch.inf)
    kept = s.softmax(-1).sum(-2).topk(12, -1).indices
    keep = torch.zeros_like(s[..., 0, :], dtype=torch.bool).scatter(-1, kept, True)[..., None, :] | (i[:, None] == i)
    return s.masked_fill(~keep, -torch.inf).softmax(-1) @ v


def pruned_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Half of the keys, and of these a third (SpAtten)."""
    s = scores(q, k)
    for kept in (64, 20):
        importance = s.softmax(-1).sum(-2)
        least = importance.topk(kept, -1).values[..., -1:]
        s = s.masked_fill((importance < least)[..., None, :], -torch.inf)
    return s.softmax(-1) @ v


def monotone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A second look around where the first one was, on average, which may not go back."""
    s, j = scores(q, k), torch.arange(N, dtype=q.dtype, device=q.device)
    centre = (s.softmax(-1) @ j).cummax(-1).values
    return (s - ((j - centre[..., None]) / 20) ** 2).softmax(-1) @ v


def by_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    rank = s.amax(-1).argsort(-1).argsort(-1)
    return (s * (1 + rank[..., None].to(q.dtype) / 50)).softmax(-1) @ v


def so_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s - s.logsumexp(-1, keepdim=True).cumsum(-2) / 100).exp() @ v


def sorted_maxima(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A maximum whose gradient counts: the comparison with it, computed again, is PyTorch's all the same."""
    s = scores(q, k)
    largest = s.amax(-1)
    return (s * largest.sort(-1).values.sigmoid()[..., None]).softmax(-1) @ v + largest[..., None]


def over_running_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).sigmoid().cumsum(-1) / 10
    return (s - s.logsumexp(-1).cummax(-1).values[..., None]).exp() @ v


def above_the_fifth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is compared with a score that PyTorch chose has to be that score, to the last bit."""
    s = scores(q, k)
    fifth = s.amax(-1).topk(5, -1).values[..., -1:, None]
    return torch.where(s >= fifth, s, s - 1).softmax(-1) @ v


def inputs(device: torch.device) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 2, N, 16, device=device, requires_grad=True) for _ in range(3)]


PROGRAMS = (heavy_hitters, pruned_twice, monotone, by_rank, so_far, sorted_maxima, over_running_sums)


@pytest.mark.parametrize("fn", PROGRAMS)
def test_both_sides_fuse(fn: Callable[..., Tensor], device: torch.device) -> None:
    given = inputs(device)
    compiled = fl.compile(fn, fallback="error")
    run_and_check(fn, compiled, [t.detach() for t in given])
    check_gradients(fn, compiled, given)


@pytest.mark.parametrize("fn", PROGRAMS)
def test_no_scores_are_stored(fn: Callable[..., Tensor]) -> None:
    with unrun():
        explanation = fl.explain(fn, *inputs(torch.device("cpu")))
    assert len(explanation.graphs) == 2
    for graph in explanation.graphs:
        assert graph.kernels and not any(s.shape[-2:] == (N, N) for plan in graph.kernels for s in plan.stores)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_what_pytorch_chose_is_compared_with_what_it_chose_from(device: torch.device) -> None:
    run_and_check(above_the_fifth, fl.compile(above_the_fifth), [t.detach() for t in inputs(device)])
    found = explain(above_the_fifth, *(t.detach() for t in inputs(device)))
    assert [f.what for f in found.fallbacks] == ["aten.topk.default"]


def test_pages_by_their_bounds(device: torch.device) -> None:
    """Quest: pages of keys are chosen by the most that a query may score there, which a kernel stores for PyTorch."""

    def by_pages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = k.unflatten(-2, (-1, 16))
        high, low = (t[..., None, :, :] for t in (pages.amax(-2), pages.amin(-2)))
        bound = torch.maximum(q[..., None, :] * high, q[..., None, :] * low).sum(-1)
        kept = bound >= bound.topk(3, -1).values[..., -1:]
        return scores(q, k).masked_fill(~kept.repeat_interleave(16, -1), -torch.inf).softmax(-1) @ v

    q, k, v = (torch.randn(1, 2, 128, 16, device=device, requires_grad=True) for _ in range(3))
    compiled = fl.compile(by_pages, fallback="error")
    check_gradients(by_pages, compiled, [q, k, v])
    stored = [s.shape for plan in explain(by_pages, q.detach(), k, v).graphs[0].kernels for s in plan.stores]
    assert max(shape[-1] for shape in stored) == 16 and any(shape[-2:] == (128, 8) for shape in stored), f"{stored}"


JUMPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sign": lambda s, t: torch.sign(s - t) * 3,
    "root": lambda s, t: (t - s).sqrt(),
    "logarithm": lambda s, t: (t - s + 1e-9).log(),
    "floor": lambda s, t: (s - t).floor(),
    "cast": lambda s, t: ((s - t) * 2).long() / 4,
}


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.parametrize("jump", [pytest.param(f, id=name) for name, f in JUMPS.items()])
def test_what_jumps_is_of_the_scores_that_pytorch_saw(
    jump: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> None:
    """In 16 bits the largest so far is rounded, and what is computed again is not: it may be larger than that."""

    def below_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        return jump(s, s.amax(-1).cummax(-1).values[..., None]).to(q.dtype).softmax(-1) @ v

    given = [t.detach().bfloat16() for t in inputs(device)]
    run_and_check(below_the_largest, fl.compile(below_the_largest), given)
