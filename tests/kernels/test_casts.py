"""What was cast from 16 bits alone is multiplied in 16 bits, beside float32 in parts: as exact as float32."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check, check_gradients

KEYS = 70


def scores_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.float() @ k.float().mT / 4).softmax(-1).to(v.dtype) @ v


def all_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.float() @ k.float().mT / 4).softmax(-1) @ v.float()


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-torch.cdist(q.float(), k.float()).square() / 4).softmax(-1).to(v.dtype) @ v


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sides that are computed stay float32."""
    return torch.tril((q.float() + 1) @ (k.float() * 1.7 + 0.1).mT) @ v.float()


PROGRAMS = [scores_in_float32, all_in_float32, distances]


def products(fn: Callable, inputs: list[Tensor]) -> set[tuple[str, str]]:
    """The types of both sides of all matrix products."""
    texts = [lower(plan).ttir for plan, lower in kernels_made(fn, inputs)]
    found = (re.finditer(r"tt\.dot .*: tensor<\d+x\d+x(\w+)> \* tensor<\d+x\d+x(\w+)>", text) for text in texts)
    return {(m[1], m[2]) for some in found for m in some}


@pytest.mark.parametrize("fn", [scores_in_float32, distances])
def test_multiplied_as_they_lie(fn: Callable) -> None:
    inputs = [torch.empty(1, 2, 256, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    assert products(fn, inputs) == {("bf16", "bf16")}
    # float32 has a wider range than the parts of a number of float16 would.
    inputs = [torch.empty(1, 2, 256, 64, dtype=torch.float16).requires_grad_() for _ in range(3)]
    assert products(fn, inputs) == {("f16", "f16"), ("f32", "f32")}


def test_weights_in_parts() -> None:
    inputs = [torch.empty(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    assert products(all_in_float32, inputs) == {("bf16", "bf16")}


def test_other_sides_stay() -> None:
    inputs = [torch.empty(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    assert ("f32", "f32") in products(shifted, inputs)
    assert products(all_in_float32, [t.float() for t in inputs]) == {("f32", "f32")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [*PROGRAMS, shifted])
def test_right(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    inputs = [torch.randn(1, 2, KEYS, 16).to(device, dtype) for _ in range(3)]
    check(fn, inputs, fl.compile(fn)(*inputs))
    check_gradients(fn, fl.compile(fn), inputs)


def test_as_exact_as_float32(device: torch.device) -> None:
    """And keys that have a part in common, of which a row's gradient has none."""
    q, k, v = (torch.randn(1, 2, KEYS, 16).to(device, torch.bfloat16) for _ in range(3))
    k = k + 8
    out = fl.compile(all_in_float32)(q, k, v)
    exact = (q.double() @ k.double().mT / 4).softmax(-1) @ v.double()
    assert (out - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_not_finite(value: float, at: int, device: torch.device) -> None:
    """Parts of a weight would make NaN of what is infinite."""
    inputs = [torch.randn(1, 2, KEYS, 16).to(device, torch.bfloat16) for _ in range(3)]
    inputs[at][0, 1, 5, 3] = value
    check(all_in_float32, inputs, fl.compile(all_in_float32)(*inputs))
