"""Logarithms of base two, where levels and buckets of distances are cut by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl

from ..oracle import check

SIZE = 300


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # float64 is PyTorch's on a GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("times", [1, 113], ids=["near", "far"])
def test_levels(dtype: torch.dtype, times: int, device: torch.device) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(SIZE, device=q.device)
        apart = ((i[:, None] - i).abs() * times).clamp(min=1)
        return (q @ k.mT - torch.log2(apart.to(dtype)).floor().to(q.dtype)).softmax(-1) @ v

    made = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, SIZE, 8, generator=made).to(device) for _ in range(3)]
    check(fn, inputs, fl.compile(fn)(*inputs))


def test_of_one_and_less(device: torch.device) -> None:
    """Powers of two aside it is as PyTorch's: of zero, of negative numbers, of what is nearly one."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.log2(x[:, None] * y).nan_to_num(nan=7.0, neginf=-3.0).sum(-1)

    x = torch.tensor([0.0, -1.0, 0.25, 0.999, 1.0, 1.001, 3.0, 2.0**40], device=device)
    inputs = [x, torch.ones(64, device=device)]
    check(fn, inputs, fl.compile(fn)(*inputs))
