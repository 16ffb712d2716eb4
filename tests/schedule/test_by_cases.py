"""Positions that views divide, under masks."""

from __future__ import annotations

from fl_pallas.schedule.build import select
from fl_pallas.schedule.expr import Axis, Expr, index, load
from fl_pallas.schedule.integer import floordiv, mod
from fl_pallas.schedule.passes.by_cases import by_cases
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.text import expr_text
from tests.terms import i64, is_, n

I, J = Axis("i", 8), Axis("j", 8)
i, j = index(I), index(J)
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
