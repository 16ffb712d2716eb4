"""Gradients through a maximum: none where the result does not depend on it, and PyTorch's own where it does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def guarded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of which nothing is left are spared a NaN."""
    s = _scores(q, k).masked_fill(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(2), -math.inf)
    m = s.max(-1, keepdim=True)[0]
    e = (s - torch.where(m.isinf(), 0.0, m)).exp()
    return e @ v / e.sum(-1, keepdim=True)


def masked_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask multiplies the weights, and a gate the result."""
    s = _scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp() * torch.ones(q.shape[-2], k.shape[-2]).tril()
    return (e / e.sum(-1, keepdim=True)) @ v * q.sigmoid()


def with_a_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.cat([_scores(q, k), q.mean(-1, keepdim=True)], -1)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True))[..., :-1] @ v


def of_all_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    e = (s - s.max()).exp()
    return e @ v / e.sum(-1, keepdim=True)


def mean_beside(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, of which one is a logarithm."""
    s = _scores(q, k)
    m = s.amax(-1, keepdim=True)
    total = (s - m).exp().sum(-1, keepdim=True)
    return (s - m).exp() / total @ v, m + total.log()


def one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A constant beside the exponentials: the result does depend on the maximum."""
    s = _scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e @ v / (1 + e.sum(-1, keepdim=True))


def as_a_temperature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    return (s / s.amax(-1, keepdim=True).exp()).softmax(-1) @ v


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 19, 16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("fn", [guarded, masked_after, with_a_sink, of_all_rows, mean_beside])
def test_needs_no_gradient(fn: Callable[..., Tensor]) -> None:
    explanation = fl.explain(fn, *(x.requires_grad_() for x in inputs()))
    assert [g.name for g in explanation.graphs] == ["forward", "backward"]
    assert not any(g.fallbacks for g in explanation.graphs), explanation
    check_gradients(fn, fl.compile(fn, fallback="error"), inputs())


@pytest.mark.parametrize("fn", [one_more, as_a_temperature])
def test_needs_one(fn: Callable[..., Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        check_gradients(fn, fl.compile(fn), inputs())
    assert any(g.fallbacks for g in fl.explain(fn, *(x.requires_grad_() for x in inputs())).graphs)
