"""A rough estimate of a kernel's time, to compare ways of sharing work out to kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Index, Load, Op, Reduce, children, free_axes, loads, reductions
from ..inner import (
    Sheared,
    as_product,
    as_sheared,
    as_shifted,
    covering_tile,
    factors,
    is_matrix_product,
    is_product_of_loop,
    is_sequential,
)
from ..integer import linear
from ..plan import Accumulator, Choices, KernelPlan, bounds_of, evaluated_in, held_whole, stored_last
from ..remember import remembered
from ..target import Target
from .lay_out import touched_by
from .registers import COSTLY
from .shared import staged, with_windows

# Of a processor and cycle (H100 whitepaper): operations of a matrix product in 16 bits, instructions, exponentials.
MULTIPLIED, ISSUED, POWERS = 4096, 128, 16
# Bytes that a processor takes from the L2 cache in a cycle, for tiles that no matrix product takes as they are: their
# loads are not issued ahead of their use.
LOADED = 24
# Elements of such tiles in a cycle, where each lies in another sector, for a sum goes along what is innermost.
SCATTERED = 4
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
    times = [sum(_tuned(plan, target) for plan in way) for way in ways]
    best = min(range(len(ways)), key=times.__getitem__)
    return ways[best] if times[best] < CLEARLY * times[0] else ways[0]


def _tuned(plan: KernelPlan, target: Target) -> float:
    """Cycles by the scheduler's pick or, where that halves the features, by a choice that has them whole, if fewer."""
    whole = covering(plan)
    ways = [plan.choices] if plan.choices in whole else [plan.choices, *whole]
    return min(cycles(replace(plan, choices=c), target) for c in ways)


def covering(plan: KernelPlan) -> list[Choices]:
    """The choices, best first, with all features of an element in a tile."""
    return [c for c in (plan.choices, *plan.others) if all(a.extent <= (c.tile(a) or 1) for a in plan.features)]


def cycles(plan: KernelPlan, target: Target, once: bool = False) -> float:
    """Cycles of a kernel under the scheduler's pick, no tile skipped: instructions and matrix products in turn.

    Summaries and lists of tiles take few beside their launch.

    Args:
      once: whether to count as if no element were computed again.
    """
    if plan.minor:
        return LAUNCH
    return _cycles(replace(plan, name="", others=(), notes=()), target, once)


