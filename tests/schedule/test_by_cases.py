"""Positions that views divide, under masks."""

from __future__ import annotations

import torch

import fl_pallas as fl
from fl_pallas.schedule.build import select
from fl_pallas.schedule.expr import Axis, Expr, const, index, load
from fl_pallas.schedule.integer import floordiv, mod
from fl_pallas.schedule.passes.by_cases import by_cases
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.text import expr_text
from tests.programs import BY_NAME
from tests.terms import i64, is_, n
from tests.unrun import unrun

ROW, COLUMN, PLACE = Axis("i", 8), Axis("j", 8), Axis("t", 16)
i, j, t = index(ROW), index(COLUMN), index(PLACE)
ZERO = const(0.0, "f32")
PADDED = i64("add", i64("add", i64("mul", i, n(8)), j), n(8))


def simplified(e: Expr) -> Expr:
    (out,) = by_cases(Fused((Output("o", (ROW, COLUMN), e.dtype, e),))).outputs
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


def test_a_quotient_that_the_mask_tells_is_itself_divided() -> None:
    """It is 2 · i, of which nothing is left over 2: the mask, which knows i, says nothing of the remainder."""
    quotient = floordiv(i64("add", i64("add", i64("mul", i, n(17)), j), n(8)), 9, "i64")
    seen = select(is_("le", j, i), load("k", (mod(i64("add", quotient, j), 2, "i64"),), "f32"), ZERO)
    assert expr_text(simplified(seen)) == "select(j <= i, k[j % 2], 0)"


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
    place = i64("add", i64("add", i64("mul", i, n(16)), t), n(7))
    seen = is_("ge", i64("add", i64("mul", i, n(2)), floordiv(t, 8, "i64")), n(1))
    inside = select(is_("lt", mod(place, 15, "i64"), n(8)), load("k", (floordiv(place, 15, "i64"),), "f32"), ZERO)
    out = Output("o", (ROW, PLACE), "f32", select(seen, inside, ZERO))
    (found,) = by_cases(Fused((out,))).outputs
    assert expr_text(found.expr).count("k[") == 1 and "k[i + 1]" in expr_text(found.expr)


def test_a_quotient_alone_leaves_a_case_out() -> None:
    """i * 75 + t is 38 and more, so that the case of i = t = 0, which lies before the first row, is none."""
    row, at = Axis("i", 19), Axis("t", 75)
    place = i64("add", i64("mul", index(row), n(75)), index(at))
    padded = i64("add", place, n(35))
    before = i64("sub", floordiv(padded, 73, "i64"), n(1))
    inside = select(is_("lt", mod(padded, 73, "i64"), n(37)), load("k", (before,), "f32"), ZERO)
    seen = is_("ge", i64("sub", floordiv(place, 19, "i64"), n(2)), n(0))
    (found,) = by_cases(Fused((Output("o", (row, at), "f32", select(seen, inside, ZERO)),))).outputs
    assert expr_text(found.expr).count("k[") == 1 and "k[i]" in expr_text(found.expr)


def test_what_is_known_of_operands_goes_by_the_same_cases() -> None:
    """The row sums of a softmax's gradient are those of its result by its gradient, with shifted scores too."""
    case = BY_NAME["transformer_xl"]
    inputs = case.make_inputs(64, torch.bfloat16, "cpu")
    with unrun():
        explanation = fl.explain(case.target(torch.bfloat16, "cpu"), *(x.requires_grad_() for x in inputs))
    backward = explanation.graphs[1].kernels
    assert all(len(plan.loops) < 2 for plan in backward)
    assert any(s.name == "r0_d0" for plan in backward for s in plan.stores)
