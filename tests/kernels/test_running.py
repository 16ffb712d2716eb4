"""Running sums of tiles by products: exact, and after an infinity what a running sum is."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels.running import running_sums
from tests.oracle import check_gradients, run_and_check


def _expected(x: np.ndarray, along: int, back: bool, whole: bool) -> np.ndarray:
    x = np.flip(np.moveaxis(x, along, 1), 1) if back else np.moveaxis(x, along, 1)
    if not whole:
        x = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)
    with np.errstate(invalid="ignore"):
        sums = np.cumsum(x, axis=1, dtype=np.float64)
    return np.moveaxis(np.flip(sums, 1) if back else sums, 1, along)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("shape", [(64, 64), (16, 32), (32, 128), (8, 8)])
def test_sums(shape: tuple[int, int], along: int, back: bool, whole: bool) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.float32(1e10)
    expected = _expected(x, along, back, whole)
    for narrow, bound in ((False, 3e-7), (True, 2e-5)):
        sums = np.asarray(running_sums(jnp.asarray(x), along, back, whole, narrow, interpret=True, native=False))
        assert np.abs(sums - expected).max() < bound * np.abs(x).max() * math.sqrt(x.shape[along])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("along", [0, 1])
def test_infinities(along: int, back: bool, whole: bool) -> None:
    x = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    x[3, 5], x[3, 20], x[7, 4:9], x[9, 30], x[11, :], x[20, 11] = np.inf, np.inf, -np.inf, np.nan, np.inf, -np.inf
    sums = np.asarray(running_sums(jnp.asarray(x), along, back, whole, False, interpret=True, native=False))
    np.testing.assert_allclose(sums, _expected(x, along, back, whole), rtol=1e-5, atol=1e-5)


def _sums_of_scores(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    s = q @ k.mT
    return torch.nn.functional.softplus(s.masked_fill(at, math.inf)).cumsum(-1).clamp(max=50.0) @ v


def _sums_of_columns(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    s = (q @ k.mT).masked_fill(at, -math.inf)
    return torch.exp(s.flip(-2).cumsum(-2).flip(-2) * 0.01) @ v


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", [_sums_of_scores, _sums_of_columns])
def test_infinite_scores(program: Callable[..., Tensor], kind: torch.dtype, device: torch.device) -> None:
    """What is behind an infinity is infinite, and what is before it is not."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 90, 16, generator=made).to(device, kind) for _ in range(3))
    at = (torch.rand(90, 90, generator=made) < 0.004).to(device)
    run_and_check(program, fl.compile(program, dynamic=False), (q, k, v, at))
    check_gradients(program, fl.compile(program, dynamic=False), (q, k, v, at))