@remembered
def _cycles(plan: KernelPlan, target: Target, once: bool) -> float:
    tiles = dict(plan.choices.tiles)
    work = loaded = 0.0
    multiplies = False
    for updates, axis in _bodies(plan):
        for e in updates:
            wide = _wide(plan, free_axes(e))
            if axis is not None and is_product_of_loop(e, axis, wide):
                multiplies = True
                count = volume(free_axes(e)) * _programs(plan, free_axes(e))
                shifted = as_shifted(e, axis, wide) if as_product(e, axis, wide) is None else None
                work += 2 * (1 if shifted is None else _wider(plan, shifted)) * count * _products(plan, e) / MULTIPLIED
        times, products = evaluated(plan, updates, axis)
        multiplies |= bool(products)
        for n, count in times.items():
            count = min(count, volume(free_axes(n))) if once else count
            if isinstance(n, Reduce):
                work += count * _reduced(plan, n, n in products)
            elif isinstance(n, Load):
                loaded += count * _loaded(plan, n)
            elif isinstance(n, Op) and is_float(n.dtype):
                work += count / (POWERS if n.name in COSTLY else ISSUED)
    # Features are a side of matrix products; where there are none, they are elements as others are.
    apart = {*plan.features} - held_whole(plan) if multiplies else ()
    rows = [n for a, n in tiles.items() if n > 1 and a in plan.grid and a not in apart]
    columns = [tiles.get(loop.axis, 1) for loop in plan.loops]
    share = math.prod(rows) * max(columns, default=1) / plan.choices.warps / BUSY
    taken = max(1, staged(plan.loops, plan.choices), with_windows(plan.loops, plan.choices))
    resident = max(1, target.shared_bytes // taken) * plan.choices.warps
    busy = min(1.0, share) * min(1.0, resident / WARPS) ** 0.5
    return (work / busy + loaded) / target.processors + _bytes(plan) / MOVED + LAUNCH


def evaluated(plan: KernelPlan, exprs: Sequence[Expr], axis: Axis | None) -> tuple[dict[Expr, int], set[Expr]]:
    """How many elements of each node of `exprs` all programs evaluate together; and which are products of matrices.

    A program evaluates what its loop changes at each step, and what a sum that is taken one index at a time changes at
    each of these; a program of another head, or of another tile of features, does so again.

    Args:
      axis: of the loop; what it does not change is left out. None for what is stored without a loop.
    """
    found: dict[Expr, int] = {}
    products: set[Expr] = set()
    tiles = dict(plan.choices.tiles)
    seen: set[tuple[Expr, tuple[Axis, ...]]] = set()

    def visit(e: Expr, steps: tuple[Axis, ...]) -> None:
        own = free_axes(e)
        while steps and steps[-1] not in own:
            steps = steps[:-1]
        if (e, steps) in seen or axis is not None and axis not in own:
            return
        seen.add((e, steps))
        again = math.prod(a.extent for a in steps if a not in own)
        found[e] = found.get(e, 0) + volume(own) * again * _programs(plan, own)
        if not isinstance(e, Reduce):
            for c in children(e):
                visit(c, steps)
            return
        wide = _wide(plan, free_axes(e.body) - {*steps})
        if e.axis not in tiles and is_sequential(e, wide - {e.axis}):
            steps = (*steps, e.axis)
        if not is_matrix_product(e.body, e.axis, wide):
            visit(e.body, steps)
            return
        products.add(e)
        # Sides of a sheared product are of a window that all of a tile's elements share.
        for c in _made_sides(e.body) if as_product(e.body, e.axis, wide) is not None else ():
            visit(c, steps)

    for e in exprs:
        product = axis is not None and is_product_of_loop(e, axis, _wide(plan, free_axes(e)))
        for c in _made_sides(e) if product else (e,):
            visit(c, ())
    return found, products


def _is_matrix(plan: KernelPlan, n: Load) -> bool:
    """Whether a tile of a load has two sides in memory; a table that is read at places of both is small, and near."""
    return len(_wide(plan, free_axes(n))) > 1 and all(len(free_axes(i)) < 2 for i in n.index)


def _loaded(plan: KernelPlan, n: Load) -> float:
    """Cycles of one processor for an element of a tile that no product takes as it lies."""
    if not _is_matrix(plan, n):
        return 0
    tiles = dict(plan.choices.tiles)
    along = free_axes(n.index[-1]) - tiles.keys()
    scattered = bool(along) and len(_wide(plan, free_axes(n) - along)) > 1
    return 1 / SCATTERED if scattered else itemsize(n.dtype) / LOADED


def _made_sides(product: Expr) -> list[Expr]:
    """The factors of a product that are no loads alone: what is computed before it is multiplied."""
    return [f for f in factors(product) if not isinstance(f, Load)]


def _reduced(plan: KernelPlan, r: Reduce, is_product: bool) -> float:
    """Cycles of one processor for an element of a reduction inside of a loop."""
    if not is_product:
        return r.axis.extent / ISSUED
    multiplied = 2 * r.axis.extent * _products(plan, r.body) / MULTIPLIED
    wide = _wide(plan, free_axes(r.body))
    sheared = as_sheared(r.body, r.axis, wide) if as_product(r.body, r.axis, wide) is None else None
    if sheared is None:
        return multiplied
    wider = _wider(plan, sheared)
    # The window goes to shared memory, and each element comes from there.
    return wider * multiplied + (1 + wider) / ISSUED


def _products(plan: KernelPlan, body: Expr) -> int:
    """How many products in 16 bits a product of matrices takes: six where one of them is float32, or three in TF32,
    each of which takes as long as two."""
    return 6 if any(isinstance(f, Load) and f.dtype == "f32" and _is_matrix(plan, f) for f in factors(body)) else 1


def _wider(plan: KernelPlan, s: Sheared) -> float:
    """A window's positions for each index that a tile has of the axis in place of which it stands."""
    tiles = dict(plan.choices.tiles)
    kept, gone = (tiles.get(a, covering_tile(a)) for a in (s.kept, s.gone))
    return s.width(kept, gone) / gone


def _bodies(plan: KernelPlan) -> list[tuple[list[Expr], Axis | None]]:
    """What each loop evaluates at a step, and its axis; and what is stored, where that is more than what loops have
    summed up."""
    last = stored_last(plan.loops, plan.stores)
    stored = [s.expr for s in last if not plan.loops or reductions(s.expr)]
    found: list[tuple[list[Expr], Axis | None]] = [(evaluated_in(loop, plan.stores), loop.axis) for loop in plan.loops]
    return [*found, (stored, None)] if stored else found


def _wide(plan: KernelPlan, axes: Iterable[Axis]) -> frozenset[Axis]:
    """Those of the axes of which a tile has more than one index."""
    tiles = dict(plan.choices.tiles)
    return frozenset(a for a in axes if tiles.get(a, a.extent) > 1)


def _programs(plan: KernelPlan, axes: frozenset[Axis]) -> int:
    """How many programs evaluate the same element of something over these axes, for they differ in others.

    Those that differ in one index that bounds a loop go through other tiles (each place of a table, where it is read);
    where data bounds it that has the index, of a head, they may go through the same.
    """
    tiles, shared = dict(plan.choices.tiles), {loop.parts for loop in plan.loops}
    for loop in plan.loops:
        bounding = {a for bound in bounds_of(loop) if bound is not None for a in _compared(bound)}
        shared |= {a for a in bounding if tiles.get(a, a.extent) == 1}
    others = (a for a in plan.grid if a not in axes and a not in shared)
    return math.prod(-(-a.extent // tiles.get(a, a.extent)) for a in others)


def _compared(e: Expr) -> set[Axis]:
    """The axes whose indices an expression is of, apart from where it loads."""
    if isinstance(e, Index):
        return {e.axis}
    return set() if isinstance(e, Load) else set[Axis]().union(*map(_compared, children(e)))


def volume(axes: Iterable[Axis]) -> int:
    """How many indices some axes have together."""
    return math.prod(a.extent for a in axes)


def _bytes(plan: KernelPlan) -> int:
    """What is loaded, each element once, and the sectors of what is stored."""
    exprs: list[Expr] = [s.expr for s in plan.stores]
    exprs += [s.update for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    read = sum(_read(n) * itemsize(n.dtype) for n in {n for e in exprs for n in loads(e)})
    return read + sum(math.prod(s.shape) * touched_by(s.index, s.shape, itemsize(s.dtype), plan) for s in plan.stores)


def _read(n: Load) -> int:
    """Elements that a load takes, each counted once."""
    return min(volume(free_axes(n)), math.prod(map(_reach, n.index)))


def _reach(i: Expr) -> int:
    """How many places an index may take, at most: positions j - i are as many as both axes have together."""
    terms, _ = linear(i)
    apart = (
        (abs(k), volume(free_axes(t)) if loads(t) else sum(a.extent for a in free_axes(t))) for t, k in terms.items()
    )
    return max(1, min(volume(free_axes(i)), sum(k * n for k, n in apart)))
