"""Sums of which one index counts: what stands there (the label of a row, in the gradient of a cross entropy)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce as folded

from ..build import TRUE, cast, difference, negate, op, rewrite, select, substitute
from ..dtype import is_float
from ..expr import Axis, Const, Expr, Op, Reduce, const, free_axes
from ..inner import factors
from .bound_loops import solve
from .closed_forms import flat
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
    at = next(_places(_counted(one), e.axis), None)
    if at is None:
        return e
    zero, end = const(0, "i64"), const(e.axis.extent, "i64")
    inside = op("and", op("ge", at, zero, dtype="bool"), op("lt", at, end, dtype="bool"), dtype="bool")
    found = select(inside, substitute(one, {e.axis: at}), const(0.0, one.dtype))
    return cast(
        folded(lambda a, b: op("mul", a, b, dtype=e.body.dtype), (f for f in parts if f is not one), found), e.dtype
    )


def _counted(e: Expr) -> Expr:
    """A condition without which `e` is 0: the tests of a selection, and of those inside of it."""
    if not isinstance(e, Op) or e.name != "select":
        return TRUE
    for test, inner, other in ((e.args[0], *e.args[1:]), (negate(e.args[0]), *e.args[:0:-1])):
        if isinstance(other, Const) and other.value == 0:
            return op("and", test, _counted(inner), dtype="bool")
    return TRUE


def _places(test: Expr, axis: Axis) -> Iterator[Expr]:
    """The index along `axis` that alone passes a test, in terms of other axes, perhaps in several; none if it is no
    such test."""
    lower, upper = solve(test, axis, frozenset())
    for first in flat("max", lower) if lower is not None else ():
        for end in flat("min", upper) if upper is not None else ():
            if difference(end, first) == ({}, 1):
                yield first
