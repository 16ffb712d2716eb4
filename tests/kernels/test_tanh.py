"""The hyperbolic tangent where it is nearly 1, and its derivative what is left of that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl

from ..oracle import check_gradients


@pytest.mark.parametrize("steep", [0.1, 0.25, 0.5, 1.0])
def test_gradients_of_what_is_saturated(steep: float, device: torch.device) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        far = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
        return torch.tanh(-steep * far).softmax(-1) @ v

    made = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, n, 16, generator=made).to(device) for n in (16, 32, 32)]
    check_gradients(fn, fl.compile(fn), inputs)
