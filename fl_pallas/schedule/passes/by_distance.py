"""Sums into positions that distances decide (buckets of a bias, as T5's): a diagonal is summed once."""

from __future__ import annotations

import functools
from dataclasses import replace

from ..build import negate, op, reduce, rewrite, select, substitute
from ..expr import Axis, Expr, Op, Reduce, const, free_axes, index, reductions
from ..inner import factors, over_distances
from ..integer import from_linear
from .fuse import Fused
from .interchange import FEATURES, count, is_larger_than_operands, is_zero


def by_distance(fused: Fused) -> Fused:
    """`sum[i, j](select(t == f(i - j), s(i, j), 0))` → `sum[l](select(t == f(l), sum[i](s(i, i - l)), 0))`, of what is
    in range.

    And `sum[i, j](f(c, i - j) * s(i, j))`, of many c, → `sum[l](f(c, l) * sum[i](s(i, i - l)))`.

    Else each position t computes the scores of all the tiles that may be its own: four times as many as there are for
    T5's buckets, and with the position of each element. As elsewhere (`interchange`), what is no larger than the
    operands is stored.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _by_distance)) for o in fused.outputs))


def _by_distance(e: Expr) -> Expr:
    if not isinstance(e, Reduce) or not isinstance(e.body, Reduce) or not e.kind == e.body.kind == "sum":
        return e
    i, j = e.axis, e.body.axis
    split = _split(e.body.body) or _weighed(e.body.body, i, j)
    if split is None:
        return e
    of_distance, counted = split
    if not free_axes(of_distance) - {i, j}:
        return e  # a mask
    decided = over_distances(of_distance, i, j)
    if decided is None or not reductions(counted) or not is_larger_than_operands(counted):
        return e
    of_distance, along, sign, least = decided
    place = from_linear(({index(along): sign, index(i): -sign}, sign * least), "i64")
    inside = op(
        "and",
        op("ge", place, const(0, "i64"), dtype="bool"),
        op("lt", place, const(j.extent, "i64"), dtype="bool"),
        dtype="bool",
    )
    zero = const(0, counted.dtype)
    diagonal = reduce("sum", i, select(inside, substitute(counted, {j: place}), zero), e.dtype)
    if of_distance.dtype == "bool":
        return reduce("sum", along, select(of_distance, diagonal, const(0, e.dtype)), e.dtype)
    return reduce("sum", along, op("mul", of_distance, diagonal, dtype=e.dtype), e.dtype)


def _split(picked: Expr) -> tuple[Expr, Expr] | None:
    """A test, and what counts where it holds; else nothing does. None if that is not what an expression says."""
    if not isinstance(picked, Op) or picked.name != "select":
        return None
    test, counted, otherwise = picked.args
    if is_zero(counted):
        test, counted, otherwise = negate(test), otherwise, counted
    return (test, counted) if is_zero(otherwise) else None


def _weighed(body: Expr, i: Axis, j: Axis) -> tuple[Expr, Expr] | None:
    """The factors of a product that are of pairs, and many for each (the waves of a learned bias), and what counts with
    these weights; None if there are none. A few are sums of a kernel that is there (`interchange`)."""
    weights, counted = [], []
    for f in factors(body):
        pairs = len({i, j} & free_axes(f)) != 1 and not reductions(f)
        (weights if pairs else counted).append(f)
    if not counted or not any(i in free_axes(f) for f in weights):
        return None
    many, one = (functools.reduce(lambda a, b: op("mul", a, b, dtype=body.dtype), fs) for fs in (weights, counted))
    return (many, one) if count(free_axes(many) - free_axes(one)) > FEATURES else None
