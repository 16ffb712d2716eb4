"""Roles: what becomes of the parallel axes of a kernel, before any tile has a width."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Load, Op, Reduce, Ref, free_axes, index, loads, reductions, walk
from ..inner import factors, power_of_two
from ..plan import Accumulator, Loop, Store, reduced_over, step_expressions
from ..remember import remembered
from ..scan import scanned_axes

# Rows that have nothing in common, and are summed each by itself, are taken several at once where there are so many.
MANY_ROWS = 16384
MAX_FEATURES = 256
# Of two warps: fewer rows, or indices, are too few for threads to take them by themselves.
THREADS = 64


@dataclass(frozen=True)
class Roles:
    """Parallel axes by what becomes of them.

    Attributes:
      features: taken whole by each program, for the expensive part of the loop does not depend on them.
      row: the axis that is tiled, because what the loop loads does not depend on it; None if none is.
      batch: taken one index at a time.
      column: the other side of a product with the row, where no loop runs over it; None if there is none.
      one_by_one: whether loops take one index at a time, of a batch or beside what a tile has whole.
    """

    features: tuple[Axis, ...]
    row: Axis | None
    batch: tuple[Axis, ...]
    column: Axis | None = None
    one_by_one: bool = False


@remembered
def roles(parallel: tuple[Axis, ...], loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> Roles:
    """Sort the parallel axes of a kernel into features, row and batch."""
    axes = [a for a in parallel if a.extent > 1]
    scanned = set() if loops else scanned_axes([s.expr for s in stores])
    if scanned:
        # Running sums of what is stored, of many rows at once.
        column = max(scanned, key=lambda a: (a.extent, a.name))
        others = [a for a in axes if a != column]
        row = max(others, key=lambda a: (a.extent, axes.index(a)), default=None)
        return Roles((), row, tuple(a for a in others if a != row), column)
    updates = [s.update for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    whole = reduced_over(axes, loops, stores)
    # Sums over what a tile has whole are as those of the loop.
    bodies = [e.body if isinstance(e, Reduce) and e.axis in whole else e for e in updates] or [s.expr for s in stores]
    heavy = [n for e in bodies for n in walk(e) if isinstance(n, Reduce) or isinstance(n, Op) and n.name in HEAVY]
    # What is made of one tensor, element by element, is a side of a product: as a gate that goes to its features. Where
    # both sides are, the features are those of the smaller one, which is computed again for each tile of the other.
    apart = [n for n in heavy if not _is_of_one(n)]
    costly = set().union(*map(free_axes, apart or sorted(heavy, key=_size)[-1:]))
    if not costly:
        costly = set().union(*(free_axes(n) for e in bodies for n in loads(e)[:1]))
    if not loops:
        # Where nothing is computed for several of them at once: as memory lies.
        last = {s.axes[-1] for s in stores if s.axes and s.axes[-1].extent <= MAX_FEATURES}
        plain = not any(isinstance(n, Reduce) for e in bodies for n in walk(e))
        costly -= {a for a in last if plain or all(_runs_along(n, a, costly) for e in bodies for n in loads(e))}
    beside = _beside(whole, loops)
    features = [a for a in axes if a not in costly or a in beside]
    for store in stores:
        own = [a for a in store.axes if a in features]
        while len(own) > 1 and math.prod(power_of_two(a.extent) for a in own) > MAX_FEATURES:
            features.remove(own.pop(0))
    every = {n for e in bodies for n in loads(e)}
    along = {loop.axis for loop in loops}
    longest = max(features, key=lambda a: a.extent, default=None)
    if loops and longest and longest.extent > MAX_FEATURES and not any({longest} < free_axes(n) for n in every):
        # Pairs of what is loaded by row, and by index, cost something whatever is done with them.
        features.remove(longest)
    rest = [a for a in axes if a not in features]
    computed = {n for e in bodies for n in numbers(e)}
    # Labels, where pairs are counted.
    found = computed if any(not loops or free_axes(n) & along for n in computed) else every
    inner = [n for n in found if not loops or free_axes(n) & along and not _is_table(n)]

    others = {*rest, *along}

    def elements(n: Load) -> int:
        """Of an index of the loop and of each parallel axis."""
        return math.prod(b.extent for b in free_axes(n) - others)

    def reuse(a: Axis) -> tuple[int, int, int]:
        return sum(elements(n) for n in inner if a not in free_axes(n)), a.extent, axes.index(a)

    row = max(rest, key=reuse, default=None)
    if row is not None and loops and reuse(row)[0] == 0:
        few = math.prod(a.extent for a in rest) < MANY_ROWS
        row = None if few or any(isinstance(n, Reduce) for e in bodies for n in walk(e)) else _innermost(found, rest)
    of_batch = bool(loops) and all(_is_of_batch(loop) for loop in loops)
    column = _other_side(row, rest, updates if loops else [s.expr for s in stores]) if of_batch or not loops else None
    one_by_one = bool(beside) or column is not None and bool(loops)
    return Roles(tuple(features), row, tuple(a for a in rest if a not in (row, column)), column, one_by_one)


def numbers(e: Expr) -> set[Load]:
    """What `e` loads to compute with: floats, and integers that become some (a cache of 8 bits)."""
    cast = {n for n in walk(e) if isinstance(n, Op) and n.name == "cast" and is_float(n.dtype)}
    return {n for n in loads(e) if is_float(n.dtype)}.union(*(loads(n) for n in cast))


def _beside(whole: Collection[Axis], loops: tuple[Loop, ...]) -> set[Axis]:
    """Those of the axes that a tile has whole which, with that of a loop, are one side of its products, of what is
    loaded, and in none are on the other side of it: the two dimensions of an image's keys."""
    found: set[Axis] = set()
    for loop in loops if whole else ():
        sums = {n for s in loop.steps if isinstance(s, Accumulator) for n in reductions(s.update) if n.kind == "sum"}
        products = [(r.axis, [f for f in factors(r.body) if r.axis in free_axes(f)]) for r in sums]
        for a in whole:
            both = {a, loop.axis}
            own = [sides for axis, sides in products if axis != a and any(free_axes(f) & both for f in sides)]
            if own and all(_is_one_side(sides, both) for sides in own):
                found.add(a)
    return found


