"""Tensors written at positions: the gradients of what `indexing` reads.

An element of the result has to know which value, if any, goes to it. So the positions are one for each index along the
other dimensions, or linear in the places of the values (ranges, flipped, shifted, along a diagonal) and all different.
Where values are added up, some of the places may be taken one after another (a position is a diagonal, say), or an
element of a short table asks each value whether it goes there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import Unsupported
from ..schedule import build
from ..schedule.expr import Axis, Const, Expr, Index, Op, free_axes, index, loads
from ..schedule.integer import linear, linear_bounds
from .indexing import index_dims, position, wrapped
from .reduction import accumulator
from .tensor import (
    ZERO,
    At,
    Indices,
    Number,
    Spec,
    Tensor,
    constant,
    element,
    every,
    fresh_axis,
    integer,
    replaced,
    within,
)

aten = torch.ops.aten

# Positions of the longest table whose elements ask every value. Each of them goes over all tiles of values that may be
# its own: those are few where positions are made of indices alone, and all where they are data.
MAX_ASKING = 128
# Numbers at a position of a longer one whose diagonals are summed: a bias for each head, and no vector of features, for
# which sums of each row at each position would be stored.
MAX_HEADS = 32
# Values (of each row, say) that every element may ask, however many elements there are.
FEW = 8


def _found(
    wanted: Iterable[tuple[Expr, Expr, int]], places: Sequence[Axis], given: Sequence[Axis] = ()
) -> tuple[Expr, Indices]:
    """Whether a value goes to certain positions, and the place that it comes from.

    Args:
      wanted: for some dimensions the position, the position that a value goes to by its place, and the extent.
      places: the axes of the values.
      given: those of which it is known where the value is.

    Raises: Unsupported, unless positions are linear in the places, and no two places have the same.
    """
    found: dict[Axis, Expr] = {p: ZERO if p.extent == 1 else index(p) for p in places if p.extent == 1 or p in given}
    here: Expr = build.TRUE
    refusal = Unsupported("aten.index_put", "several values may go to one position")
    by_data: list[tuple[Expr, Expr, int]] = []
    left: list[tuple[Expr, dict[Expr, int], int]] = []
    for target, i, n in wanted:
        try:
            left.append((target, *_positive(i, n, places)))
        except Unsupported as error:
            by_data.append((target, i, n))
            refusal = error
    while left:
        # The one with the fewest unknowns: none is a test, one gives a place, and two have to wait for another's.
        target, terms, c = min(left, key=lambda w: len(_unknown(w[1], places, found)))
        unknown = _unknown(terms, places, found)
        if len(unknown) > 1:
            break
        left.remove((target, terms, c))
        rest, step = integer("sub", target, c), 0
        for atom, k in terms.items():
            if isinstance(atom, Index) and atom.axis in unknown:
                step = k
            else:
                known = found.get(atom.axis, atom) if isinstance(atom, Index) else atom
                rest = integer("sub", rest, integer("mul", known, k))
        if not unknown:
            here = every(here, integer("eq", rest, 0))
            continue
        (place,) = unknown
        i = found[place] = integer("floordiv", rest if step > 0 else integer("sub", ZERO, rest), abs(step))
        here = every(here, integer("eq", integer("mod", rest, abs(step)), 0), within(i, place.extent))
    if left or len(found) < len(places):
        raise refusal
    # Of a value whose place is known, any position is (a label for each row).
    for target, i, n in by_data:
        here = every(here, integer("eq", target, wrapped(build.substitute(i, found), n)))
    return here, tuple(found[p] for p in places)


def _positive(i: Expr, extent: int, places: Sequence[Axis]) -> tuple[dict[Expr, int], int]:
    """The position as a linear form, counted from the front."""
    terms, c = linear(i)
    span = linear_bounds((terms, c))
    others = [atom for atom in terms if not isinstance(atom, Index)]
    known = not any(loads(atom) or free_axes(atom).intersection(places) for atom in others)
    if not known or span is None or span[0] < 0 <= span[1]:
        raise Unsupported("aten.index_put", "positions that are no ranges, or count from both ends")
    return terms, c if span[0] >= 0 else c + extent


def _unknown(terms: dict[Expr, int], places: Sequence[Axis], found: Mapping[Axis, Expr]) -> set[Axis]:
    return {atom.axis for atom in terms if isinstance(atom, Index) and atom.axis in places} - found.keys()


def _sum(
    wanted: Sequence[tuple[Expr, Expr, int]],
    places: Sequence[Axis],
    value: Callable[[Indices], Expr],
    dtype: str,
    refusal: Unsupported,
    by_distance: bool,
) -> Expr:
    """The sum of the values, of all places, whose position is the one that is wanted; `_found` says of what.

    Raises: `refusal` where there are too many positions to go over all values for each, if those are not few, nor
      decided by distances.
    """

    def are_few(asked: Sequence[Axis]) -> bool:
        return math.prod(p.extent for p in asked) <= FEW or math.prod(n for *_, n in wanted) <= MAX_ASKING

    by_data = any(loads(i) for _, i, _ in wanted)
    for given in itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(1, len(places))):
        if by_data and not are_few(given):
            continue
        with contextlib.suppress(Unsupported):
            here, where = _found(wanted, places, given)
            return _total(here, value(where), given, dtype)
    if not (by_distance or are_few(places)):
        raise refusal
    here: Expr = build.TRUE
    for target, i, n in wanted:
        here = every(here, integer("eq", target, wrapped(i, n)))
    return _total(here, value(tuple(map(index, places))), places, dtype)


def _clamped(i: Expr) -> tuple[Expr, int, int] | None:
    """What a position is within two ends, and these; None if it is not clamped."""
    ends: dict[str, int] = {}
    while isinstance(i, Op) and i.name in ("max", "min") and isinstance(i.args[1], Const) and i.name not in ends:
        ends[i.name] = int(i.args[1].value)
        i = i.args[0]
    return (i, ends["max"], ends["min"]) if len(ends) == 2 and ends["max"] < ends["min"] else None


def _between_ends(
    target: Expr,
    clamped: tuple[Expr, int, int],
    places: Sequence[Axis],
    value: Callable[[Indices], Expr],
    dtype: str,
) -> Expr:
    """The sum of values whose positions are linear, but for two ends at which all that lie beyond add up (relative
    positions of DeBERTa).

    Raises: Unsupported, unless the positions between are linear in the places, and no two places have the same.
    """
    i, low, high = clamped
    span = linear_bounds(linear(i))
    # (No position counts from the other end.)
    up = max(0, -span[0]) if span is not None else 0
    here, where = _found([(integer("add", target, up), integer("add", i, up), high + up)], places)
    between = every(integer("gt", target, low), integer("lt", target, high), here)
    total = _total(between, value(where), (), dtype)
    for end, name in ((low, "le"), (high, "ge")):
        beyond = _total(integer(name, i, end), value(tuple(map(index, places))), places, dtype)
        total = build.select(integer("eq", target, end), beyond, total)
    return total


def _are_by_distance(positions: Sequence[Tensor], places: Sequence[Axis]) -> bool:
    """Whether positions are decided by how far two places are apart: an element then asks each distance, of which there
    are as many as places, and not each pair."""
    inner = tuple(map(index, places))
    decided = [position(replace(t, at=t.whole), inner) for t in positions if t.whole]
    along = frozenset().union(*map(free_axes, decided)).intersection(places)
    further = {a: integer("add", index(a), 1) for a in along}
    whole = len(decided) == len(positions) and len(along) == 2
    return whole and all(build.substitute(i, further) is i for i in decided)


def _total(here: Expr, value: Expr, places: Sequence[Axis], dtype: str) -> Expr:
    """The sum over the places where values are `here`."""
    counted = build.select(here, build.cast(value, accumulator(dtype)), constant(0, accumulator(dtype)))
    return build.cast(build.reduce_over("sum", places, counted, counted.dtype), dtype)


def _put(out: Spec, old: Expr, here: Expr, value: Expr, accumulate: bool) -> Expr:
    return build.select(here, build.op("add", old, value, dtype=out.dtype) if accumulate else value, old)


def _written(
    out: Spec,
    old: Expr,
    wanted: Sequence[tuple[Expr, Expr, int]],
    places: Sequence[Axis],
    value: Callable[[Indices], Expr],
    accumulate: bool,
    by_distance: bool = False,
) -> Expr:
    """`old` with the value that goes there, or with the sum of those that do; `value` says what a place has."""
    try:
        here, where = _found(wanted, places)
    except Unsupported as refusal:
        if accumulate:
            total = _sum(wanted, places, value, out.dtype, refusal, by_distance)
            return _put(out, old, build.TRUE, total, accumulate)
        written = value(tuple(map(index, places)))
        if not free_axes(written).isdisjoint(places):
            raise
        return build.select(_any(wanted, places, refusal), written, old)
    return _put(out, old, here, value(where), accumulate)


def _any(wanted: Sequence[tuple[Expr, Expr, int]], places: Sequence[Axis], refusal: Unsupported) -> Expr:
    """Whether the positions that are wanted are those of any place.

    Raises: `refusal` where rows have places of their own (what a row's `topk` found), and too many of them.
    """
    rows = frozenset().union(*(free_axes(i) for _, i, _ in wanted)).difference(places)
    if rows and math.prod(p.extent for p in places) > MAX_ASKING:
        raise refusal
    here: Expr = build.TRUE
    for target, i, n in wanted:
        here = every(here, integer("eq", target, wrapped(i, n)))
    return build.reduce_over("any", places, here, "bool")


def _index_put(out: Spec, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> At:
    """x[i, j] = values, or x[i, j] += values; or x[mask] = number, with a mask over some neighbouring dimensions."""
    given = {d: t for d, t in enumerate(indices) if t is not None}
    if any(t.dtype == "bool" for t in given.values()):
        ((d, mask), *others) = given.items()
        if others or accumulate or values.numel != 1:
            raise Unsupported("aten.index_put", "it is a selection only where one number is written under one mask")
        end = d + len(mask.shape)
        return lambda idx: build.select(mask.at(idx[d:end]), element(values, idx, out.dtype), x.at(idx))
    lead, extents = index_dims(given)

    def at(idx: Indices) -> Expr:
        places = tuple(map(fresh_axis, extents))
        inner = tuple(map(index, places))
        wanted = tuple((idx[d], position(t, inner), x.shape[d]) for d, t in given.items())
        rest = tuple(i for d, i in enumerate(idx) if d not in given)

        def value(where: Indices) -> Expr:
            return element(values, (*rest[:lead], *where, *rest[lead:]), out.dtype)

        heads = out.numel // max(1, math.prod(out.shape[d] for d in given))
        by_distance = accumulate and heads <= MAX_HEADS and _are_by_distance([*given.values()], places)
        return _written(out, x.at(idx), wanted, places, value, accumulate, by_distance)

    return at


def _scatter(
    out: Spec, x: Tensor, dim: int, index_: Tensor, src: Tensor | Number, accumulate: bool = False, **_: Any
) -> At:
    """x[.., index[.., p, ..], ..] = src[.., p, ..] along `dim`; whatever the index is, where p has one value."""
    d = dim % max(1, len(x.shape))
    if not x.shape or any(m != n for k, (m, n) in enumerate(zip(index_.shape, x.shape)) if k != d):
        raise Unsupported("aten.scatter", "it writes to a part of the tensor")

    def at(idx: Indices) -> Expr:
        place = fresh_axis(index_.shape[d])

        def value(where: Indices) -> Expr:
            at = replaced(idx, d, where[0])
            return element(src, at, out.dtype) if isinstance(src, Tensor) else constant(src, out.dtype)

        if place.extent == 1:
            here = integer("eq", idx[d], position(index_, replaced(idx, d, ZERO)))
            return _put(out, x.at(idx), here, value((ZERO,)), accumulate)
        inner = replaced(idx, d, index(place))
        if accumulate and index_.whole and x.shape[d] > MAX_ASKING:
            clamped = _clamped(position(replace(index_, at=index_.whole), inner))
            with contextlib.suppress(Unsupported):
                if clamped is not None:
                    total = _between_ends(idx[d], clamped, (place,), value, out.dtype)
                    return _put(out, x.at(idx), build.TRUE, total, accumulate)
        wanted = ((idx[d], position(index_, inner), x.shape[d]),)
        return _written(out, x.at(idx), wanted, (place,), value, accumulate)

    return at


def _scatter_add(out: Spec, x: Tensor, dim: int, index_: Tensor, src: Tensor) -> At:
    return _scatter(out, x, dim, index_, src, accumulate=True)


def _embedding_backward(
    out: Spec, grad: Tensor, indices: Tensor, rows: int, padding: int = -1, by_frequency: bool = False
) -> At:
    """The sum of what was read of each row; nothing goes to the row `padding`."""
    if by_frequency:
        raise Unsupported("aten.embedding_dense_backward", "gradients divided by how often a row was read")

    def at(idx: Indices) -> Expr:
        places = tuple(map(fresh_axis, indices.shape))
        wanted = ((idx[0], position(indices, tuple(map(index, places))), rows),)
        zeros = constant(0, out.dtype)

        def value(where: Indices) -> Expr:
            return element(grad, (*where, idx[1]), out.dtype)

        by_distance = out.numel // max(1, rows) <= MAX_HEADS and _are_by_distance([indices], places)
        total = _written(out, zeros, wanted, places, value, True, by_distance)
        return build.select(integer("eq", idx[0], padding), zeros, total)

    return at


def _unfold_backward(out: Spec, grad: Tensor, sizes: Sequence[int], dim: int, size: int, step: int) -> At:
    """The sum of what windows, one every `step`, have at the position; grad [.., windows, .., size]."""
    d = dim % len(sizes)
    dtype = accumulator(out.dtype)

    def at(idx: Indices) -> Expr:
        inner = fresh_axis(size)
        begin = integer("sub", idx[d], index(inner))
        window = integer("floordiv", begin, step)
        here = every(integer("eq", integer("mod", begin, step), 0), within(window, grad.shape[d]))
        value = build.cast(grad.at((*replaced(idx, d, window), index(inner))), dtype)
        total = build.reduce("sum", inner, build.select(here, value, constant(0, dtype)), grad.dtype)
        return build.cast(total, out.dtype)

    return at


RULES: dict[Any, Callable[..., Any]] = {
    aten.unfold_backward: _unfold_backward,
    aten.embedding_dense_backward: _embedding_backward,
    aten.index_put: _index_put,
    **dict.fromkeys((aten.scatter.src, aten.scatter.value), _scatter),
    aten.scatter_add: _scatter_add,
}
