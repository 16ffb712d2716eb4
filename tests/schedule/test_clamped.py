"""Scores of relative positions within two ends, of longer tables than whose entries would ask every pair: their
gradient is a diagonal, and two sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import explain

LENGTH, SPAN = 150, 140


def curves(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A curve over distances for each query; table [h,b,r], of which keys ahead and far behind take the ends."""
    i = torch.arange(q.shape[-2], device=q.device)
    distance = (i[:, None] - i).clamp(0, table.shape[-2] - 1)
    bias = (q @ table.mT).gather(-1, distance.expand(*q.shape[:-1], -1))
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


def causal_curves(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """x-transformers': nothing beyond the ends."""
    i = torch.arange(q.shape[-2], device=q.device)
    apart, far = i[:, None] - i, table.shape[-2]
    bias = (q @ table.mT).gather(-1, apart.clamp(0, far - 1).expand(*q.shape[:-1], -1))
    bias = bias.masked_fill((apart < 0) | (apart >= far), 0)
    return (q @ k.mT / 4 + bias).masked_fill(apart < 0, -torch.inf).softmax(-1) @ v


def disentangled(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """DeBERTa: content to position, and position to content."""
    i, far = torch.arange(q.shape[-2], device=q.device), table.shape[-2]
    index = (i[:, None] - i + far // 2).clamp(0, far - 1)
    c2p = (q @ table.mT).gather(-1, index.expand(*q.shape[:-1], -1))
    p2c = (k @ table.flip(-1).mT).gather(-1, index.expand(*q.shape[:-1], -1)).mT
    return ((q @ k.mT + c2p + p2c) / 7).softmax(-1) @ v


def within(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Ends that lie within the table."""
    i = torch.arange(q.shape[-2], device=q.device)
    index = (i[:, None] - i + 20).clamp(5, table.shape[-2] - 40)
    bias = (q @ table.mT).gather(-1, index.expand(*q.shape[:-1], -1))
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


VARIANTS = (within, curves, causal_curves, disentangled)


def made(dtype: torch.dtype, device: torch.device, length: int = LENGTH) -> list[Tensor]:
    qkv = [torch.randn(1, 2, length, 16, dtype=dtype, device=device) for _ in range(3)]
    return [*qkv, 0.3 * torch.randn(2, SPAN, 16, dtype=dtype, device=device)]


@pytest.mark.parametrize("fn", VARIANTS)
def test_no_pairs_are_stored(fn: object) -> None:
    explained = explain(fn, *(x.requires_grad_() for x in made(torch.bfloat16, torch.device("cpu"), 1024)))
    assert not explained.fallbacks
    assert not any(s.shape[-2:] == (1024, 1024) for p in explained.kernels for s in p.stores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", VARIANTS)
def test_gradients(fn: object, dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn), made(dtype, device))
