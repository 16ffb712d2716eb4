"""Reductions over flattened dimensions become reductions over each of the dimensions, where that sets others free."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..build import reduce, rewrite, row_major, substitute
from ..expr import Axis, Const, Expr, Index, Op, Reduce, free_axes, index, reductions, walk
from ..inner import factors
from .fuse import Fused
from .stream import MAX_COVERED, is_covered


def unflatten(fused: Fused) -> Fused:
    """`sum[r < m·n](… max[k](f(r // n, k)) …)` → `sum[i < m](sum[j < n](… max[k](f(i, k)) …))`.

    A matrix product of views sums over all rows and columns at once, as einsum's gradient of weights that mix heads
    does. Only when they are apart is it seen that a row's own reductions are the same for all of its columns.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _apart)) for o in fused.outputs))


def _apart(e: Expr) -> Expr:
    if not isinstance(e, Reduce) or e.axis.size is not None or e.axis.extent <= MAX_COVERED:
        return e
    strides = sorted({1, *(s for n in walk(e.body) if (s := _beyond(n, e.axis)))}, reverse=True)
    ends = (e.axis.extent, *strides)
    if len(strides) == 1 or any(a % b or a == b for a, b in pairwise(ends)):
        return e
    axes = [Axis(f"%{b}", a // b) for a, b in pairwise(ends)]
    body = substitute(e.body, {e.axis: row_major(map(index, axes), axes)})
    inner = reductions(body)
    # What is computed once where the axes are apart: reductions, or a side of matrix products that sum each index.
    once: list[Expr] = [r for r in inner if not is_covered(r)]
    once += [f for r in inner if is_covered(r) for f in factors(r.body) if r.axis in free_axes(f)]
    if not any(0 < len(free_axes(x) & {*axes}) < len(axes) for x in once):
        return e
    for axis in reversed(axes):
        body = reduce(e.kind, axis, body, e.dtype)
    return body


def _beyond(e: Expr, axis: Axis) -> int | None:
    """The stride along a flattened `axis` of the dimension that `e`, a quotient, begins with or, a remainder, leaves
    out; None for anything else."""
    if not isinstance(e, Op) or e.name not in ("floordiv", "mod") or not isinstance(e.args[1], Const):
        return None
    of = e.args[0]
    if isinstance(of, Op) and of.name == "mod":
        of = of.args[0]
    stride = 1 if isinstance(of, Index) and of.axis == axis else _beyond(of, axis)
    return stride and stride * int(e.args[1].value)
