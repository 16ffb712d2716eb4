"""Sums of which one index counts: what stands there (the label of a row, in the gradient of a cross entropy)."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce as folded

from ..build import cast, op, rewrite, select, substitute
from ..dtype import is_float, is_int
from ..expr import Axis, Const, Expr, Op, Reduce, const, free_axes, index
from ..inner import factors
from ..integer import from_linear, linear
from .fuse import Fused


def picked(fused: Fused) -> Fused:
    """Before: `sum[c](select(c == label[i], w[c], 0) * g[i])`. After: `select(label[i] in the axis, w[label[i]], 0) *
    g[i]`: an element a row in place of a tile, which each program of the other axis would go through.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _picked)) for o in fused.outputs))


def _picked(e: Expr) -> Expr:
    if not isinstance(e, Reduce) or e.kind != "sum" or not is_float(e.dtype):
        return e
    parts = factors(e.body)
    varying = [f for f in parts if e.axis in free_axes(f)]
    if len(varying) != 1:  # what is not picked is multiplied by 0, and may be infinite
        return e
    (one,) = varying
    if not isinstance(one, Op) or one.name != "select":
        return e
    test, then, other = one.args
    at = _place(test, e.axis)
    if at is None or not isinstance(other, Const) or other.value != 0:
        return e
    zero, end = const(0, "i64"), const(e.axis.extent, "i64")
    inside = op("and", op("ge", at, zero, dtype="bool"), op("lt", at, end, dtype="bool"), dtype="bool")
    found = select(inside, substitute(then, {e.axis: at}), other)
    return cast(
        folded(lambda a, b: op("mul", a, b, dtype=e.body.dtype), (f for f in parts if f is not one), found), e.dtype
    )


def _place(test: Expr, axis: Axis) -> Expr | None:
    """The index along `axis` that alone passes a test, in terms of other axes; None if it is no such test."""
    if not isinstance(test, Op) or test.name != "eq" or not all(is_int(a.dtype) for a in test.args):
        return None
    terms, c = linear(op("sub", *test.args, dtype="i64"))
    sign = terms.pop(index(axis), 0)
    if abs(sign) != 1 or any(axis in free_axes(t) for t in terms):
        return None
    return from_linear(({t: -sign * k for t, k in terms.items()}, -sign * c), "i64")
