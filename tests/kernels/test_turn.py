"""Sines and cosines of wide tiles: accurate, and with no branch where the angles are known not to be large."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels.turn import EXACT, turned
from fl_pallas.schedule.build import cast, const, op
from fl_pallas.schedule.expr import Axis, index, load
from fl_pallas.schedule.magnitude import magnitude
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check_gradients


@pytest.mark.parametrize("largest", [1e-3, 1.0, 30.0, EXACT])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_accuracy(name: str, largest: float) -> None:
    x = np.random.default_rng(0).uniform(-largest, largest, 100_000).astype(np.float32)
    expected = getattr(np, name)(x.astype(np.float64))
    error = np.abs(np.asarray(turned(name, jnp.asarray(x), largest)) - expected)
    assert error.max() < 1.5e-7 and (error / np.abs(expected)).max() < 3e-6


def test_any_angle() -> None:
    x = jnp.asarray([[0.5, 1e5], [3e7, -1e20]], dtype=jnp.float32)
    assert jnp.array_equal(turned("sin", x, math.inf), jnp.sin(x))
    endless = jnp.asarray([[math.inf, 1.0], [math.nan, -math.inf]], dtype=jnp.float32)
    assert jnp.isnan(turned("cos", endless, math.inf)).tolist() == [[True, False], [True, True]]


def test_magnitudes() -> None:
    i, j = (cast(index(Axis(name, 100)), "f32") for name in "ij")
    distance = op("mul", op("sub", i, j, dtype="f32"), const(0.5, "f32"), dtype="f32")
    assert magnitude(distance) == 99
    assert magnitude(op("cos", load("x", (), "f32"), dtype="f32")) == 1
    assert magnitude(op("add", distance, load("x", (), "f32"), dtype="f32")) == math.inf


def cosine_of_distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """cosFormer's reweighting, but for its kernel."""
    at = torch.arange(q.shape[-2], device=q.device)
    return (q @ k.mT * torch.cos((at[:, None] - at) * (math.pi / 64)).to(q.dtype)).softmax(-1) @ v


def sine_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SIREN-like: a periodic score, of any size."""
    return torch.sin(q @ k.mT * 3).softmax(-1) @ v


@pytest.mark.parametrize(("fn", "scale"), [(cosine_of_distances, 1), (sine_of_scores, 1), (sine_of_scores, 3000)])
def test_right(fn: object, scale: float, device: torch.device) -> None:
    """(Large scores are exact ones: a sine of them shows each rounding.)"""
    inputs = [torch.randn(1, 2, 70, 16, device=device) for _ in range(3)]
    if scale > 1:
        inputs[:2] = (scale * inputs[0]).round(), inputs[1].round()
    check_gradients(fn, fl.compile(fn), [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize(("fn", "branches"), [(cosine_of_distances, 0), (sine_of_scores, 1)])
def test_branches(fn: object, branches: int) -> None:
    ((plan, lower),) = kernels_made(fn, [torch.randn(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3)])
    ir = lower(plan).ttir
    calls = ir.count("__nv_sinf") + ir.count("__nv_cosf")
    assert calls == branches
