"""Tile analysis of data: bounds of loops whose masks read tensors, from what those hold in each run of indices.

Before: a document mask varies by loaded data, so every tile is visited. After: a small kernel writes the
least and greatest id of every 64 positions, and the loop runs from the first to the last of these
granules that may hold an id of its rows. The granule is no choice, so that any choice of tiles will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..build import FALSE, TRUE, negate, op, reduce, select, substitute
from ..dtype import is_float
from ..expr import (
    Axis,
    Const,
    Expr,
    Index,
    Load,
    Op,
    Reduce,
    Ref,
    const,
    free_axes,
    index,
    load,
    loads,
    raw_op,
    ref,
    ref_names,
    walk,
)  # fmt: skip
from ..inner import MAX_WHOLE, power_of_two
from ..interior import constants, interior_steps
from ..plan import Accumulator, Choices, Interior, KernelPlan, Loop, Store, bounds_of, operand_names, stored_in
from ..spans import Span, truth
from ..target import HOPPER, Target
from ..text import expr_text
from .bound_loops import masks, narrowed
from .contributes import ASSUMING, contribution
from .visits import Classes, Granules, apart, looked_at, may_have_gaps, part_visited, pays, with_visits

# Below this extent a loop has too few tiles to pay for a kernel that looks at the masks' data, unless there are many
# such loops: at the second extent, with so many scores in all.
MIN_EXTENT, MIN_EXTENT_OF_MANY, MANY = 1024, 256, 2**23
# The least number of indices summarised together: half of the widest tile, or less.
MIN_GRANULE = 64
# Granules that one program of the kernel that summarises takes.
TILE = 16
# The part of the granules above which a loop goes through all of them; and what is taken for it where data decides.
MOST, UNKNOWN_PART = 0.75, 0.5
# The smallest block of rows that a program takes by itself.
MIN_BLOCK = 32


def skip_tiles(plan: KernelPlan, target: Target = HOPPER) -> tuple[KernelPlan, ...]:
    """`plan` alone, or kernels that summarise the data of its masks and list the tiles that its loops visit, and `plan`
    with loops that read these."""
    if not any(_pays(loop, plan) for loop in plan.loops):
        return (plan,)
    # Fine summaries save more than wide tiles.
    narrow = replace(plan, others=tuple(c for c in plan.others if max(_sides(plan, c), default=1) <= 2 * MIN_GRANULE))
    tables = _Tables(narrow)
    loops, lists = [], list[KernelPlan]()
    for n, loop in enumerate(plan.loops):
        narrow, visiting, made = _visiting(narrow, loop, tables, f"{plan.name}_v{n}", target)
        loops.append(_bounded(loop, tables) if visiting is None else visiting)
        lists += made
    read = {n.source for loop in loops for e in bounds_of(loop) if e for n in loads(e)}
    made = tables.kernel(read | {name for k in lists for name in operand_names(k)})
    if made is None:
        return (*lists, replace(narrow if lists else plan, loops=tuple(loops)))
    plan = replace(narrow, loops=tuple(loops))
    steps = [s for s in made.loops[0].steps if isinstance(s, Accumulator)]
    read = ", ".join(dict.fromkeys(expr_text(s.update) for s in steps))
    note = f"empty tiles are skipped by what {made.name} finds, {tables.granule} indices at a time, in {read}"
    return made, *lists, replace(plan, notes=(*plan.notes, note))


def _sides(plan: KernelPlan, choices: Choices) -> list[int]:
    """Tiles of the grid's axes, features apart."""
    return [choices.tile(a) or 1 for a in plan.grid if a not in plan.features]


def _pays(loop: Loop, plan: KernelPlan) -> bool:
    """Whether what a kernel of summaries may save is more than its launch takes; a loop that stores skips no tile."""
    if stored_in(loop, plan.stores):
        return False
    scores = loop.axis.extent * math.prod(a.extent for a in plan.grid if a not in plan.features)
    return loop.axis.extent >= (MIN_EXTENT_OF_MANY if scores >= MANY else MIN_EXTENT)


