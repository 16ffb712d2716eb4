"""How much of a loop's axis each run of rows goes through, where positions tell: exactly, or of some that are seen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..build import op, substitute
from ..expr import Axis, Expr, const, free_axes, ref_names
from ..plan import Loop
from ..positions import Array, at_positions, is_of_positions
from .listing import Granules, ends_of

# Granules, rows of a run, indices of a granule, runs of all rows, and heads that are looked at.
GRANULES, ROWS, COLUMNS, RUNS, HEADS = 256, 4, 8, 512, 2


def of_lists(condition: Expr, granules: Granules) -> Array:
    """How many indices the granules have where a condition on positions holds somewhere: of each run of rows, by the
    axes of these; of the heads that have most."""
    singles, rows = granules.seen_by(condition)
    most = round(RUNS ** (1 / max(1, len(rows))))
    shown, inside = _spread(granules.every.extent, GRANULES), _spread(granules.granule, COLUMNS)
    columns = np.minimum(shown[:, None] * granules.granule + inside, granules.axis.extent - 1)
    places = {granules.axis: columns}
    shape = tuple(len(_spread(-(-a.extent // n), most)) for a, n in rows.items())
    for k, (a, side) in enumerate(rows.items()):
        begin = _along(_spread(-(-a.extent // side), most) * side, k, len(rows))
        own = np.minimum(begin[..., None] + _spread(side, ROWS), a.extent - 1)
        places[a] = own[..., None, None]

    def lengths(heads: Mapping[Axis, Array]) -> Array:
        found = at_positions(condition, {**heads, **places})
        holds = np.broadcast_to(found, (*shape, ROWS, *columns.shape))
        return holds.any((-3, -1)).sum(-1) * (granules.every.extent / len(shown) * granules.granule)

    return _longest(lengths, singles)


def of_spans(loop: Loop, rows: Mapping[Axis, int], singles: Sequence[Axis]) -> Array | None:
    """How many indices lie between the ends of a loop, the same way; None where positions do not tell.

    Args:
      rows: how many indices a run has of each axis.
    """
    runs = {a: Axis(f"r{k}", -(-a.extent // n)) for k, (a, n) in enumerate(rows.items())}
    span = span_of(loop, rows, runs)
    names = {f"{a.name}.{end}" for a in rows for end in ("first", "last")}
    if not is_of_positions(span) or not free_axes(span) <= {*runs.values(), *singles} or not ref_names(span) <= names:
        return None
    most = round(RUNS ** (1 / max(1, len(rows))))
    places = {r: _along(_spread(r.extent, most), k, len(rows)) for k, r in enumerate(runs.values())}
    shape = np.broadcast_shapes(*(x.shape for x in places.values()))
    return _longest(lambda heads: np.broadcast_to(at_positions(span, {**heads, **places}), shape), singles)


def span_of(loop: Loop, rows: Mapping[Axis, int], runs: Mapping[Axis, Axis]) -> Expr:
    """How many indices lie between the ends of a loop, by the numbers of the runs that a tile's rows are."""
    ends = ends_of(rows, runs)
    zero, extent = const(0, "i64"), const(loop.axis.extent, "i64")
    low = zero if loop.lower is None else op("max", substitute(loop.lower, {}, ends), zero, dtype="i64")
    high = extent if loop.upper is None else op("min", substitute(loop.upper, {}, ends), extent, dtype="i64")
    return op("max", op("sub", high, low, dtype="i64"), zero, dtype="i64")


def _along(x: Array, k: int, dims: int) -> Array:
    """A vector as the k-th of so many dimensions."""
    return x.reshape([-1 if n == k else 1 for n in range(dims)])


def _spread(extent: int, most: int) -> Array:
    """Some of the indices of an axis, or all, the last among them."""
    return np.linspace(0, extent - 1, min(extent, most)).astype(np.int64)


def _longest(lengths: Callable[[Mapping[Axis, Array]], Array], singles: Sequence[Axis]) -> Array:
    """The lengths of runs, for the heads where they are longest."""
    heads = [{a: np.asarray(n * (a.extent - 1) // max(1, HEADS - 1)) for a in singles} for n in range(HEADS)]
    return functools.reduce(np.maximum, map(lengths, heads if singles else heads[:1]))
