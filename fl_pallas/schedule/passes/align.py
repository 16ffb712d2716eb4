"""Align: sums over positions go along the keys that other sums of the kernel go along.

Before: Σ_p s(i, i + p - c) · r(p, d), beside Σ_j s(i, j) · k(j, d): the gradient of queries whose scores have a term by
relative position takes the scores twice, along two loops. After: Σ_j s(i, j) · r(j - i + c, d), of the same scores.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..build import op, reduce, select, substitute
from ..dtype import is_float
from ..expr import Axis, Const, Expr, Index, Load, Reduce, const, free_axes, index, loads, reductions
from ..inner import factors
from ..integer import Linear, from_linear, linear, linear_bounds
from .by_cases import told, under_masks
from .contributes import contributes
from .covered import streamed
from .fuse import Fused
from .stream import parallel_axes


def align(fused: Fused) -> Fused:
    """The kernel with its sums over what another shifts taken along the axis of that other, where they load more by the
    shifted index than by their own."""
    parallel = parallel_axes(fused)
    sums = [r for o in fused.outputs for r in streamed(o.expr, parallel)]
    along = {(n.source, d): (r.axis, base) for r in sums for n, d, at in _indexed(r) if (base := _base(at, r.axis))}
    moved: dict[Expr, Expr] = {}
    for r in (r for r in sums if r.kind == "sum"):
        known = [(at, *along[n.source, d]) for n, d, at in _indexed(r) if (n.source, d) in along]
        shifted = [(axis, shift) for at, axis, base in known if _is_shifted(shift := _less(at, base))]
        if shifted and 2 * len(shifted) > len(_indexed(r)) and (same := _along(r, *shifted[0])) is not None:
            moved[r] = same
    if not moved:
        return fused
    # All under their masks alone, so that what they have in common is seen.
    return Fused(tuple(replace(o, expr=under_masks(substitute(o.expr, {}, moved))) for o in fused.outputs))


def beside(groups: tuple[Fused, ...]) -> tuple[Fused, ...]:
    """The groups, those as one whose sums are of the other's scores once they are aligned: a gradient of queries in two
    parts, of their scores with keys and with positions, which nothing in the region adds up."""
    left, found = [*groups], list[Fused]()
    while left:
        first = left.pop(0)
        for other in [o for o in left if o.outputs[0].axes == first.outputs[0].axes]:
            both = Fused((*first.outputs, *other.outputs))
            if not _is_of_scores(both, first) and _is_of_scores(aligned := align(both), first):
                first = aligned
                left.remove(other)
        found.append(first)
    return tuple(found)


def _is_of_scores(both: Fused, first: Fused) -> bool:
    """Whether all that the sums of the further outputs sum of pairs is what the first ones' reductions make."""
    count, parallel = len(first.outputs), parallel_axes(both)
    known = {n for o in both.outputs[:count] for n in reductions(o.expr)}
    sums = (r for o in both.outputs[count:] for r in streamed(o.expr, parallel))
    pairs = {n for r in sums for n in reductions(r.body) if r.axis in free_axes(n)}
    return bool(pairs) and pairs <= known


def _indexed(r: Reduce) -> list[tuple[Load, int, Linear]]:
    """The sides of products inside of a sum that have its axis: the load, the dimension that the axis goes along, and
    the index there."""
    sides = (n for n in loads(r.body) if is_float(n.dtype) and free_axes(n) - free_axes(r.body))
    places = ((n, d, linear(i)) for n in sides for d, i in enumerate(n.index))
    return [(n, d, at) for n, d, at in places if at[0].get(index(r.axis)) == 1]


def _base(place: Linear, axis: Axis) -> Linear | None:
    """What an index is beside that along an axis: nothing, or members of a batch that are laid one after another; None
    if other positions are added to it."""
    terms, c = place
    others = {t: k for t, k in terms.items() if t != index(axis)}
    return (others, c) if c == 0 and all(abs(k) > 1 for k in others.values()) else None


def _less(a: Linear, b: Linear) -> Linear:
    terms = {t: k for t in {**a[0], **b[0]} if (k := a[0].get(t, 0) - b[0].get(t, 0))}
    return terms, a[1] - b[1]


def _is_shifted(place: Linear) -> bool:
    """Whether an index is that along an axis, and another's beside it."""
    return len(place[0]) == 2 and all(isinstance(t, Index) and abs(k) == 1 for t, k in place[0].items())


def _along(r: Reduce, axis: Axis, shift: Linear) -> Expr | None:
    """The sum over `axis` in place of `shift`, an index of its own; None if its terms are not zero outside of that."""
    span = linear_bounds(shift, told(contributes(r.body, "sum")))
    if span is None or span[0] < 0 or span[1] >= axis.extent:
        return None
    new = Axis("%aligned", axis.extent)
    terms, c = shift
    own = index(r.axis)
    place = {index(new): 1, **{t: -k for t, k in terms.items() if t != own}}, -c
    found = factors(substitute(r.body, {r.axis: from_linear(place, "i64")}))
    others = [f for f in found if isinstance(f, (Const, Load))]
    weight = _product([f for f in found if f not in others], r.body.dtype)
    zero = const(0.0, weight.dtype)
    span = linear_bounds(place, told(contributes(weight, "sum")))
    at = from_linear((place[0], 0), "i64")
    if span is None or span[1] >= r.axis.extent:
        weight = select(op("ge", at, const(r.axis.extent + c, "i64"), dtype="bool"), zero, weight)
    if span is None or span[0] < 0:
        weight = select(op("lt", at, const(c, "i64"), dtype="bool"), zero, weight)
    return reduce("sum", new, _product([*others, weight], r.body.dtype), r.dtype)


def _product(found: list[Expr], dtype: str) -> Expr:
    return functools.reduce(lambda x, y: op("mul", x, y, dtype=dtype), found, const(1.0, dtype))
