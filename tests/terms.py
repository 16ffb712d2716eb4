"""Short names for the index expressions and conditions that tests write down."""

from __future__ import annotations

from fl_pallas.schedule.build import op
from fl_pallas.schedule.expr import Expr, const


def n(value: int) -> Expr:
    return const(value, "i64")


def i64(name: str, *args: Expr) -> Expr:
    return op(name, *args, dtype="i64")


def is_(name: str, left: Expr, right: Expr) -> Expr:
    return op(name, left, right, dtype="bool")
