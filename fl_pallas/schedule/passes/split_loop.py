"""Split loops: where a kernel has too few programs for the GPU, several share one loop, and another kernel merges.

How the parts of an accumulator merge follows from how it is corrected, so that every plan of one loop
can be split, whatever it computes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..expr import Axis, Expr, Ref, free_axes, index, load, loads, reductions, ref
from ..inner import as_product, is_sequential, power_of_two
from ..plan import (
    Accumulator,
    Choices,
    KernelPlan,
    Loop,
    Store,
    bounds_of,
    is_by_thread,
    stored_in,
    stored_last,
)
from ..target import Target
from .merge_partials import folded, held_type

# Loops below this extent end before a second launch has begun; that is later where most processors have no program
# (H200, S = 1024: 8 programs of 16 rows take 12.2 for 15.9 us; 64 take, in a CUDA graph, 20.8 for 21.7, and 18.9 for
# 21.6 where data bounds the loop).
MIN_EXTENT, MIN_EXTENT_OF_HALF, HALF = 2048, 1024, 2
# One program for so many processors is few: each waits for its own loads.
FEW = 4
# Least indices of the loop in a part; and per row of the tile, for rows are what a part writes and reads again. Fewer
# where that gives idle processors a part each: what few programs write is still in the cache.
MIN_PART, MIN_PART_PER_ROW, MIN_PART_PER_ROW_OF_FEW = 256, 16, 4
# The first for few programs whose indices take sums or maxima of their own of each row, or of a row and a feature.
MIN_HEAVY_PART = 64
# Programs wanted for each processor: one loads while another computes. More where data bounds the loop, for parts are
# of different lengths then, and short ones make up for it.
WAVES, UNEVEN_WAVES = 2, 4
# The same, where threads have rows to themselves.
WAVES_OF_ROWS = 8
# Elements that the merging kernel takes at once.
MERGED_AT_ONCE = 8192


def split_loop(plan: KernelPlan, merger: str, target: Target) -> tuple[KernelPlan, ...]:
    """The plan as it is; or one whose programs each run a part of the loop and store its accumulators,
    and one, named `merger`, that folds the parts and stores what `plan` does.
    """
    parts = number_of_parts(plan, target)
    if parts < 2:
        return (plan,)
    (loop,) = plan.loops
    axis = Axis("p0", parts)
    names = {s.name: f"{plan.name}_{s.name}" for s in loop.steps}
    kept = tuple(
        Store(names[s.name], (axis, *s.axes), held, ref(s.name, s.axes, held))
        for s in loop.steps
        for held in (held_type(s, plan.compute),)
    )
    note = note_of_parts("the loop", parts, programs_of(plan), merger)
    first = replace(
        plan,
        grid=(axis, *plan.grid),
        loops=(replace(loop, parts=axis),),
        stores=(*kept, *stored_in(loop, plan.stores)),
        choices=with_part(plan.choices, axis),
        others=tuple(with_part(c, axis) for c in plan.others),
        notes=(*plan.notes, note),
    )
    return first, _merging(plan, merger, loop, axis, names)


def number_of_parts(plan: KernelPlan, target: Target) -> int:
    """How many programs should share the plan's loop: a power of two; 1 where it is better left whole."""
    if len(plan.loops) != 1:
        return 1
    programs = programs_of(plan)
    extent = plan.loops[0].axis.extent
    if extent >= MIN_EXTENT_OF_HALF and _is_of_rows(plan):
        wanted = min(WAVES_OF_ROWS * target.processors // programs, extent // MIN_PART)
        return 1 << max(0, wanted.bit_length() - 1)
    few, half = FEW * programs <= target.processors, HALF * programs <= target.processors
    if programs >= target.processors or extent < (MIN_EXTENT_OF_HALF if half else MIN_EXTENT):
        return 1
    tiles = dict(plan.choices.tiles)
    # Rows that a part writes once more: not those of what is stored at each step.
    summed = {a for s in plan.loops[0].steps for a in s.axes} - {*plan.features}
    rows = math.prod(n for a, n in tiles.items() if a in summed)
    length = MIN_HEAVY_PART if few and _is_heavy(plan) else max(MIN_PART, MIN_PART_PER_ROW * rows)
    uneven = any(loads(bound) for bound in bounds_of(plan.loops[0]) if bound is not None)
    waves = UNEVEN_WAVES if uneven else WAVES
    wanted = min(waves * target.processors // max(1, programs), extent // length)
    if few and (extent >= MIN_EXTENT or stored_in(plan.loops[0], plan.stores)):
        shorter = extent // max(MIN_PART, MIN_PART_PER_ROW_OF_FEW * rows)
        wanted = max(wanted, min(target.processors // max(1, programs), shorter))
    return 1 << max(0, wanted.bit_length() - 1)


def _is_of_rows(plan: KernelPlan) -> bool:
    """Whether a thread has a row to itself: a program then waits for its own arithmetic, with no other to go on."""
    tiles = dict(plan.choices.tiles)
    one = all(sum(tiles.get(a, 1) > 1 for a in s.axes) == 1 for s in plan.loops[0].steps)
    return one and is_by_thread(plan, plan.loops[0])


def _is_heavy(plan: KernelPlan) -> bool:
    """Whether a step of the loop takes reductions index by index, or is one of rows by features by indices."""
    tiled = plan.choices.tiled
    steps = [(s.update, loop.axis) for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    return any(is_sequential(r, tiled) and r.axis.extent > 1 for e, _ in steps for r in reductions(e)) or any(
        len(free_axes(e) & tiled) > 2 and as_product(e, axis, tiled) is None for e, axis in steps
    )


def programs_of(plan: KernelPlan) -> int:
    """How many programs run a kernel under its first choice."""
    return math.prod(-(-a.extent // (plan.choices.tile(a) or 1)) for a in plan.grid)


def with_part(choices: Choices, axis: Axis) -> Choices:
    """Choices for a kernel that has one more axis, of parts."""
    return replace(choices, tiles=((axis, 1), *choices.tiles))


def note_of_parts(what: str, parts: int, programs: int, merger: str) -> str:
    """What fl.explain says of it."""
    return f"{what} is split into {parts} parts, for {programs} programs leave processors idle; {merger} merges"


def _merging(plan: KernelPlan, name: str, loop: Loop, axis: Axis, names: dict[str, str]) -> KernelPlan:
    """Before: acc = correct(acc.old) ⊕ update. After: acc = correct(acc.old) ⊕ correct(part of acc)."""

    def part(held: Ref) -> Expr:
        return load(names[held.name], (index(axis), *map(index, held.axes)), held.dtype)

    # Rows one at a time: there are few, and nothing is shared between them. What was stored lies along the last axis.
    kept = [a for a in plan.grid if any(a in s.axes for s in loop.steps)]
    along = plan.features if kept[-1:] and kept[-1] in plan.features else kept[-1:]
    # What is chosen among accumulators, by their last index, is stored side by side.
    stores = stored_last(plan.loops, plan.stores)
    grid = tuple(a for a in plan.grid if any(a in s.axes for s in (*loop.steps, *stores)))
    chosen = [a for a in plan.features if a not in kept]
    tiles = {a: plan.choices.tile(a) or 1 if a in (*along, *chosen) else 1 for a in grid}
    together = max(1, MERGED_AT_ONCE // max(math.prod(tiles.values()), 1))
    tiles[axis] = min(power_of_two(axis.extent), 1 << (together.bit_length() - 1))
    return KernelPlan(
        name,
        grid,
        tuple(a for a in plan.features if a in grid),
        (Loop(axis, tuple(folded(s, part, plan.compute) for s in loop.steps)),),
        stores,
        plan.compute,
        Choices(tuple(tiles.items()), 4, 1),
    )