def _visiting(
    plan: KernelPlan, loop: Loop, tables: _Tables, name: str, target: Target
) -> tuple[KernelPlan, Loop | None, tuple[KernelPlan, ...]]:
    """A plan with choices for a loop that visits certain granules, that loop, and the kernels that list these; the plan
    as it is, where the loop had better go through all between two ends."""
    if not _pays(loop, plan):
        return plan, None, ()
    for assuming in ASSUMING:
        about = assuming(loop, tables.rows)
        loop = about if may_have_gaps(contribution(about), loop.axis, tables.rows) else loop
    condition = contribution(loop)
    if not may_have_gaps(condition, loop.axis, tables.rows):
        return plan, None, ()
    known = _Known(loop.axis, tables)
    by_positions = apart(condition)[0]
    looks = may_have_gaps(by_positions, loop.axis, tables.rows)
    rows = {a: known.block(a, condition) for a in plan.grid if a in tables.rows}
    singles = tuple(a for a in plan.grid if a in tables.single)
    granules = Granules(loop.axis, tables.granule, known.granules, rows, singles)

    def fits(c: Choices) -> bool:
        return (c.tile(loop.axis) or 1) <= tables.granule and all((c.tile(a) or 1) <= n for a, n in rows.items())

    ways = [c for c in (plan.choices, *plan.others) if fits(c)]
    part = part_visited(loop, by_positions, granules) if looks else UNKNOWN_PART
    if not ways or part > MOST or not pays(plan, part, target):
        return plan, None, ()
    found = _classes(loop, lambda e: known.truth(e, rows))
    looking: tuple[KernelPlan, ...] = ()
    if looks:
        # What positions tell, pair by pair; and what data does, by the ends of what it holds.
        exact = _classes(loop, lambda e: (e, e), lambda e: apart(e)[0])
        rest = _classes(loop, lambda e: known.truth(e, rows), lambda e: apart(e)[1])
        looked = looked_at(exact, granules, name, plan.compute)
        if looked is not None:
            seen, looking = looked
            possible = op("and", seen.possible, rest.possible, dtype="bool")
            certain = op("and", seen.certain, rest.certain, dtype="bool")
            found = Classes(certain, possible, rest.constants)
    if not looking and not may_have_gaps(found.possible, known.granules, tables.rows):
        return plan, None, ()
    found = replace(found, certain=granules.are_whole(found.certain))
    listed = with_visits(loop, found, granules, part, name, plan.compute)
    if listed is None:
        return plan, None, ()
    return replace(plan, choices=ways[0], others=tuple(ways[1:])), listed[0], (*looking, *listed[1])


def _classes(loop: Loop, truth: Callable[[Expr], Span], of: Callable[[Expr], Expr] = lambda e: e) -> Classes:
    """Whether all of a loop's masks let something through, and whether it may contribute, as far as `truth` tells.

    Args:
      of: the part of a condition that is asked.
    """
    certain, replaced = TRUE, dict[Expr, Expr]()
    for test, kept in masks(loop.steps):
        sure, _ = truth(of(test if kept else negate(test)))
        if loop.axis in free_axes(test) and sure is not FALSE:
            replaced[test] = TRUE if kept else FALSE
            certain = op("and", certain, sure, dtype="bool")
    left_out = constants(loop.steps, lambda e: substitute(e, {}, replaced))
    return Classes(certain if replaced else FALSE, truth(of(contribution(loop)))[1], left_out)


def _bounded(loop: Loop, tables: _Tables) -> Loop:
    """`loop` from the first granule that may contribute to the last, and its interior."""
    if not _pays(loop, tables.plan):
        return loop
    known = _Known(loop.axis, tables)
    _, possible = truth(contribution(loop), known.span, known.parts)
    for assuming in ASSUMING:
        if (about := assuming(loop, frozenset(tables.rows))) is not loop:
            _, less = truth(contribution(about), known.span, known.parts)
            if less is not possible and tables.reads(less):
                loop, possible = about, less
    # What is known of positions alone is solved for the loop's ends already, but for what differs from one position of
    # a table to the next.
    asks = free_axes(possible) & tables.single and loop.lower is None and loop.upper is None
    if not (tables.reads(possible) or asks):
        return loop
    start, last = known.ends(loop.axis)
    stop = op("add", last, const(1, "i64"), dtype="i64")
    lower = reduce("min", known.granules, select(possible, start, const(loop.axis.extent, "i64")), "i64")
    upper = reduce("max", known.granules, select(possible, stop, const(0, "i64")), "i64")
    return replace(
        loop,
        lower=narrowed(loop.lower, lower, "max"),
        upper=narrowed(loop.upper, upper, "min"),
        interior=_interior(loop, known),
    )


