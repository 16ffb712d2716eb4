"""Tensors whose memory does not hold their elements: PyTorch's efficient zeros, which have none, and negatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def tangent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Along `v`, by forward-mode differentiation, whose tangents of `k` and `v` are efficient zeros."""
    return torch.func.jvp(lambda x: attend(x, k, v), (q,), (v,))[1]


def zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch._efficientzerotensor(shape, device=device)


def negative(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.cfloat, device=device).conj().imag


@pytest.mark.parametrize("make", [zeros, negative])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_arguments(make: Callable[..., Tensor], place: int, device: torch.device) -> None:
    compiled = fl.compile(attend)
    # Others of the same shapes before, and after.
    for own in (None, place, None):
        args = [make((2, 17, 16), device) if n == own else torch.randn(2, 17, 16, device=device) for n in range(3)]
        torch.testing.assert_close(compiled(*args), attend(*args), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", [zeros, negative])
def test_gradients(make: Callable[..., Tensor], device: torch.device) -> None:
    args = [torch.randn(2, 17, 16, device=device, requires_grad=True) for _ in range(3)]
    given = make((2, 17, 16), device)
    expected = torch.autograd.grad(attend(*args), args, given)
    for found, right in zip(torch.autograd.grad(fl.compile(attend)(*args), args, given), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_forward_mode_inside(device: torch.device) -> None:
    args = [torch.randn(2, 17, 16, device=device, requires_grad=True) for _ in range(3)]
    out, expected = fl.compile(tangent)(*args), tangent(*args)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    given = torch.randn_like(out)
    found = torch.autograd.grad(out, args, given)
    for own, right in zip(found, torch.autograd.grad(expected, args, given), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-3)
