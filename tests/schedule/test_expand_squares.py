"""Sums of squared differences as products of matrices, where bfloat16 leaves the bits for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import Op, walk
from fl_pallas.schedule.plan import KernelPlan, expressions
from fl_pallas.schedule.text import plan_text
from tests.oracle import run_and_check
from tests.plan_evaluate import captured
from tests.unrun import unrun


def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-(q[:, None] - k[None]).pow(2).sum(-1) / 8).softmax(-1) @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The features as 8 points of 2 coordinates."""
    a, b = q.unflatten(-1, (8, 2)), k.unflatten(-1, (8, 2))
    return (-(a[:, None] - b[None]).pow(2).sum((-1, -2)) / 8).softmax(-1) @ v


def unrolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, one coordinate after the other, and weighted."""
    square = (q.unflatten(-1, (8, 2))[:, None] - k.unflatten(-1, (8, 2))[None]) ** 2
    return (-(sum(square.unbind(-1)) * 0.25).sum(-1)).softmax(-1) @ v


def text(fn, inputs) -> str:
    return "\n".join(plan_text(p) for plans in captured(fn, inputs).made.kernels for p in plans)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(45, 16, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("fn", [summed, twice, unrolled])
def test_becomes_a_product(fn, device: torch.device) -> None:
    given = [t.to(device) for t in inputs(torch.bfloat16)]
    assert "sum[r16]" in text(fn, given) and " * 2" in text(fn, given)
    run_and_check(fn, fl.compile(fn), given)


def test_squares_that_scale_squares() -> None:
    """The gradient of a factor of the distances: weights, made of squares, times squares."""

    def attend(q: Tensor, k: Tensor, v: Tensor, width: Tensor) -> Tensor:
        return (-(q[:, None] - k[None]).pow(2).sum(-1) * width).softmax(-1) @ v

    given = [*inputs(torch.bfloat16), torch.tensor(0.2, dtype=torch.bfloat16)]
    with unrun():
        graph = fl.explain(attend, *(t.requires_grad_() for t in given)).graphs[1]
    assert graph.kernels and all(_is_expanded(p) for p in graph.kernels)


def _is_expanded(plan: KernelPlan) -> bool:
    """Whether no difference of two tensors is squared."""
    products = (n for e in expressions(plan) for n in walk(e) if isinstance(n, Op) and n.name == "mul")
    return not any(n.args[0] is n.args[1] and isinstance(n.args[0], Op) and n.args[0].name == "sub" for n in products)


def test_points_that_coincide(device: torch.device) -> None:
    """Far from the origin and on top of each other: what cancels must leave nothing."""
    q, k, v = (t.to(device) for t in inputs(torch.bfloat16))
    run_and_check(summed, fl.compile(summed), [q + 20, q + 20, v])
    run_and_check(summed, fl.compile(summed), [q, k - 4, v])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_not_where_digits_would_be_lost(dtype: torch.dtype) -> None:
    assert " * 2" not in text(summed, inputs(dtype))


def test_not_what_was_computed() -> None:
    """A factor in float32 before the difference: no product of such operands is exact."""
    assert " * 2" not in text(lambda q, k, v: summed(q * 0.3, k, v), inputs(torch.bfloat16))


def test_not_along_one_operand() -> None:
    """Variance: the mean is no other side of a matrix."""

    def spread(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ (v - v.mean(-1, keepdim=True)).pow(2)

    assert " * 2" not in text(spread, inputs(torch.bfloat16))


def distances(x: Tensor, v: Tensor) -> Tensor:
    return (-(x[:, None] - x[None]).pow(2).sum(-1).sqrt()).softmax(-1) @ v


def inverse_distances(x: Tensor, v: Tensor) -> Tensor:
    weights = 1 / (0.01 + (x[:, None] - x[None]).pow(2).sum(-1))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def nearest(x: Tensor, v: Tensor) -> Tensor:
    """The least of the distances is a result itself."""
    return (x[:, None] - v[None]).pow(2).sum(-1).amin(-1)


@pytest.mark.parametrize("fn", [distances, inverse_distances, nearest])
def test_not_where_what_is_left_of_equal_points_counts(fn, device: torch.device) -> None:
    """A point is at a distance of 0 from itself, and not the root of a rounding, nor NaN."""
    x, v = torch.randn(300, 3, dtype=torch.bfloat16), torch.randn(300, 3, dtype=torch.bfloat16)
    given = [x.to(device), (x if fn is nearest else v).to(device)]
    run_and_check(fn, fl.compile(fn, fallback="error"), given)
