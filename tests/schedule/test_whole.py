"""Scores that are sums of products of small integers: quantised queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import run_and_check
from tests.unrun import explain


def quantised(q: Tensor, k: Tensor, scale: Tensor, v: Tensor) -> Tensor:
    """q and k [b,h,n,d] of 8 bits, of which the products are integers; scale [h,1,1] (SageAttention)."""
    return ((q.int() @ k.int().mT).to(v.dtype) * scale).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, scale: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = torch.einsum("bhid,bhjd->bhij", q.short().int(), k.long().int()) * scale
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def drawn(kind: torch.dtype, features: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(kind)
    q, k = torch.randint(limits.min, limits.max + 1, (2, 1, 2, 130, features), dtype=kind, generator=generator)
    q[..., 0, :], k[..., 0, :] = limits.min, limits.min  # the largest product there is
    v = torch.randn(1, 2, 130, 16, generator=generator)
    scale = torch.tensor([1e-4, 2e-4])[:, None, None]
    return [q.to(device), k.to(device), scale.to(dtype).to(device), v.to(dtype).to(device)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8])
@pytest.mark.parametrize("fn", [quantised, by_einsum])
def test_fuses(fn: Callable[..., Tensor], kind: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    given = drawn(kind, 16, dtype, device)
    if device.type == "cuda":
        # PyTorch multiplies no matrices of integers there.
        exact = fn(*(x.cpu().double() if x.is_floating_point() else x.cpu() for x in given))
        found = fl.compile(fn, fallback="error")(*given)
        torch.testing.assert_close(found.cpu().double(), exact, rtol=2**-7, atol=2**-8)
    else:
        run_and_check(fn, fl.compile(fn, fallback="error"), given)


def test_what_floats_may_not_hold_is_told() -> None:
    """Products of int16; and so many of uint8 that their sum has more than 24 bits."""
    explanation = explain(quantised, *drawn(torch.int16, 16, torch.float32, torch.device("cpu")))
    assert explanation.kernel_count == 0 and "of integers" in str(explanation.fallbacks[0])
    many = drawn(torch.uint8, 300, torch.float32, torch.device("cpu"))
    assert explain(quantised, *many).kernel_count == 0
    run_and_check(quantised, fl.compile(quantised), many)
