"""Squared distances of `torch.cdist`: no root is taken, and what is left is a product of matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import Op, Reduce, free_axes, walk
from fl_pallas.schedule.plan import expressions
from tests.oracle import check_gradients
from tests.unrun import explain


def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """x-transformers' scores by distance."""
    return (-(torch.cdist(q, k) ** 2) / 8).softmax(-1) @ v


def among_themselves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-(torch.cdist(q, q) ** 2) / 8).softmax(-1) @ (k * v)


def gaussian(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d = torch.cdist(q, k)
    return torch.exp(-d * d / 16) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-torch.cdist(q, k)).softmax(-1) @ v


def made(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.randn(2, 2, length, 32, dtype=dtype, device=device) for _ in range(3)]


def roots(fn: object) -> list[Op]:
    inputs = [x.requires_grad_() for x in made(512, torch.bfloat16, torch.device("cpu"))]
    plans = explain(fn, *inputs).kernels
    return [n for p in plans for e in expressions(p) for n in walk(e) if isinstance(n, Op) and n.name == "sqrt"]


@pytest.mark.parametrize("fn", [squared, among_themselves, gaussian])
def test_no_root_is_taken(fn: object) -> None:
    assert not roots(fn)


def test_a_distance_has_one() -> None:
    assert roots(plain)


def test_squares_are_products_of_matrices() -> None:
    inputs = [x.requires_grad_() for x in made(512, torch.bfloat16, torch.device("cpu"))]
    for plan in explain(squared, *inputs).kernels:
        sums = [n for e in expressions(plan) for n in walk(e) if isinstance(n, Reduce)]
        differences = [n for r in sums for n in walk(r.body) if isinstance(n, Op) and n.name == "sub"]
        assert sums and not any(len(free_axes(d)) > 4 for d in differences), plan.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [squared, among_themselves, gaussian])
def test_gradients(fn: object, dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn), made(40, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_points_that_are_one(dtype: torch.dtype, device: torch.device) -> None:
    q, _, v = made(40, dtype, device)
    check_gradients(squared, fl.compile(squared), [q, q.clone(), v])
