"""Reductions over concatenations fall apart: ⊕ over [0, n+m) = (⊕ over [0, n)) ⊕ (⊕ over [n, n+m))."""

from __future__ import annotations

from dataclasses import replace

from ..build import op, reduce, rewrite, substitute
from ..expr import Axis, Const, Expr, Index, Op, Reduce, const, index, loads, walk
from .fuse import Fused

COMBINE = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "any": "or", "all": "and"}


def split_reductions(fused: Fused) -> Fused:
    """`sum[j < n+m](select(j < n, f(j), g(j)))` → `sum[j < n](f(j)) + sum[j < m](g(j + n))`.

    Only where the two branches read different operands: a mask that compares with a constant stays whole.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _split)) for o in fused.outputs))


def _split(e: Expr) -> Expr:
    if not isinstance(e, Reduce):
        return e
    cut = _cut(e)
    if cut is None:
        return e
    low = _over(e, 0, cut)
    high = _over(e, cut, e.axis.extent)
    return op(COMBINE[e.kind], low, high, dtype=e.dtype)


def _over(e: Reduce, start: int, stop: int) -> Expr:
    if stop - start == 1:
        return substitute(e.body, {e.axis: const(start, "i64")})
    part = Axis(f"%{stop - start}", stop - start)
    shifted = op("add", index(part), const(start, "i64"), dtype="i64")
    return _split(reduce(e.kind, part, substitute(e.body, {e.axis: shifted}), e.dtype))


def _cut(e: Reduce) -> int | None:
    """The index at which the body of `e` goes from one operand to another."""
    for n in walk(e.body):
        if not (isinstance(n, Op) and n.name == "select" and isinstance(n.args[0], Op)):
            continue
        test, then, other = n.args
        if test.name not in ("lt", "ge") or not isinstance(test.args[1], Const):  # type: ignore[union-attr]
            continue
        along = test.args[0]  # type: ignore[union-attr]
        if isinstance(along, Index) and along.axis == e.axis and _reads(then) ^ _reads(other):
            at = int(test.args[1].value)  # type: ignore[union-attr]
            if 0 < at < e.axis.extent and _reads(then) and _reads(other):
                return at
    return None


def _reads(e: Expr) -> set[str]:
    return {n.source for n in loads(e)}
