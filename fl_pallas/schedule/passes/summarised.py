"""What is known of a loop's axis in granules: the least and greatest value of a mask's data, which a kernel finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..build import op, substitute
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
)
from ..inner import MAX_WHOLE, power_of_two
from ..plan import Accumulator, Choices, KernelPlan, Loop, Store
from ..spans import Span, truth

# The least number of indices summarised together: half of the widest tile, or less.
MIN_GRANULE = 64
# Granules that one program of the kernel that summarises takes.
TILE = 16
# The smallest block of rows that a program takes by itself.
MIN_BLOCK = 32


def sides_of(plan: KernelPlan, choices: Choices) -> list[int]:
    """Tiles of the grid's axes, features apart."""
    return [choices.tile(a) or 1 for a in plan.grid if a not in plan.features]


class Known:
    """What is known as a whole of an expression over one granule of a loop and the rows of a program."""

    def __init__(self, axis: Axis, tables: Tables):
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
    return {size for n in walk(condition) if (size := block_of(n, axis))}


def block_of(n: Expr, axis: Axis) -> int | None:
    """The size of blocks, where a node is the number of that in which an index of `axis` lies."""
    by = n.args[1] if isinstance(n, Op) and n.name == "floordiv" and n.args[0] is index(axis) else None
    return int(by.value) if isinstance(by, Const) else None


def _kinds(e: Expr) -> tuple[str, str]:
    return ("all", "any") if e.dtype == "bool" else ("min", "max")


@dataclass
class Tables:
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
        sides = [n for c in (plan.choices, *plan.others) for n in sides_of(plan, c)]
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
