"""Reductions over concatenations fall apart: ⊕ over [0, n+m) = (⊕ over [0, n)) ⊕ (⊕ over [n, n+m))."""

from __future__ import annotations

from dataclasses import replace

from ..build import op, reduce, rewrite, substitute
from ..expr import Axis, Const, Expr, Op, Reduce, const, free_axes, index, loads, walk
from ..integer import linear
from .fuse import Fused

# Masks add more than this.
MOST = 1000
COMBINE = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "any": "or", "all": "and"}


def split_reductions(fused: Fused) -> Fused:
    """`sum[j < n+m](select(j < n, f(j), g(j)))` → `sum[j < n](f(j)) + sum[j < m](g(j + n))`.

    Only where each branch reads an operand of its own, or one of them is a single element (the zero of a softmax that
    may leave some of its weight to nothing): a mask that compares with a constant stays whole, and so does what is
    turned from some row on (positions of all tokens but the first).
    """
    return Fused(tuple(replace(o, expr=split(o.expr)) for o in fused.outputs))


def split(e: Expr) -> Expr:
    """The same of one expression."""
    return rewrite(e, _split)


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
        if not isinstance(n, Op) or n.name != "select" or (found := _boundary(n, e.axis)) is None:
            continue
        at, low, high = found
        last = at == e.axis.extent - 1 and _is_score(high)
        first = at == 1 and _is_score(low) and _is_behind(high, e.axis)
        single = (last or first) and _is_apart(e, at)
        one, another = _reads(low), _reads(high)
        if one - another and another - one or single and one ^ another:
            return at
    return None


def _boundary(e: Op, axis: Axis) -> tuple[int, Expr, Expr] | None:
    """The index of `axis` at which a selection goes from one to another, and both; None if there is none within."""
    test, then, other = e.args
    if not isinstance(test, Op) or test.name not in ("lt", "ge") or not isinstance(test.args[1], Const):
        return None
    terms, before = linear(test.args[0])
    at = int(test.args[1].value) - before
    if terms != {index(axis): 1} or not 0 < at < axis.extent:
        return None
    return (at, then, other) if test.name == "lt" else (at, other, then)


def _reads(e: Expr) -> set[str]:
    return {n.source for n in loads(e)}


def _is_score(e: Expr) -> bool:
    """Whether `e` is a number that scores may have: no mask's."""
    return isinstance(e, Const) and abs(e.value) <= MOST


def _is_behind(e: Expr, axis: Axis) -> bool:
    """Whether what `e` reads along an axis begins further on."""
    return all(index(axis) not in n.index for n in loads(e))


def _is_apart(e: Reduce, at: int) -> bool:
    """Whether all that the body of `e` reads along its axis goes over to something else at an index."""
    nodes = (n for n in walk(e.body) if isinstance(n, Op) and n.name == "select")
    parted = {n for n in nodes if (found := _boundary(n, e.axis)) is not None and found[0] == at}
    rest = substitute(e.body, {}, {n: const(0.0, n.dtype) for n in parted})
    return not any(e.axis in free_axes(n) for n in loads(rest))
