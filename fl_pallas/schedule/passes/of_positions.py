"""Sums into the rows of a table of vectors: scores first, and features as a product of matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce as folded

from ..build import op, reduce_over, rewrite, select, substitute
from ..expr import Axis, Expr, Op, Reduce, free_axes, reductions
from ..inner import factors
from .fuse import Fused
from .interchange import count, is_zero


def of_positions(fused: Fused) -> Fused:
    """`sum[i, j](select(t == f(i, j), sum[b](q(b, i, c) * s(b, i, j)), 0))`, the gradient of the vector c at t (Shaw's
    relative keys, edges' types) → `sum[b, i](q(b, i, c) * sum[j](select(t == f(i, j), s(b, i, j), 0)))`.

    The scores s are computed once for all features, and nothing with features is stored for each pair. Where a place t
    has one j for each i (all distances have a vector) there is no inner sum, and `q` comes out of the test alone.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _ordered)) for o in fused.outputs))


@dataclass(frozen=True)
class _Nest:
    """`sum[axes](product of outside * picked)`.

    Attributes:
      axes: of the positions' places, outermost first.
      batch: of what is summed inside of the test besides, outermost first.
      outside: factors with features.
      picked: a test, and what counts where it holds.
      tested: axes of the test.
    """

    axes: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    outside: tuple[Expr, ...]
    picked: Expr
    tested: frozenset[Axis]


def _ordered(e: Expr) -> Expr:
    axes, body = _summed(e)
    if axes and len(terms := _terms(body)) > 1:
        # A table that serves keys and values: each term by itself.
        apart = [reduce_over("sum", axes, t, e.dtype) for t in terms]
        ordered = [_ordered(t) for t in apart]
        changed = all(a is not b for a, b in zip(ordered, apart))
        return folded(lambda a, b: op("add", a, b, dtype=e.dtype), ordered) if changed else e
    nest = _nest(e)
    if nest is None or not (shared := _axes(nest.outside)):
        return e
    # What all of a row has in common: the last sum is over what it does not depend on.
    last = [a for a in nest.axes if a in nest.tested and a not in shared][:1]
    if not last and not nest.batch:
        return e
    picked = reduce_over("sum", last, nest.picked, e.dtype)
    # What is stored for each position has to be less than what was stored for each pair, with features.
    if count(free_axes(picked)) >= count(free_axes(nest.picked) | shared - nest.tested):
        return e
    out = folded(lambda a, b: op("mul", a, b, dtype=e.dtype), (*nest.outside, picked))
    return reduce_over("sum", [*nest.batch, *(a for a in nest.axes if a not in last)], out, e.dtype)


def _summed(e: Expr) -> tuple[list[Axis], Expr]:
    """The axes of sums, outermost first, and what they sum."""
    axes: list[Axis] = []
    while isinstance(e, Reduce) and e.kind == "sum":
        axes.append(e.axis)
        e = e.body
    return axes, e


def _terms(body: Expr) -> list[Expr]:
    """What a sum adds up, each under the test that all of it is under."""
    if isinstance(body, Op) and body.name == "add":
        return [t for a in body.args for t in _terms(a)]
    if isinstance(body, Op) and body.name == "select" and any(map(is_zero, body.args[1:])):
        (n, inner), *_ = ((n, a) for n, a in enumerate(body.args) if n and not is_zero(a))
        return [select(*(t if m == n else a for m, a in enumerate(body.args))) for t in _terms(inner)]
    return [body]


def _nest(e: Expr) -> _Nest | None:
    """What a sum is made of; None if it is not of what a test picks."""
    axes, e = _summed(e)
    if not axes:
        return None
    parts = factors(e)
    inner = [(f, n) for f in parts if isinstance(f, Reduce) and (n := _nest(f)) is not None]
    if len(inner) == 1:
        ((within, nest),) = inner
        outside = (*(f for f in parts if f is not within), *nest.outside)
        return replace(nest, axes=(*axes, *nest.axes), outside=outside)
    tests = [f for f in parts if isinstance(f, Op) and f.name == "select" and any(map(is_zero, f.args[1:]))]
    if len(tests) != 1:
        return None
    (picked,) = tests
    tested, hole = free_axes(picked.args[0]), _hole(picked)
    places = tested - {*axes}
    if not places:
        return None
    outside = [f for f in parts if f is not picked]
    if hole is None or not tested & {*axes}:
        return _Nest(tuple(axes), (), tuple(outside), picked, tested) if outside else None
    batch, body = _summed(hole)
    own = factors(body)
    heavy = [f for f in own if reductions(f)]
    features = _axes(f for f in own if f not in heavy) - _axes(heavy) - tested - {*axes, *batch}
    taken = [f for f in own if free_axes(f) & features and not free_axes(f) & places]
    if not heavy or not taken or features - _axes(taken):
        return None
    left = [f for f in own if f not in taken]
    picked = substitute(picked, {}, {hole: folded(lambda a, b: op("mul", a, b, dtype=hole.dtype), left)})
    return _Nest(tuple(axes), tuple(batch), (*outside, *taken), picked, tested)


def _hole(picked: Expr) -> Expr | None:
    """The sum that a test picks, times what does not depend on what it sums over; None if it picks none."""
    others: list[Expr] = []
    while isinstance(picked, Op):
        if picked.name == "select":
            test, inner, zero = sorted(picked.args, key=is_zero)
            if not is_zero(zero):
                return None
            others.append(test)
        elif picked.name == "mul":
            inner, *more = sorted(picked.args, key=lambda a: not isinstance(a, Reduce))
            others += more
        elif picked.name in ("neg", "cast"):
            (inner,) = picked.args
        else:
            return None
        picked = inner
    if not isinstance(picked, Reduce) or picked.kind != "sum":
        return None
    return None if any(picked.axis in free_axes(o) or picked in reductions(o) for o in others) else picked


def _axes(some: Iterable[Expr]) -> frozenset[Axis]:
    return frozenset().union(*map(free_axes, some))
