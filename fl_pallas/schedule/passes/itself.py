"""Scores that are compared with others of their row: where the other is the score itself, the two are the same number.

PyTorch has one matrix of scores, and reads some of it again (`s > s.diagonal()`). A kernel takes the sum of each anew:
as a product of matrices here and element by element there, and the two differ in the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce as folded

from ..build import COMPARISONS, op, rewrite, select, with_children
from ..dtype import is_float
from ..expr import Axis, Expr, Index, Op, Reduce, children, free_axes, index, walk
from .fuse import Fused
from .places import axis_of_extremum

# What jumps: a difference in the last bit of what it is given matters.
JUMPS = (*COMPARISONS, "sign", "floor", "ceil", "round", "trunc", "floordiv", "mod")
SWAPPED = ("add", "mul")
# Of a sum that is compared with others, at most.
MAX_NODES = 100

Places = dict[Axis, Expr]


def itself(fused: Fused) -> Fused:
    """Before: `s(i, j) > s(i, t[i])`. After: `s(i, j) > (s(i, j) if j == t[i] else s(i, t[i]))`, s being a sum."""
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _told)) for o in fused.outputs))


def _told(e: Expr) -> Expr:
    if not isinstance(e, Op) or e.name not in JUMPS or not any(is_float(a.dtype) for a in e.args):
        return e
    if e.name in COMPARISONS and any(axis_of_extremum(*sides) for sides in (e.args, e.args[::-1])):
        return e  # both sides would have to change: they are compared as they are
    sums = [r for r in _outermost(e) if r.kind in ("sum", "prod") and is_float(r.dtype)]
    if len(sums) < 2:
        return e
    own = max(sums, key=lambda r: len(free_axes(r)))
    held: dict[Expr, Expr] = {r: same for r in sums if r is not own and (same := _same_where_it_is(own, r)) is not None}
    return _held(e, held) if held else e


def _outermost(e: Expr) -> list[Reduce]:
    """The reductions of `e` that are inside of no other."""
    seen: dict[Expr, None] = {}
    left = [e]
    while left:
        node = left.pop()
        if node not in seen:
            seen[node] = None
            left += () if isinstance(node, Reduce) else children(node)
    return [n for n in seen if isinstance(n, Reduce)]


def _held(e: Expr, held: dict[Expr, Expr]) -> Expr:
    """`e` with other nodes in the place of outermost reductions; `held` is told of all that is inside."""
    if e not in held:
        inner = () if isinstance(e, Reduce) else children(e)
        held[e] = with_children(e, tuple(_held(c, held) for c in inner)) if inner else e
    return held[e]


def _same_where_it_is(own: Reduce, other: Reduce) -> Expr | None:
    """`other`, as `own` where they are the same element of one tensor; None if they never are."""
    places = _places(own, other, {}) if len([*walk(own)]) <= MAX_NODES else None
    moved = {a: at for a, at in (places or {}).items() if at is not index(a)}
    if not moved:
        return None
    tests = [op("eq", index(a), at, dtype="bool") for a, at in moved.items()]
    return select(folded(lambda a, b: op("and", a, b, dtype="bool"), tests), own, other)


def _places(own: Expr, other: Expr, known: Places) -> Places | None:
    """What stands in `other` for each axis of `own`, besides which they are the same; None if they are not."""
    if isinstance(own, Index):
        at = known.setdefault(own.axis, other)
        return known if at is other else None
    if own is other:
        return known if all(known.setdefault(a, index(a)) is index(a) for a in free_axes(own)) else None
    if type(own) is not type(other) or own.dtype != other.dtype or len(children(own)) != len(children(other)):
        return None
    if isinstance(own, Reduce) and isinstance(other, Reduce):
        if (own.kind, own.axis) != (other.kind, other.axis):
            return None
        # The bound axis stands for itself.
        inside = _places(own.body, other.body, {**known, own.axis: index(own.axis)})
        return None if inside is None else {a: at for a, at in inside.items() if a != own.axis}
    if not children(own) or _named(own) != _named(other):
        return None
    orders = [children(other)]
    if isinstance(own, Op) and own.name in SWAPPED:
        orders.append(children(other)[::-1])
    for args in orders:
        found: Places | None = {**known}
        for mine, theirs in zip(children(own), args, strict=True):
            found = _places(mine, theirs, found) if found is not None else None
        if found is not None:
            return found
    return None


def _named(e: Expr) -> str:
    return e.name if isinstance(e, Op) else getattr(e, "source", "")
