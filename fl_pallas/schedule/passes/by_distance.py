"""Sums into positions that distances decide (buckets of a bias, as T5's): a diagonal is summed once."""

from __future__ import annotations

from dataclasses import replace

from ..build import negate, op, reduce, rewrite, select, substitute
from ..expr import Axis, Expr, Op, Reduce, const, free_axes, index, reductions
from ..inner import positions
from ..integer import from_linear
from .fuse import Fused
from .interchange import is_larger_than_operands, is_zero


def by_distance(fused: Fused) -> Fused:
    """`sum[i, j](select(t == f(i - j), s(i, j), 0))` → `sum[l](select(t == f(l), sum[i](s(i, i - l)), 0))`, of what is
    in range.

    Else each position t computes the scores of all the tiles that may be its own: four times as many as there are for
    T5's buckets, and with the position of each element. As elsewhere (`interchange`), what is no larger than the
    operands is stored.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _by_distance)) for o in fused.outputs))


def _by_distance(e: Expr) -> Expr:
    if not isinstance(e, Reduce) or not isinstance(e.body, Reduce) or not e.kind == e.body.kind == "sum":
        return e
    i, j, picked = e.axis, e.body.axis, e.body.body
    split = _split(picked)
    if split is None:
        return e
    test, counted = split
    if not free_axes(test) - {i, j}:
        return e  # a mask
    decided = over_distances(test, i, j)
    if decided is None or not reductions(counted) or not is_larger_than_operands(counted):
        return e
    test, along, sign, least = decided
    place = from_linear(({index(along): sign, index(i): -sign}, sign * least), "i64")
    inside = op(
        "and",
        op("ge", place, const(0, "i64"), dtype="bool"),
        op("lt", place, const(j.extent, "i64"), dtype="bool"),
        dtype="bool",
    )
    zero = const(0, counted.dtype)
    diagonal = reduce("sum", i, select(inside, substitute(counted, {j: place}), zero), e.dtype)
    return reduce("sum", along, select(test, diagonal, const(0, e.dtype)), e.dtype)


def over_distances(e: Expr, i: Axis, j: Axis) -> tuple[Expr, Axis, int, int] | None:
    """What i - j, or i + j, alone decides, over an axis of distances, which begin at 0.

    Returns: `e` over that axis; the axis; s and the least distance l: the index is i + s * j - l. None if both axes
    are in it in another way.
    """
    pair = frozenset((i, j))
    if not pair <= free_axes(e) or i.size is not None or j.size is not None:
        return None
    found = dict(positions(e, pair))
    signs = {a * b for _, a, b, _, _ in found.values()}
    if len(signs) != 1:
        return None
    (sign,) = signs
    along, least = Axis(f"{i}{'+-'[sign < 0]}{j}", i.extent + j.extent - 1), min(0, sign * (j.extent - 1))
    here = {
        n: from_linear(({**terms, index(along): k}, c + k * least), n.dtype)
        for n, (first, a, b, terms, c) in found.items()
        for k in [a if first == i else b]
    }
    e = substitute(e, {}, here)
    return None if free_axes(e) & pair else (e, along, sign, least)


def _split(picked: Expr) -> tuple[Expr, Expr] | None:
    """A test, and what counts where it holds; else nothing does. None if that is not what an expression says."""
    if not isinstance(picked, Op) or picked.name != "select":
        return None
    test, counted, otherwise = picked.args
    if is_zero(counted):
        test, counted, otherwise = negate(test), otherwise, counted
    return (test, counted) if is_zero(otherwise) else None
