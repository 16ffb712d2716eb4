"""Both sides: sums over the rows and over the columns of the same pairs in one kernel, where a tile has all columns.

Before: a kernel with rows along queries sums gradients of scores over keys; another, with rows along keys, sums them
over queries, and computes the same scores again. After: a tile has all keys. The loop over queries adds to the sums of
keys, and at each of its tiles has all that the sums of its queries take, which it stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from ...errors import Unsupported
from ..build import op, reduce, rewrite, substitute
from ..dtype import itemsize
from ..expr import Axis, Expr, Load, index, ref_names, sources
from ..plan import Accumulator, Anchor, KernelPlan, Store, stored_in
from ..target import Target
from .both_dimensions import both_dimensions
from .fuse import Fused
from .group_rows import Kernel
from .pairs import Streamed, are_features, as_parallel, nodes_of_pairs, operands, reads, references
from .share import renaming
from .weigh import cheapest

# Columns of a tile, at most: sums of each take registers all along.
MOST = 128


def on_both_sides(
    kernels: Sequence[Streamed | KernelPlan],
    results: Collection[str],
    streamed: Callable[[Fused], Streamed],
    plans_of: Callable[..., tuple[KernelPlan, ...]],
    compute: str,
    target: Target,
) -> list[Streamed | KernelPlan]:
    """Kernels in the order in which they run → the same, two of them as one where that takes less time.

    Args:
      results: names of what is stored for others than these kernels.
      streamed: the loops of a part.
      plans_of: what kernels become.
    """
    made = [*kernels]
    pairs = deque(combinations((k for k in kernels if isinstance(k, Streamed)), 2))
    while pairs:
        pair = pairs.popleft()
        if not all(k in made for k in pair):
            continue
        first, last = sorted(pair, key=made.index)
        between = made[made.index(first) + 1 : made.index(last)]
        early = not any(reads(last, k) for k in between)
        if not early and any(reads(k, first) for k in between):
            continue
        wanted = {*results}.union(*(operands(k) for k in made if k is not first and k is not last))
        found: list[Streamed | None] = []
        for one, other in (pair, pair[::-1]):
            found += [_both(one, other, streamed, compute, wanted), both_dimensions(one, other, compute)]
        ways: dict[tuple[KernelPlan, ...], Streamed] = {}
        for both in found:
            with suppress(Unsupported):
                ways |= {plans_of(both): both} if both is not None else {}
        best = ways.get(cheapest((plans_of(first, last), *ways), target)) if ways else None
        if best is not None:
            place, gone = (first, last) if early else (last, first)
            made = [best if k is place else k for k in made if k is not gone]
            pairs.extend((best, k) for k in made if isinstance(k, Streamed) and k is not best)
    return made


def _both(
    rows: Streamed, columns: Streamed, streamed: Callable[[Fused], Streamed], compute: str, wanted: Collection[str]
) -> Streamed | None:
    """Both kernels as one; None if they have no pairs in common, or a tile does not hold what `rows` sums over.

    Args:
      rows: its sums go along what is parallel in `columns`, which may load what it stores.
      columns: its sums go along what is parallel in `rows`.
      streamed: the loops of a part.
      wanted: names of what others load.
    """
    (own, repeated, stores), (parallel, loops, _) = rows.kernel, columns.kernel
    lengths = {loop.axis.extent for loop in repeated}
    if columns.part is None or len(loops) != 1 or len(lengths) != 1 or max(lengths) > MOST or reads(rows, columns):
        return None
    if any(stored_in(loop, stores) for loop in repeated):
        return None
    place = _same_pairs(rows.kernel, columns.kernel)
    if place is None or any(s.dims and s.name in operands(columns) for s in stores):
        return None
    # What only one side has are its features; under names that the other has not.
    features = [a for a in own if a not in place]
    others = [a for a in parallel if a not in place.values()]
    if not are_features(features, rows.kernel) or not are_features(others, columns.kernel):
        return None
    place |= {a: Axis(f"{a.name}_r", a.extent) for a in features}
    # Under the name that reductions bind, so that what is in the body of one is what is beside it.
    column = place[repeated[0].axis]
    whole = Axis(f"r{column.extent}", column.extent)
    if whole in {*parallel, *place.values()} - {column}:
        return None
    place |= {loop.axis: whole for loop in repeated}
    folded = _folded(rows.kernel, place, whole)
    parallel, (loop,), last = streamed(_renamed(columns.part, column, whole)).kernel
    inside = {s.name: s for s in folded or ()}
    loop = replace(loop, steps=tuple(_without_loads(s, inside, compute) for s in loop.steps))
    kept = tuple(s for s in inside.values() if s.name in wanted)
    exprs = [*(s.expr for s in last), *(s.value for s in loop.steps if isinstance(s, Anchor))]
    loaded = frozenset[str]().union(*map(sources, exprs))
    if not kept or any(ref_names(s.expr) for s in kept) or not loaded.isdisjoint(inside):
        return None
    kernel = (*parallel, *(place[a] for a in features)), (loop,), (*last, *kept)
    return Streamed(kernel, tuple(dict.fromkeys((*rows.notes, *columns.notes))))


def _same_pairs(rows: Kernel, columns: Kernel) -> dict[Axis, Axis] | None:
    """For each axis of a product, or load, of pairs of rows and columns that of the same pairs in the other kernel."""
    _, loops, _ = rows
    parallel, (theirs,), _ = columns
    offered = nodes_of_pairs(theirs, parallel)
    for loop in loops:
        for own in nodes_of_pairs(loop, rows[0]):
            for other in offered:
                found = {b: a for a, b in (renaming(own, other) or {}).items()}
                if found.get(loop.axis) in parallel and theirs.axis in found.values():
                    return {a: b for a, b in found.items() if a != loop.axis} | {loops[0].axis: found[loop.axis]}
    return None


def _renamed(fused: Fused, axis: Axis, other: Axis) -> Fused:
    """A kernel with an axis under another name."""

    def over(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(other if a == axis else a for a in axes)

    def there(e: Expr) -> Expr:
        return substitute(e, {axis: index(other)})

    outputs = (
        replace(o, axes=over(o.axes), expr=there(o.expr), dims=tuple((there(i), n) for i, n in o.dims))
        for o in fused.outputs
    )
    return Fused(tuple(outputs))


def _folded(kernel: Kernel, place: Mapping[Axis, Axis], whole: Axis) -> list[Store] | None:
    """What a kernel stores, its axes in another's place, of one tile that has the axis of its loops whole: each
    accumulator is a reduction over that. None if a loop follows references."""
    _, loops, stores = kernel
    mapping = {a: index(b) for a, b in place.items()}
    made: dict[Expr, Expr] = {}
    for s in (s for loop in loops for s in loop.steps):
        if isinstance(s, Anchor):
            return None
        value = reduce(s.kind, whole, substitute(s.update, mapping, made), s.dtype)
        made |= dict.fromkeys(references(s.name, kernel), value)
    return [as_parallel(s, place, mapping, made) for s in stores]


def _without_loads(step: Accumulator | Anchor, stores: Mapping[str, Store], compute: str) -> Accumulator | Anchor:
    """A step of a loop with what is stored at each of its tiles in the place of loads of that."""

    def rule(e: Expr) -> Expr:
        if not isinstance(e, Load) or e.source not in stores:
            return e
        s = stores[e.source]
        value = substitute(s.expr, dict(zip(s.axes, e.index, strict=True)))
        return value if itemsize(s.dtype) >= itemsize(compute) else op("rounded", value, dtype=s.dtype)

    if isinstance(step, Anchor):
        return step
    correct = None if step.correct is None else rewrite(step.correct, rule)
    return replace(step, update=rewrite(step.update, rule), correct=correct)