def _is_one_side(sides: list[Expr], axes: set[Axis]) -> bool:
    """Whether one factor of a product, a load, has both axes, and the others neither."""
    having = [f for f in sides if free_axes(f) & axes]
    return len(having) == 1 < len(sides) and isinstance(having[0], Load) and axes <= free_axes(having[0])


def is_of_rows(loop: Loop, kinds: Roles) -> bool:
    """Whether a loop accumulates, of rows alone, elements of 32 bits or more, with no sums inside."""
    sums = [s for s in loop.steps if isinstance(s, Accumulator)]
    exprs = [e for s in sums for e in step_expressions(s)]
    return (
        kinds.row is not None
        and len(sums) == len(loop.steps)
        and not any(reductions(e) for e in exprs)
        and not any({*s.axes} & {*kinds.features} for s in sums)
        and not any(is_float(n.dtype) and itemsize(n.dtype) < 4 for e in exprs for n in loads(e))
    )


def is_of_computed_rows(loop: Loop, kinds: Roles) -> bool:
    """The same, where what it accumulates of pairs of a row and an index of the loop is computed, and no pair is
    loaded: threads can take rows by themselves, all of one index at a time."""
    if not is_of_rows(loop, kinds) or kinds.row is None or min(kinds.row.extent, loop.axis.extent) < THREADS:
        return False
    pair = {kinds.row, loop.axis}
    return not any(pair <= free_axes(n) for s in loop.steps for e in step_expressions(s) for n in loads(e))


def _innermost(found: set[Load], rest: list[Axis]) -> Axis | None:
    """The axis of `rest` along which neighbours of the largest loads lie closest together."""

    def depth(a: Axis) -> tuple[int, int]:
        places = [len(n.index) - n.index.index(index(a)) for n in found if index(a) in n.index]
        return -min(places, default=99), a.extent

    return max(rest, key=depth, default=None)


def _runs_along(n: Load, a: Axis, axes: set[Axis]) -> bool:
    """Whether a load has all of `axes`, and neighbours along `a` lie side by side (a sum of heads' parts)."""
    return axes <= free_axes(n) and n.index[-1] is index(a)


def _is_table(n: Load) -> bool:
    """Whether a load is of a place that is computed, by more than views compute, from several axes: of no side of a
    product. (A place that is read is one: of a sequence's page, say, that holds some of its keys.)"""
    return any(
        len(free_axes(i)) > 1
        and any(isinstance(m, Op) and m.name not in _VIEW for m in walk(i))
        and not any(isinstance(m, Load) for m in walk(i))
        for i in n.index
    )


_VIEW = ("add", "sub", "mul", "neg", "floordiv", "mod")
HEAVY = ("exp", "tanh", "sigmoid", "log", "select")


def _size(e: Expr) -> int:
    """Elements of an expression."""
    return math.prod(a.extent for a in free_axes(e))


def _is_of_one(e: Expr) -> bool:
    """Whether an expression has no sums, no references, and no axis that one of its loads has not."""
    nodes = list(walk(e))
    if any(isinstance(n, Reduce | Ref) for n in nodes):
        return False
    return any(free_axes(e) <= free_axes(n) for n in nodes if isinstance(n, Load) and n.dtype != "bool")


def _is_of_batch(loop: Loop) -> bool:
    """Whether all products of a loop have its index on both of their sides: it goes over a batch of them (what heads
    have of a pair)."""
    sums = {n for s in loop.steps for e in step_expressions(s) for n in walk(e) if isinstance(n, Reduce)}
    sides = [[f for f in factors(r.body) if r.axis in free_axes(f)] for r in sums if r.kind == "sum"]
    return bool(sides) and all(len(own) > 1 and all(loop.axis in free_axes(f) for f in own) for own in sides)


def _other_side(row: Axis | None, rest: list[Axis], exprs: Collection[Expr]) -> Axis | None:
    """The axis of `rest` that the products with `row` have on their other side."""
    products = [n for e in exprs for n in walk(e) if isinstance(n, Reduce) and n.kind == "sum"]
    found: set[Axis] = set()
    for r in products:
        sides = [free_axes(f) for f in factors(r.body) if r.axis in free_axes(f)]
        if any(row in s for s in sides):
            found |= {a for a in rest if any(a in s for s in sides) and not any({a, row} <= s for s in sides)}
    return max(found, key=lambda a: (a.extent, a.name), default=None)
