"""What all loads of a number multiply it by is multiplied where it is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_pallas.schedule.build import op
from fl_pallas.schedule.expr import Axis, Expr, const, index, load
from fl_pallas.schedule.passes.factors import store_multiplied
from fl_pallas.schedule.plan import Accumulator, Choices, KernelPlan, Loop, Store
from fl_pallas.schedule.text import plan_text

X, J = Axis("x", 64), Axis("j", 64)
ROW = load("rows", (index(J),), "f32")
TWICE, THRICE = (op("mul", ROW, const(x, "f32"), dtype="f32") for x in (2.0, 3.0))


def storing(dtype: str = "f32") -> KernelPlan:
    store = Store("rows", (X,), dtype, op("log", load("a", (index(X),), "f32"), dtype="f32"))
    return KernelPlan("first", (X,), (), (), (store,), "f32", Choices(((X, 16),)))


def summing(*terms: Expr) -> KernelPlan:
    body = [op("exp", t, dtype="f32") for t in terms]
    steps = tuple(Accumulator(f"s{n}", "sum", (X,), e, "f32", None) for n, e in enumerate(body))
    return KernelPlan("second", (X,), (), (Loop(J, steps),), (), "f32", Choices(((X, 16), (J, 16))))


def test_a_factor_moves() -> None:
    first, second = store_multiplied([storing(), summing(TWICE)], "rows")
    assert "store rows[x:64]: f32 = log(a[x]) * 2" in plan_text(first)
    assert "exp(rows[j])" in plan_text(second)


def test_factors_move_one_after_another() -> None:
    first, second = store_multiplied([storing(), summing(op("mul", TWICE, const(0.25, "f32"), dtype="f32"))], "rows")
    assert "store rows[x:64]: f32 = log(a[x]) * 2 * 0.25" in plan_text(first)
    assert "exp(rows[j])" in plan_text(second)
    plans = store_multiplied([storing(), summing(TWICE, op("mul", TWICE, const(0.25, "f32"), dtype="f32"))], "rows")
    assert "exp(rows[j] * 0.25)" in plan_text(plans[1]) and "log(a[x]) * 2\n" in plan_text(plans[0]) + "\n"


@pytest.mark.parametrize(
    "terms",
    [(ROW,), (TWICE, THRICE), (TWICE, ROW), (op("add", TWICE, ROW, dtype="f32"),)],
    ids=["by itself", "two factors", "one without", "one without in a sum"],
)
def test_loads_differ(terms: tuple[Expr, ...]) -> None:
    plans = [storing(), summing(*terms)]
    assert store_multiplied(plans, "rows") == plans


def test_a_load_by_itself() -> None:
    plans = [storing(), summing(TWICE)]
    plans[1] = replace(plans[1], stores=(Store("copy", (X,), "f32", load("rows", (index(X),), "f32")),))
    assert store_multiplied(plans, "rows") == plans


def test_what_others_read_stays() -> None:
    plans = [storing(), summing(TWICE)]
    assert store_multiplied(plans, "r0_l") == plans
    plans = [storing("bf16"), summing(TWICE)]
    assert store_multiplied(plans, "rows") == plans
