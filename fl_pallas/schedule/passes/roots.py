"""Roots that nothing is left of: `cdist(q, k) ** 2` is a sum of squares, and its gradient twice the difference."""

from __future__ import annotations

from dataclasses import replace

from ..build import op, rewrite, with_children
from ..dtype import is_float
from ..expr import Expr, Op, children, const
from ..laws import non_negative
from ..remember import remembered
from .fuse import Fused
from .interchange import is_zero


def without_roots(fused: Fused) -> Fused:
    """`sqrt(s) * sqrt(s)` as `s`, and, of a distance d that is a root, `select(d == 0, 0, g * (2 * d) / d)` as
    `select(s == 0, 0, g * 2)`: sums of squares can be matrix products then (`expand_squares`)."""
    return Fused(tuple(replace(o, expr=rewrite(rewrite(o.expr, _cancelled), _squared)) for o in fused.outputs))


def _squared(e: Expr) -> Expr:
    if isinstance(e, Op) and e.name == "mul":
        for a, x in (e.args, e.args[::-1]):
            if _is_root(x) and (left := _without(a, x)) is not None:
                return op("mul", left, children(x)[0], dtype=e.dtype)
    if isinstance(e, Op) and e.name == "eq" and _is_root(e.args[0]) and is_zero(e.args[1]):
        return op("eq", children(e.args[0])[0], e.args[1], dtype="bool")
    return e


def _is_root(e: Expr) -> bool:
    """Whether `e` is the root of what is not negative, of which a square is left as it was."""
    return isinstance(e, Op) and e.name == "sqrt" and non_negative(e.args[0], frozenset())


def _cancelled(e: Expr) -> Expr:
    """A selection between 0 and quotients by a root, where that is not 0."""
    if isinstance(e, Op) and e.name == "select" and is_zero(e.args[1]):
        test, zero, other = e.args
        if isinstance(test, Op) and test.name == "eq" and _is_root(x := test.args[0]) and is_zero(test.args[1]):
            return with_children(e, (test, zero, rewrite(other, lambda n: _quotient(n, x))))
    return e


def _quotient(e: Expr, x: Expr) -> Expr:
    if isinstance(e, Op) and e.name == "div" and e.args[1] is x and is_float(e.dtype):
        return _without(e.args[0], x) or e
    return e


@remembered
def _without(e: Expr, x: Expr) -> Expr | None:
    """The product `e`, or each that it adds up, without one factor `x`; None if it has none."""
    if e is x:
        return const(1.0, e.dtype)
    if not isinstance(e, Op):
        return None
    if e.name in ("add", "sub"):
        parts = [_without(a, x) for a in e.args]
        known = [p for p in parts if p is not None]
        return op(e.name, *known, dtype=e.dtype) if len(known) == len(parts) else None
    for n in {"mul": (0, 1), "neg": (0,), "div": (0,)}.get(e.name, ()):
        if (left := _without(e.args[n], x)) is not None:
            return op(e.name, *(left if m == n else b for m, b in enumerate(e.args)), dtype=e.dtype)
    return None
