"""A number beside a row's scores: the loop goes over these alone, and once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check, check_gradients
from tests.unrun import explain, unrun

KEYS = 50


def scores(q: Tensor, k: Tensor) -> Tensor:
    i = torch.arange(KEYS, device=q.device)
    return (q @ k.mT / 4).masked_fill(i[:, None] < i, -math.inf)


def zero_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax that may leave some of its weight to nothing."""
    s = scores(q, k)
    return torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1] @ v


def number_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.cat([torch.full_like(s[..., :1], 2.0), s], -1).softmax(-1)[..., 1:] @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.pad(scores(q, k), (1, 0)).softmax(-1)[..., 1:] @ v


def zero_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `nn.MultiheadAttention` adds it."""
    k, v = (torch.cat([t, torch.zeros_like(t[..., :1, :])], -2) for t in (k, v))
    return (q @ k.mT / 4).softmax(-1) @ v


def first_hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask: it stays in the loop, whose tiles are aligned."""
    hidden = torch.arange(KEYS, device=q.device) < 1
    return (q @ k.mT / 4).masked_fill(hidden, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [zero_behind, number_before, padded, zero_key, first_hidden])
def test_one_loop_over_keys(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    inputs = [torch.randn(2, 2, KEYS, 16).to(device, dtype) for _ in range(3)]
    with unrun():
        (plan,) = fl.explain(fn, *inputs).kernels
    assert [loop.axis.extent for loop in plan.loops] == [KEYS]
    check(fn, inputs, fl.compile(fn)(*inputs))
    check_gradients(fn, fl.compile(fn), inputs)


def turned_behind_the_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotary positions of all tokens but the first three, as vision transformers with registers have them."""
    angle = torch.arange(KEYS - 3, device=q.device)[:, None] / (1 + torch.arange(8, device=q.device))

    def turned(x: Tensor) -> Tensor:
        first, (a, b) = x[..., :3, :], x[..., 3:, :].chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([first, torch.cat([a * cos - b * sin, a * sin + b * cos], -1)], -2)

    return F.scaled_dot_product_attention(turned(q), turned(k), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_turned_from_some_on(dtype: torch.dtype, device: torch.device) -> None:
    """One loop over them, of which nothing is known twice: two kernels in the backward pass, one of 16 bits."""
    inputs = [torch.randn(2, 2, KEYS, 16).to(device, dtype).requires_grad_() for _ in range(3)]
    assert [len(g.kernels) for g in explain(turned_behind_the_first, *inputs).graphs] == [
        1,
        2 if dtype == torch.float32 else 1,
    ]
    check_gradients(turned_behind_the_first, fl.compile(turned_behind_the_first), inputs)