def _interior(loop: Loop, known: _Known) -> Interior | None:
    """The interior of `loop`, within the first run of granules that all masks on data let through whole."""
    everywhere = TRUE
    replaced: dict[Expr, Expr] = {}
    for test, kept in masks(interior_steps(loop)):
        certain, _ = truth(test if kept else negate(test), known.span, known.parts)
        if loop.axis in free_axes(test) and known.tables.reads(certain):
            replaced[test] = TRUE if kept else FALSE
            everywhere = op("and", everywhere, certain, dtype="bool")
    if not replaced:
        return loop.interior
    start, _ = known.ends(loop.axis)
    end = const(loop.axis.extent, "i64")
    lower = reduce("min", known.granules, select(everywhere, start, end), "i64")
    beyond = op("and", negate(everywhere), op("gt", start, lower, dtype="bool"), dtype="bool")
    upper = reduce("min", known.granules, select(beyond, start, end), "i64")
    if loop.interior is not None:
        lower, upper = narrowed(loop.interior.lower, lower, "max"), narrowed(loop.interior.upper, upper, "min")
    before = dict(loop.interior.constants) if loop.interior else {}
    found = constants(loop.steps, lambda e: substitute(substitute(e, {}, before), {}, replaced))
    return Interior(lower, upper, found)


