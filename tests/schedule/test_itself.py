"""A score that is compared with itself is equal to itself, wherever PyTorch reads it from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import run_and_check
from tests.unrun import unrun


def own(s: Tensor) -> Tensor:
    return s.diagonal(dim1=-2, dim2=-1)[..., None]


def rank(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = x @ y.mT
    return (s > own(s)).sum(-1)


def ties(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = (x @ y.mT) * 3 + 1
    return (s >= own(s)).sum(-1)


def labelled(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = x @ y.mT
    return (s > s.gather(-1, t[..., None])).sum(-1)


def by_columns(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = x @ y.mT
    return (s > own(s).mT).sum(-2)


def signs(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = x @ y.mT
    return torch.sign(s - own(s)).sum(-1)


def of_weights(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    p = (x @ y.mT).softmax(-1)
    return (p > own(p)).sum(-1)


def first(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = x @ y.mT
    return (s >= s[..., :1]).to(y.dtype) @ y


def hard_negatives(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = x @ y.mT
    return s.masked_fill(s >= own(s), -1e4).amax(-1)


def turned(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """Of two sums that have all axes, and are the same on the diagonal."""
    s = x @ y.mT
    return (s >= s.mT).sum(-1)


def two_others(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    s = x @ y.mT
    return (s >= torch.maximum(own(s), s[..., :1])).sum(-1)


PROGRAMS = (rank, ties, labelled, by_columns, signs, of_weights, first, hard_negatives, turned, two_others)


@pytest.mark.parametrize("n", [33, 64])
@pytest.mark.parametrize("fn", PROGRAMS)
def test_equal_to_itself(fn: Callable[..., Tensor], n: int, device: torch.device) -> None:
    torch.manual_seed(n)
    x, y = (torch.randn(2, n, 24, device=device) for _ in range(2))
    t = torch.randint(0, n, (2, n), device=device)
    run_and_check(fn, fl.compile(fn, fallback="error"), (x, y, t))


def test_infinite_scores(device: torch.device) -> None:
    """NaN is equal to nothing, itself included."""
    x, y = torch.randn(2, 33, 24, device=device), torch.randn(2, 33, 24, device=device)
    x[0, 3], y[1, 5] = float("inf"), float("nan")
    t = torch.randint(0, 33, (2, 33), device=device)
    for fn in (ties, labelled):
        assert torch.equal(fl.compile(fn)(x, y, t), fn(x, y, t))


def test_what_does_not_jump_is_left_alone() -> None:
    """A contrastive loss takes the difference from its own score for each: a compare more, and nothing gained."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        s = x @ y.mT
        return (s - own(s)).logsumexp(-1)

    x, y, t = torch.randn(2, 64, 16), torch.randn(2, 64, 16), torch.zeros(2, 64, dtype=torch.int64)
    with unrun():
        assert "j0 == x1" not in str(fl.explain(loss, x, y))
        assert "j0 == x1" in str(fl.explain(rank, x, y, t))
