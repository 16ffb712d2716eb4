"""log1p of numbers that are not negative: as accurate as PyTorch's, relative to the result however small."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from fl_pallas.kernels.pointwise import log1p
from fl_pallas.schedule.build import const, op
from fl_pallas.schedule.expr import load
from fl_pallas.schedule.magnitude import magnitude


@pytest.mark.parametrize(("narrow", "bound"), [(False, 3e-7), (True, 7e-5)])
@pytest.mark.parametrize("most", [1.0, math.inf])
def test_accuracy(most: float, narrow: bool, bound: float) -> None:
    made = np.random.default_rng(0)
    x = np.concatenate(
        [made.uniform(0, 1, 100_000), 10.0 ** made.uniform(-30, 0 if most == 1 else 30, 100_000), [0, 1]]
    )
    x = x.astype(np.float32)
    expected = np.log1p(x.astype(np.float64))
    error = np.abs(np.asarray(log1p(jnp.asarray(x), most, narrow)) - expected)
    assert (error <= bound * expected).all()


def test_of_infinities() -> None:
    x = jnp.asarray([math.inf, math.nan], dtype=jnp.float32)
    assert np.isinf(log1p(x, math.inf, False)[0]) and np.isnan(log1p(x, math.inf, False)[1])
    assert np.isnan(log1p(x, 1, True)[1])


def test_powers_of_what_is_not_positive() -> None:
    x = load("x", (), "f32")
    below = op("neg", op("abs", x, dtype="f32"), dtype="f32")
    assert magnitude(op("exp", below, dtype="f32")) == 1
    assert magnitude(op("exp2", op("mul", below, const(1.4427, "f32"), dtype="f32"), dtype="f32")) == 1
    assert magnitude(op("exp", op("mul", below, const(-2.0, "f32"), dtype="f32"), dtype="f32")) == math.inf
    assert magnitude(op("exp", x, dtype="f32")) == math.inf
