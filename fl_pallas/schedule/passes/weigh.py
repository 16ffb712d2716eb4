"""A rough estimate of a kernel's time, to compare ways of sharing work out to kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Op, Reduce, free_axes, loads, walk
from ..inner import as_product, covering_tile
from ..plan import Accumulator, KernelPlan
from ..target import Target
from .choose import COSTLY

# Of a processor and cycle (H100 whitepaper): operations of a matrix product in 16 bits, instructions, exponentials.
MULTIPLIED, ISSUED, POWERS = 4096, 128, 16
# Bytes that all processors together move in a cycle, and the cycles that a launch takes.
MOVED, LAUNCH = 2000, 6000
# Elements of a tile of the rows by the loop for each warp, and warps of a processor, that keep the matrix units busy.
BUSY, WARPS = 64 * 64 // 4, 8
# Estimates are off by a third either way; with this share, 13 of 15 kernels that were measured both ways do better
# (two softmaxes over one v, D128 S2048, are 0.896 by the estimate, and 0.86 ms for 1.00 on an H200).
CLEARLY = 0.9


def cheapest(ways: Sequence[tuple[KernelPlan, ...]], target: Target) -> tuple[KernelPlan, ...]:
    """The way that takes the least time; the first, of the fewest kernels, unless another is clearly better."""
    if len(ways) == 1:
        return ways[0]
    times = [sum(cycles(plan, target) for plan in way) for way in ways]
    best = min(range(len(ways)), key=times.__getitem__)
    return ways[best] if times[best] < CLEARLY * times[0] else ways[0]


def cycles(plan: KernelPlan, target: Target) -> float:
    """Cycles of a kernel under the scheduler's pick, no tile skipped: instructions and matrix products in turn."""
    tiles = dict(plan.choices.tiles)
    tiled = frozenset(a for a, n in tiles.items() if n > 1)
    parallel = frozenset(plan.grid) - frozenset(plan.features)
    work = 0.0
    for loop in plan.loops:
        updates = [s for s in loop.steps if isinstance(s, Accumulator)]
        for s in updates:
            if s.kind == "sum" and as_product(s.update, loop.axis, tiled) is not None:
                work += 2 * _repeated(plan, free_axes(s.update)) / MULTIPLIED
        for n in {n for s in updates for n in walk(s.update) if loop.axis in free_axes(n)}:
            if isinstance(n, Reduce):
                product = as_product(n.body, n.axis, tiled | {n.axis}) is not None
                work += _repeated(plan, free_axes(n.body)) * (2 / MULTIPLIED if product else 1 / ISSUED)
            elif isinstance(n, Op) and is_float(n.dtype) and free_axes(n) <= parallel | {loop.axis}:
                work += _repeated(plan, free_axes(n)) / (POWERS if n.name in COSTLY else ISSUED)
    rows = [n for a, n in tiles.items() if n > 1 and a in plan.grid and a not in plan.features]
    columns = [tiles.get(loop.axis, 1) for loop in plan.loops]
    share = math.prod(rows) * max(columns, default=1) / plan.choices.warps / BUSY
    resident = max(1, target.shared_bytes // max(1, _staged(plan))) * plan.choices.warps
    busy = min(1.0, share) * min(1.0, resident / WARPS) ** 0.5
    return work / (busy * target.processors) + _bytes(plan) / MOVED + LAUNCH


def _staged(plan: KernelPlan) -> int:
    """Bytes of shared memory for the matrices that the stages of a loop hold."""
    tiles = dict(plan.choices.tiles)
    most = 0
    for loop in plan.loops:
        found = {n for s in loop.steps if isinstance(s, Accumulator) for n in loads(s.update)}
        # One matrix for both of its uses, in the product that makes the weights and in one that they are a side of.
        matrices = {
            (n.source, tuple(sorted(tiles.get(a, covering_tile(a)) for a in free_axes(n))), itemsize(n.dtype))
            for n in found
            if loop.axis in free_axes(n)
        }
        held = sum(math.prod(sides) * size for _, sides, size in matrices if len([n for n in sides if n > 1]) > 1)
        most = max(most, plan.choices.stages * held)
    return most


def _repeated(plan: KernelPlan, axes: Iterable[Axis]) -> int:
    """Indices of the axes, times the tiles of features that each compute them."""
    tiles, own = dict(plan.choices.tiles), set(axes)
    parts = (-(-a.extent // tiles.get(a, a.extent)) for a in plan.features if a not in own)
    return math.prod(a.extent for a in own) * math.prod(parts)


def _bytes(plan: KernelPlan) -> int:
    """What is loaded, each element once, and what is stored."""
    exprs: list[Expr] = [s.expr for s in plan.stores]
    exprs += [s.update for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    read = sum(
        math.prod(a.extent for a in free_axes(n)) * itemsize(n.dtype) for n in {n for e in exprs for n in loads(e)}
    )
    return read + sum(math.prod(a.extent for a in s.axes) * itemsize(s.dtype) for s in plan.stores)
