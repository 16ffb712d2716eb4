"""Floats of eight bits are read as they are, and computed with as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import run_and_check
from tests.unrun import unrun

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype))


def appended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Behind a cache of eight bits, what is new, of more."""
    return plain(q, torch.cat([k.to(q.dtype), q], -2), torch.cat([v.to(q.dtype), q], -2))


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ q.mT + k[..., :1].to(q.dtype).mT).softmax(-1) @ v.to(q.dtype)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Joined and moved before they are cast."""
    both = torch.stack([k, v]).flip(-2).to(q.dtype)
    return (q @ both[0].mT / 4).softmax(-1) @ both[1]


def drawn(dtype: torch.dtype, narrow: torch.dtype, device: torch.device) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 70, 16, generator=gen).to(device) for _ in range(3))
    return [q.to(dtype), k.to(narrow), v.to(narrow)]


@pytest.mark.parametrize("narrow", NARROW, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fn", [plain, appended, biased, turned])
def test_right(fn: Callable[..., Tensor], dtype: torch.dtype, narrow: torch.dtype, device: torch.device) -> None:
    run_and_check(fn, fl.compile(fn, fallback="error"), drawn(dtype, narrow, device))


@pytest.mark.parametrize("fn", [plain, biased, turned])
def test_nothing_is_cast_beforehand(fn: Callable[..., Tensor]) -> None:
    with unrun():
        explanation = fl.explain(fn, *drawn(torch.bfloat16, torch.float8_e4m3fn, torch.device("cpu")))
    (graph,) = explanation.graphs
    assert explanation.kernel_count == 1 and "aten._to_copy.default" not in dict(graph.left)


def test_not_numbers(device: torch.device) -> None:
    """(PyTorch's own kernels for a GPU make NaN of an infinite value.)"""
    q, k, v = drawn(torch.float32, torch.float8_e5m2, device)
    v = v.float()
    v[0, 1, 3, 2], v[1, 0, 5, 7] = torch.nan, torch.inf
    run_and_check(turned, fl.compile(turned), [q, k, v.to(torch.float8_e5m2)])


def test_gradients(device: torch.device) -> None:
    q, k, v = drawn(torch.float32, torch.float8_e4m3fn, device)
    found = []
    for f in (plain, fl.compile(plain)):
        asked = q.clone().requires_grad_()
        (f(asked, k, v) * q).sum().backward()
        found.append(asked.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
