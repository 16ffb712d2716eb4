"""Weights in place of their exponents: only where nothing reads them wider than 16 bits."""

from __future__ import annotations

import math

import pytest

from fl_pallas.schedule.build import op, reduce, select
from fl_pallas.schedule.expr import Axis, Expr, const, index, load
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.passes.powers import as_power

ROW, KEY, HEAD, FEATURE = Axis("x0", 64), Axis("r64", 64), Axis("r16", 16), Axis("x1", 8)
LATER = op("gt", index(KEY), index(ROW), dtype="bool")


def scores() -> Expr:
    mixed = op(
        "mul", load("w", (index(HEAD),), "bf16"), load("s", (index(HEAD), index(ROW), index(KEY)), "bf16"), dtype="bf16"
    )
    return reduce("sum", HEAD, mixed, "bf16")


def weights(masked: bool = True) -> Expr:
    shown = select(LATER, const(-math.inf, "f32"), scores()) if masked else scores()
    return op("exp", op("sub", shown, load("m", (index(ROW),), "f32"), dtype="f32"), dtype="f32")


def summed(e: Expr, dtype: str) -> Fused:
    value = load("v", (index(KEY), index(FEATURE)), "bf16")
    return Fused((Output("o", (ROW, FEATURE), "bf16", reduce("sum", KEY, op("mul", e, value, dtype="f32"), dtype)),))


@pytest.mark.parametrize("masked", [True, False])
def test_factors_of_products_in_16_bits(masked: bool) -> None:
    power = as_power(summed(weights(masked), "bf16"), scores())
    assert power is not None and power.node is weights(masked=False) and power.dtype == "bf16"
    assert power.zero == {weights(masked): LATER if masked else None}
    stored = load("p", (index(ROW), index(KEY)), "bf16")
    loaded = power.loading(stored)[weights(masked)]
    assert loaded is (select(LATER, const(0.0, "bf16"), stored) if masked else stored)


def test_one_power_with_and_without_a_mask() -> None:
    """Behind a mask of its own the gradient of scores needs none in its weights."""
    (o,), (other,) = summed(weights(), "bf16").outputs, summed(weights(masked=False), "bf16").outputs
    power = as_power(Fused((o, other)), scores())
    assert power is not None and len(power.zero) == 2 and power.node is weights(masked=False)


def test_not_what_is_wider() -> None:
    assert as_power(summed(weights(), "f32"), scores()) is None
    logarithm = op("mul", weights(), op("log", weights(), dtype="f32"), dtype="f32")
    assert as_power(summed(logarithm, "bf16"), scores()) is None


def test_not_where_scores_are_read_too() -> None:
    both = op("mul", weights(), scores(), dtype="f32")
    assert as_power(summed(both, "bf16"), scores()) is None


def test_times_what_is_rounded() -> None:
    """A row's sum is in 32 bits, of products with a gradient that PyTorch has in 16."""
    pair = load("g", (index(ROW), index(KEY), index(HEAD)), "bf16")
    gradient = reduce("sum", HEAD, op("mul", pair, load("w", (index(HEAD),), "bf16"), dtype="bf16"), "bf16")
    row = reduce("sum", KEY, op("mul", weights(), gradient, dtype="f32"), "f32")
    power = as_power(Fused((Output("d", (ROW,), "f32", row),)), scores())
    assert power is not None and power.dtype == "bf16"