class _Known:
    """What is known as a whole of an expression over one granule of a loop and the rows of a program."""

    def __init__(self, axis: Axis, tables: _Tables):
        self.axis, self.tables = axis, tables
        self.granules = Axis("t", -(-axis.extent // tables.granule))

    def block(self, axis: Axis, condition: Expr) -> int:
        """How many indices of the rows are looked at together: no fewer than a tile has, or as many as a block of them
        of which `condition` takes the number."""
        side = self.tables.sides[axis]
        blocks = [n for n in _blocks(condition, axis) if MIN_BLOCK <= n and n & -n < side]
        return min((n & -n for n in blocks), default=side)

    def truth(self, condition: Expr, rows: Mapping[Axis, int]) -> Span:
        """(certain, possible) of a condition over a granule and as many rows, of which a block has all or none."""
        known: dict[Expr, Expr] = {}
        for axis, side in {**rows, self.axis: self.tables.granule}.items():
            for n in _blocks(condition, axis):
                if n % side == 0:
                    size = const(n, "i64")
                    known[op("floordiv", index(axis), size, dtype="i64")] = op(
                        "floordiv", self.ends(axis)[0], size, dtype="i64"
                    )
        return truth(substitute(condition, {}, known), self.span, self.parts)

    def parts(self, e: Expr) -> frozenset[Axis]:
        """The axes of the tile that `e` depends on."""
        return free_axes(e) & {self.axis, *self.tables.rows}

    def span(self, e: Expr) -> Span | None:
        """Least and greatest value of `e` where the tables or the ends of the tile tell; None elsewhere."""
        parts = self.parts(e)
        names = {n.name for a in self.tables.rows for n in self.ends(a) if isinstance(n, Ref)}
        if not parts and free_axes(e) <= {*self.tables.single, self.granules} and ref_names(e) <= names:
            return None if is_float(e.dtype) and not isinstance(e, (Const, Load)) else (e, e)
        if not parts or ref_names(e) or free_axes(e) - parts - self.tables.single:
            return None
        if len(parts) > 1:
            return None
        (axis,) = parts
        if isinstance(e, Index):
            return self.ends(axis)
        if not any(axis in free_axes(n) for n in loads(e)) or any(isinstance(n, Reduce) for n in walk(e)):
            return None
        if is_float(e.dtype) and not isinstance(e, Load):
            # Arithmetic might be rounded otherwise than where the mask itself is computed.
            return None
        return self._column(e) if axis == self.axis else self._row(e, axis)

    def ends(self, axis: Axis) -> Span:
        """First and last index of the granule, or of the rows; beyond the axis where that ends first."""
        if axis != self.axis:
            return ref(f"{axis.name}.first", (), "i64"), ref(f"{axis.name}.last", (), "i64")
        size = self.tables.granule
        start = op("mul", index(self.granules), const(size, "i64"), dtype="i64")
        return start, op("add", start, const(size - 1, "i64"), dtype="i64")

    def _column(self, e: Expr) -> Span:
        low, high = (self.tables.read(kind, e, self.axis, index(self.granules)) for kind in _kinds(e))
        return low, high

    def _row(self, e: Expr, axis: Axis) -> Span:
        """Over the granules of the first and last row: a granule is no narrower than half of a tile."""
        size = const(self.tables.granule, "i64")
        at = [op("floordiv", end, size, dtype="i64") for end in self.ends(axis)]
        low, high = ([self.tables.read(kind, e, axis, t) for t in at] for kind in _kinds(e))
        join = ("and", "or") if e.dtype == "bool" else ("min", "max")
        return op(join[0], *low, dtype=e.dtype), op(join[1], *high, dtype=e.dtype)


def _blocks(condition: Expr, axis: Axis) -> set[int]:
    """By what an index of `axis` is divided in a condition."""
    found = (n.args for n in walk(condition) if isinstance(n, Op) and n.name == "floordiv")
    return {int(n.value) for i, n in found if i is index(axis) and isinstance(n, Const)}


def _kinds(e: Expr) -> tuple[str, str]:
    return ("all", "any") if e.dtype == "bool" else ("min", "max")


@dataclass
class _Tables:
    """The summaries that a plan's bounds read, and the kernel that makes them.

    Attributes:
      plan: the kernel with the bounds.
      made: the accumulators, by what they are of.
      rows: the grid axes of which a program takes a tile.
      single: those of which it takes one index.
      sides: how many indices of its rows a program takes, at most.
      granule: how many indices are summarised together, the same for every axis.
      every: all granules of the longest axis.
      inside: the indices of one.
    """

    plan: KernelPlan
    made: dict[tuple[str, Expr], Accumulator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        sides = [n for c in (plan.choices, *plan.others) for n in _sides(plan, c)]
        wide = [a for a in plan.grid if any((c.tile(a) or 1) > 1 for c in (plan.choices, *plan.others))]
        self.rows = frozenset(wide) - frozenset(plan.features)
        self.single = frozenset(plan.grid) - frozenset(wide)
        longest = max(a.extent for a in (*self.rows, *(loop.axis for loop in plan.loops)))
        looped = max(loop.axis.extent for loop in plan.loops)
        # A program of the kernel takes all granules of its loop as one vector.
        self.granule = max(MIN_GRANULE, power_of_two(-(-looped // MAX_WHOLE)), power_of_two(max(sides, default=1)) // 2)
        self.sides = {a: max(c.tile(a) or 1 for c in (plan.choices, *plan.others)) for a in self.rows}
        self.every = Axis("t", -(-longest // self.granule))
        self.inside = Axis("g", self.granule)

    def read(self, kind: str, e: Expr, axis: Axis, at: Expr) -> Expr:
        """The min, max, any or all of `e` over granule `at` of `axis`."""
        granule = op("mul", index(self.every), const(self.granule, "i64"), dtype="i64")
        position = op("add", granule, index(self.inside), dtype="i64")
        # Beyond the end, the last element again; said of every length, so that all have the same kernel.
        position = raw_op("min", (position, const(axis.extent - 1, "i64")), "i64")
        update = substitute(e, {axis: position})
        step = self.made.get((kind, update))
        if step is None:
            free = free_axes(update)
            axes = tuple(a for a in (*self.plan.grid, self.every) if a in free)
            step = Accumulator(f"s{len(self.made)}", kind, axes, update, e.dtype, None)
            self.made[kind, update] = step
        where = tuple(at if a == self.every else index(a) for a in step.axes)
        return load(self._name(step), where, e.dtype)

    def _name(self, step: Accumulator) -> str:
        return f"{self.plan.name}_{step.name}"

    def reads(self, e: Expr) -> bool:
        """Whether `e` reads a summary."""
        names = {self._name(s) for s in self.made.values()}
        return any(n.source in names for n in loads(e))

    def kernel(self, wanted: set[str]) -> KernelPlan | None:
        """The kernel that writes the summaries named in `wanted`; None if there are none."""
        steps = tuple(s for s in self.made.values() if self._name(s) in wanted)
        if not steps:
            return None
        used = frozenset().union(*(s.axes for s in steps))
        grid = tuple(a for a in (*self.plan.grid, self.every) if a in used)
        stores = tuple(Store(self._name(s), s.axes, s.dtype, ref(s.name, s.axes, s.dtype)) for s in steps)
        sides = {a: 1 for a in grid} | {self.every: TILE, self.inside: MIN_GRANULE}
        return KernelPlan(
            f"{self.plan.name}_tiles", grid, (), (Loop(self.inside, steps),), stores, self.plan.compute,
            Choices(tuple(sides.items())), minor=True,
        )  # fmt: skip
