"""Positions that views divide, under masks."""

from __future__ import annotations

from fl_pallas.schedule.build import select
from fl_pallas.schedule.expr import Axis, Expr, const, index, load
from fl_pallas.schedule.integer import floordiv, mod
from fl_pallas.schedule.passes.by_cases import by_cases
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.text import expr_text
from tests.terms import i64, is_, n

I, J = Axis("i", 8), Axis("j", 8)
i, j = index(I), index(J)
ZERO = const(0.0, "f32")
PADDED = i64("add", i64("add", i64("mul", i, n(8)), j), n(8))


def simplified(e: Expr) -> Expr:
    (out,) = by_cases(Fused((Output("o", (I, J), e.dtype, e),))).outputs
    return out.expr


def test_a_mask_tells_the_row() -> None:
    row, column = floordiv(PADDED, 9, "i64"), i64("sub", mod(PADDED, 9, "i64"), n(1))
    seen = select(is_("le", j, i), load("k", (row, column), "f32"), load("k", (i, j), "f32"))
    assert expr_text(simplified(seen)) == "select(j <= i, k[i, j - i + 7], k[i, j])"


def test_a_test_that_the_mask_decides_is_left_out() -> None:
    padded = is_("ge", i64("sub", mod(PADDED, 9, "i64"), n(1)), n(0))
    inner = select(padded, load("k", (i, j), "f32"), load("k", (j, i), "f32"))
    assert expr_text(simplified(select(is_("lt", j, i), inner, load("k", (i, i), "f32")))) == (
        "select(j < i, k[i, j], k[i, i])"
    )


def test_multiples_by_difference() -> None:
    """i * 15 + j + 8 goes over 16 as i * 16 + (j - i + 8) does, without a mask."""
    place = i64("add", i64("add", i64("mul", i, n(15)), j), n(8))
    assert floordiv(place, 16, "i64") is i
    assert expr_text(mod(place, 16, "i64")) == "j - i + 8"


def test_without_a_mask_it_goes_by_cases() -> None:
    found = simplified(load("k", (floordiv(PADDED, 9, "i64"), mod(PADDED, 9, "i64")), "f32"))
    assert expr_text(found) == "select(j - i + 8 < 9, k[i, j - i + 8], k[i + 1, j - i - 1])"


def test_a_quotient_is_compared_as_what_it_divides() -> None:
    """Of the cases of a position's gradient, the one that a test around it leaves out is not computed."""
    place = i64("add", i64("add", i64("mul", i, n(16)), index(Axis("t", 16))), n(7))
    t = index(Axis("t", 16))
    seen = is_("ge", i64("add", i64("mul", i, n(2)), floordiv(t, 8, "i64")), n(1))
    inside = select(is_("lt", mod(place, 15, "i64"), n(8)), load("k", (floordiv(place, 15, "i64"),), "f32"), ZERO)
    out = Output("o", (I, Axis("t", 16)), "f32", select(seen, inside, ZERO))
    (found,) = by_cases(Fused((out,))).outputs
    assert expr_text(found.expr).count("k[") == 1 and "k[i + 1]" in expr_text(found.expr)
