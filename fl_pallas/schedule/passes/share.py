"""Sharing: what one kernel gets from the matrix units and another could not is stored between them.

Before: kernels with rows along different axes each compute the scores, one of them element by element, for both
sides of the product have its rows. After: a kernel stores the scores, a tile at a time, and the others load them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Reduce, free_axes, index, load, loads, reductions, ref_names, walk
from ..inner import as_product, power_of_two
from ..interior import substituted
from ..plan import Accumulator, Choices, KernelPlan, Loop, Store
from .choose import MIN_TILE, roles
from .fuse import Fused
from .stream import parallel_axes, stream

# (row, column, warps) of the kernel that stores, best first.
TILES = ((64, 64, 4), (64, 128, 8), (32, 64, 4), (32, 32, 4), (16, 32, 4))


def share(
    groups: tuple[Fused, ...], name: str, compute: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[KernelPlan, dict[Expr, Expr]] | None:
    """The kernel that stores what the loops of `groups` share, and what they load in its place; None if nothing is.

    What is stored is no larger than some operand, so that memory stays linear in those.

    Args:
      name: of the kernel.
      shapes: of what is loaded, by name.
    """
    if len(groups) < 2:
        return None
    streamed = [stream(g, compute) for g in groups]
    rows = [roles(parallel_axes(g), *s[:2]).row for g, s in zip(groups, streamed, strict=True)]
    operands = {n for g in groups for o in g.outputs for n in loads(o.expr)}
    largest = max(math.prod(shapes[n.source]) * itemsize(n.dtype) for n in operands)
    for e, loop in _common([loops for loops, _, _ in streamed]):
        size = math.prod(a.extent for a in free_axes(e)) * itemsize(compute)
        row = next((row for row in rows if row is not None and _multiplies_better(e, row, rows, loop)), None)
        if size <= largest and row is not None:
            axes = (*(a for a in parallel_axes(groups[0]) if a in free_axes(e)), loop)
            if frozenset(axes) == free_axes(e):
                plan = _storing(e, name, axes, row, compute)
                return plan, {e: load(name, tuple(map(index, axes)), compute)}
    return None


def _common(kernels: list[tuple[Loop, ...]]) -> list[tuple[Expr, Axis]]:
    """The largest expressions of products that the loops of all kernels evaluate at each step, and their loop."""
    found: list[dict[tuple[Expr, Axis], None]] = []
    for loops in kernels:
        steps = [(s, loop.axis) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
        nodes = ((n, axis) for s, axis in steps for n in walk(s.update) if axis in free_axes(n))
        found.append(dict.fromkeys(pair for pair in nodes if _is_worth(pair[0])))
    shared = [pair for pair in found[0] if all(pair in other for other in found[1:])]
    inside = {n for e, _ in shared for n in walk(e) if n is not e}
    return [pair for pair in shared if pair[0] not in inside]


def _is_worth(e: Expr) -> bool:
    return is_float(e.dtype) and bool(reductions(e)) and not ref_names(e)


def _multiplies_better(e: Expr, row: Axis, rows: list[Axis | None], loop: Axis) -> bool:
    """Whether a product inside of `e` is one of matrices with these rows, and not so with another's."""

    def is_product(r: Reduce, row: Axis | None) -> bool:
        tiled = {loop, r.axis} if row is None else {loop, row, r.axis}
        return as_product(r.body, r.axis, frozenset(tiled)) is not None

    sums = [r for r in reductions(e) if r.kind == "sum"]
    return any(is_product(r, row) and not all(is_product(r, other) for other in rows) for r in sums)


def _storing(e: Expr, name: str, axes: tuple[Axis, ...], row: Axis, compute: str) -> KernelPlan:
    """The kernel that stores `e`; its last axis is the loop of others."""
    choices = []
    for rows, columns, warps in TILES:
        sides = {row: rows, axes[-1]: columns}
        tiles = tuple((a, min(sides[a], max(MIN_TILE, power_of_two(a.extent))) if a in sides else 1) for a in axes)
        choices.append(Choices(tiles, warps, stages=1))
    first, *others = dict.fromkeys(choices)
    store = Store(name, axes, compute, e)
    return KernelPlan(name, axes, (), (), (store,), compute, first, tuple(others))


def loading(loops: tuple[Loop, ...], held: Mapping[Expr, Expr]) -> tuple[Loop, ...]:
    """Loops that load what is `held`."""

    return tuple(replace(loop, steps=substituted(loop.steps, held)) for loop in loops)
