"""Decays of each channel (gated linear attention, RWKV 6): three operands, of which one is of pairs and channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import unrun


def decay(c: Tensor) -> Tensor:
    return torch.exp(-(c[:, :, :, None] - c[:, :, None]).abs())


def decay_last(r: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("bhid,bhjd,bhijd->bhij", r, k, decay(c)) @ v


def decay_second(r: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("bhid,bhijd,bhjd->bhij", r, decay(c), k) @ v


def all_at_once(r: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("bhid,bhijd,bhjd,bhje->bhie", r, decay(c), k, v)


def normalised(r: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("bhid,bhjd,bhijd->bhij", r, k, decay(c)).softmax(-1) @ v


FORMS = [decay_last, decay_second, all_at_once, normalised]


def given(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, d, generator=generator).to(dtype) for d in (8, 8, 16, 8)]


@pytest.mark.parametrize("fn", FORMS)
def test_each_form_fuses(fn: Callable) -> None:
    with unrun():
        explanation = fl.explain(fn, *(t.requires_grad_() for t in given(64)))
    forward, backward = explanation.graphs
    assert len(forward.kernels) == 1 and len(backward.kernels) <= 3 and not explanation.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", FORMS)
def test_gradients(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn, fallback="error"), [t.to(device) for t in given(70, dtype)])
