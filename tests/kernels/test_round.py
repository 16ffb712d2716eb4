"""Rounding to whole numbers, bit by bit as PyTorch does it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch

import fl_pallas as fl
from fl_pallas.kernels.pointwise import POINTWISE


def test_as_pytorch_does() -> None:
    """Also next to halves, beyond what has fractions, and zeros with a sign."""
    halves = torch.arange(-9, 10) / 2
    near = [torch.nextafter(halves, torch.full_like(halves, far)) for far in (-torch.inf, torch.inf)]
    large = torch.tensor([2.0**23 + 1, 2.0**24 - 1, 2.0**22 + 0.5, 1e30, torch.inf])
    x = torch.cat([halves, *near, large, -large, torch.tensor([-0.0, torch.nan]), 100 * torch.randn(1000)])
    ours = np.asarray(POINTWISE["round"](jnp.asarray(x.numpy())))
    assert np.array_equal(ours.view(np.int32), x.round().numpy().view(np.int32))


def reciprocal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (1 / (q @ k.mT).round()).amin(-1)


def test_zeros_keep_their_sign(device: torch.device) -> None:
    q, k = torch.randn(40, 8, device=device) / 5, torch.randn(50, 8, device=device)
    assert torch.equal(fl.compile(reciprocal)(q, k), reciprocal(q, k))
