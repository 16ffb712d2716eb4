"""Matrices that a loop writes row by row, each made of those before: the loop is PyTorch's, what reads them fuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.in_turn import MAX_PARTS

from .oracle import check_gradients
from .unrun import unrun


def inverted(k: Tensor, size: int) -> Tensor:
    """(1 + tril(k kᵀ))⁻¹, as Hugging Face's chunks of the delta rule have it."""
    a = -(k @ k.mT).masked_fill(torch.ones(size, size, dtype=torch.bool, device=k.device).triu(0), 0)
    for i in range(1, size):
        row, before = a[..., i, :i].clone(), a[..., :i, :i].clone()
        a[..., i, :i] = row + (row[..., None] * before).sum(-2)
    return a + torch.eye(size, device=k.device)


def delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ (inverted(k, k.shape[-2]) @ v)


def refined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A statistic refined many times, under a mask of constant length: no part is made of another."""
    s, i = q @ k.mT, torch.arange(k.shape[-2], device=k.device)
    s = torch.where(i < k.shape[-2] - 3, s, -50.0)
    t = s.amax(-1, keepdim=True) - 1
    for n in range(MAX_PARTS + 4):
        w = torch.where(i < k.shape[-2] - 3, (s - t).clamp(min=0), 0.0)
        t = t + 0.5**n * (w.sum(-1, keepdim=True) - 1).sign()
    return (s - t).clamp(min=0) @ v


def made(size: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = (torch.randn(2, 2, size, 8, generator=generator).to(device) for _ in range(3))
    return [torch.nn.functional.normalize(x, dim=-1).requires_grad_() for x in inputs]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.parametrize("size", [5, MAX_PARTS + 6])
def test_rows_in_turn(size: int, device: torch.device) -> None:
    inputs = made(size, device)
    with unrun():
        explained = fl.explain(delta, *[x.detach() for x in inputs])
    looped = [f for f in explained.fallbacks if "made of those before" in str(f)]
    assert bool(looped) == (size > MAX_PARTS)
    assert explained.kernels
    check_gradients(delta, fl.compile(delta), [x.detach() for x in inputs])


def test_steps_are_no_parts() -> None:
    with unrun():
        explained = fl.explain(refined, *[x.detach() for x in made(40, torch.device("cpu"))])
    assert not explained.fallbacks
