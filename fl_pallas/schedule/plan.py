"""The schedule IR: a KernelPlan says what one kernel does, in no backend's terms."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property

from .dtype import is_float
from .expr import Axis, Expr, free_axes, index, loads, reductions
from .inner import ROWS

# What masks put in the place of scores is this or less, if it is not -inf; and what maxima of scores are not below.
HIDDEN, FLOOR = -9000.0, -4500.0
# The least number of float32.
LOWEST = -(2.0**128 - 2.0**104)


@dataclass(frozen=True)
class Accumulator:
    """A running reduction over the loop axis.

    At each tile of the loop: value = correct ⊕ (⊕ over the tile of update), from `identity` on.

    Attributes:
      name: the Ref that stands for its value; `<name>.old` is the value before the current tile.
      kind: sum, max, min, prod, any or all.
      axes: its axes, all of them parallel.
      update: what one index of the loop axis contributes, given the values of this tile's earlier steps.
      dtype: for a sum of products, the type in which the factors are multiplied.
      correct: the old value after the references it was taken against moved, in terms of `<ref>.old`
        and `<ref>`; None if it never needs to.
    """

    name: str
    kind: str
    axes: tuple[Axis, ...]
    update: Expr
    dtype: str
    correct: Expr | None


@dataclass(frozen=True)
class Anchor:
    """A finite reference that follows `value` while the loop runs; it keeps its last finite value."""

    name: str
    axes: tuple[Axis, ...]
    value: Expr


Step = Accumulator | Anchor


@dataclass(frozen=True)
class Interior:
    """The part of a loop that masks let through whole: from `lower` up to `upper` (bounds as in Loop).

    Attributes:
      constants: nodes of what the steps accumulate, a mask's test say, that are constants there.
    """

    lower: Expr | None
    upper: Expr | None
    constants: tuple[tuple[Expr, Expr], ...]


# The reference by which a loop's `Visits` call the place that they have reached.
PLACE = "place"


@dataclass(frozen=True)
class Long:
    """A few runs of rows whose lists are far longer than others': a program for each ends long after all others.

    Attributes:
      rows: the axis of the grid whose runs these are.
      side: how many rows a run has.
      runs: how many of the longest lists are shared out, of each of the axes that lists have besides.
      parts: to how many programs each.
    """

    rows: Axis
    side: int
    runs: int
    parts: int


@dataclass(frozen=True)
class Visits:
    """The order in which a loop goes through its axis, `granule` indices at a time: first the granules that all masks
    let through whole, then others that may contribute, then the rest. It goes through the first two.

    Attributes:
      at: the granule at the place that the reference `PLACE` tells.
      whole: how many granules masks let through whole.
      some: how many may contribute, those among them.
      every: how many there are.
      part: of the granules between the loop's bounds, by an estimate.
      long: lists that had better be shared out, by an estimate, as long as none is.
    """

    at: Expr
    whole: Expr
    some: Expr
    every: Expr
    granule: int
    part: float
    long: Long | None = None


@dataclass(frozen=True)
class Guess:
    """A running maximum that need not run: sums can be taken about any number that is not too far from it.

    Attributes:
      maximum: name of the accumulator.
      total: name of the sum of the weights alone, which tells whether a number was too far off.
      bits: by how many powers of two the weights shrink where the reference is 1 more.
    """

    maximum: str
    total: str
    bits: float


@dataclass(frozen=True)
class Loop:
    """A loop over `axis`, running `steps` in order at each tile.

    `lower` and `upper` bound the indices that can contribute, as scalar expressions of `<axis>.first`
    and `<axis>.last`, the ends of the current tile of a grid axis; None where nothing is known. They
    may load tensors, and reduce over axes of their own, taken whole.
    Tiles inside of `interior` leave masks out.

    With `finite`, names of what earlier loops made, the bounds hold where these are finite numbers, and sums not 0, for
    the whole tile; elsewhere the loop runs over all indices, for what a mask hides is NaN then. With `settled`, they
    hold where the loop leaves maxima that are as large as this; elsewhere it goes on with the indices outside of them,
    for a row of nothing but a large negative number has all of them count. With `above`, loads and a number each, they
    hold where what is loaded, all along the axis or for the tile, is finite and no less than that: rows' maxima, made
    by another kernel.

    With `visits`, the loop goes through what these say, and not through all between the bounds.

    With `parts`, a grid axis, the range within the bounds is shared out: the program at index n of that axis
    runs its n-th part alone, in whole tiles. Parts may be empty.

    With `guesses`, sums are taken about the maxima of the first tile; only where that shows to have been too far off
    does the loop run again, about running maxima.
    """

    axis: Axis
    steps: tuple[Step, ...]
    lower: Expr | None = None
    upper: Expr | None = None
    interior: Interior | None = None
    parts: Axis | None = None
    guesses: tuple[Guess, ...] = ()
    finite: tuple[str, ...] = ()
    settled: tuple[tuple[str, float], ...] = ()
    above: tuple[tuple[Expr, float], ...] = ()
    visits: Visits | None = None


def above_along(loop: Loop) -> list[tuple[Expr, float]]:
    """Of `above` what varies along a loop's axis: another loop looks at it before this one begins."""
    return [(e, least) for e, least in loop.above if loop.axis in free_axes(e)]


def bounds_of(loop: Loop) -> tuple[Expr | None, ...]:
    """Lower and upper bound of a loop, then those of its interior if it has one, then what its visits say."""
    inner = (loop.interior.lower, loop.interior.upper) if loop.interior else ()
    visits = (loop.visits.at, loop.visits.whole, loop.visits.some, loop.visits.every) if loop.visits else ()
    return (loop.lower, loop.upper, *inner, *visits)


@dataclass(frozen=True)
class Store:
    """An output: its elements over `axes`, from final accumulators and operands; or, where a loop's axis is among
    `axes`, from operands alone, at each tile of that loop.

    Attributes:
      dims: index and extent of each dimension, in terms of `axes`; empty if the axes are the dimensions, in order.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    expr: Expr
    dims: tuple[tuple[Expr, int], ...] = ()

    @property
    def index(self) -> tuple[Expr, ...]:
        return tuple(i for i, _ in self.dims) if self.dims else tuple(map(index, self.axes))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.dims) if self.dims else tuple(a.extent for a in self.axes)


@dataclass(frozen=True)
class Choices:
    """Everything that changes speed and not meaning.

    Attributes:
      tiles: side of the tile of each grid and loop axis; 1 for axes taken one index at a time.
      warps: warps of a program.
      stages: depth of the software pipeline of the loops.
      blocks: whether a copy engine brings tiles, on a GPU that has one.
      guesses: whether sums are taken about guesses, where loops have some.
    """

    tiles: tuple[tuple[Axis, int], ...]
    warps: int = 4
    stages: int = 2
    blocks: bool = True
    guesses: bool = True

    def tile(self, axis: Axis) -> int | None:
        """Side of the tile along `axis`, None if it was not chosen here."""
        return self._sides.get(axis)

    @cached_property
    def tiled(self) -> frozenset[Axis]:
        """The axes of which a tile has more than one index."""
        return frozenset(a for a, n in self.tiles if n > 1)

    @cached_property
    def _sides(self) -> dict[Axis, int]:
        return dict(self.tiles)


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: a program for each tile of the grid axes runs the loops, then stores.

    Attributes:
      name: unique in its schedule.
      grid: parallel axes; those whose tile covers them whole take no grid dimension.
      features: the grid axes that the costly part of the loops does not depend on, taken whole.
      loops: passes over loop axes, in order; later ones may use earlier results.
      stores: the outputs.
      choices: tile sizes and the like; the scheduler's pick.
      others: further choices worth trying, best first.
      notes: what the scheduler decided and why, for fl.explain.
      minor: whether it takes so little time that one kernel had better serve all sizes from the start.
      parts: whether what it multiplies in float32 is loaded in parts (passes/in_parts.py).
    """

    name: str
    grid: tuple[Axis, ...]
    features: tuple[Axis, ...]
    loops: tuple[Loop, ...]
    stores: tuple[Store, ...]
    compute: str
    choices: Choices = field(default_factory=lambda: Choices(()))
    others: tuple[Choices, ...] = ()
    notes: tuple[str, ...] = ()
    minor: bool = False
    parts: bool = False

    def with_choices(self, choices: Choices) -> KernelPlan:
        return replace(self, choices=choices)


def stored_in(loop: Loop, stores: Iterable[Store]) -> tuple[Store, ...]:
    """Those of the stores that are made at each tile of a loop."""
    return tuple(s for s in stores if loop.axis in s.axes)


def stored_last(loops: Iterable[Loop], stores: Iterable[Store]) -> tuple[Store, ...]:
    """Those of the stores that no loop makes."""
    inside = {loop.axis for loop in loops}
    return tuple(s for s in stores if inside.isdisjoint(s.axes))


def evaluated_in(loop: Loop, stores: Iterable[Store]) -> list[Expr]:
    """What a loop adds to accumulators, and what it stores, at each of its tiles."""
    updates = [s.update for s in loop.steps if isinstance(s, Accumulator)]
    return updates + [s.expr for s in stored_in(loop, stores)]


def reduced_over(grid: Iterable[Axis], loops: Iterable[Loop], stores: Sequence[Store]) -> frozenset[Axis]:
    """The axes of a grid over which what is stored in loops is reduced: a tile has to have them whole."""
    inside = (s for loop in loops for s in stored_in(loop, stores))
    return frozenset(r.axis for s in inside for r in reductions(s.expr)) & {*grid}


def held_whole(plan: KernelPlan) -> frozenset[Axis]:
    """The axes of a plan's grid that a tile has whole, because what is stored in loops is reduced over them."""
    return reduced_over(plan.grid, plan.loops, plan.stores)


def without_maxima(loop: Loop) -> Loop:
    """The steps of a loop that knows the maxima it has guesses of: its sums are never multiplied."""
    known = {g.maximum for g in loop.guesses}
    steps = (s for s in loop.steps if s.name not in known)
    sums = tuple(replace(s, correct=None) for s in steps if isinstance(s, Accumulator))
    return replace(loop, steps=sums, guesses=(), settled=())


def is_by_thread(plan: KernelPlan, loop: Loop) -> bool:
    """Whether a loop takes fewer indices at a time than a matrix product does, so that each thread sums its own."""
    return (plan.choices.tile(loop.axis) or 1) < min(ROWS, loop.axis.extent)


def operand_names(plan: KernelPlan) -> tuple[str, ...]:
    """Names of the tensors a kernel reads, in the order its function takes them."""
    return tuple(dict.fromkeys(n.source for e in expressions(plan) for n in loads(e)))


def made_once(plans: Sequence[KernelPlan], results: Collection[str]) -> frozenset[str]:
    """The minor kernels, by name, that store the same at each call, and no result: they read nothing, or what such
    kernels store."""
    found, known = set[str](), set[str]()
    for plan in plans:
        own = {s.name for s in plan.stores}
        if plan.minor and known.issuperset(operand_names(plan)) and own.isdisjoint(results):
            found.add(plan.name)
            known |= own
    return frozenset(found)


def expressions(plan: KernelPlan) -> list[Expr]:
    """Every expression of a plan."""
    out: list[Expr] = []
    for loop in plan.loops:
        out += [*dict(loop.above), *(e for e in bounds_of(loop) if e is not None)]
        out += [e for s in loop.steps for e in step_expressions(s)]
    places = [i for s in plan.stores for i, _ in s.dims if loads(i)]
    return out + [s.expr for s in plan.stores] + places


def held_dtype(kind: str, update: Expr, compute: str) -> str:
    """The type in which an accumulator of this kind and update is kept, floats being computed in `compute`."""
    if kind in ("any", "all"):
        return "bool"
    return compute if is_float(update.dtype) else update.dtype


def step_expressions(step: Step) -> list[Expr]:
    """What a step evaluates."""
    if isinstance(step, Accumulator):
        return [step.update] + ([step.correct] if step.correct is not None else [])
    return [step.value]


def fingerprint(plan: KernelPlan) -> str:
    """A digest of what a plan computes and how, the same in every process: of names it tells which are the same, and of
    notes nothing. The kernels of a model's layers are one."""
    places = {name: f"%{k}" for k, name in enumerate((*operand_names(plan), *(s.name for s in plan.stores)))}
    known: dict[int, str] = {}

    def digest(x: object) -> str:
        if isinstance(x, tuple):
            return f"({','.join(map(digest, x))})"
        if not is_dataclass(x):
            return places.get(x, repr(x)) if isinstance(x, str) else repr(x)
        found = known.get(id(x))
        if found is None:
            # Nodes are shared: each is written once, and stands for itself by its digest.
            text = ",".join(digest(getattr(x, f.name)) for f in fields(x))
            found = known[id(x)] = hashlib.sha256(f"{type(x).__name__}({text})".encode()).hexdigest()
        return found

    return digest(replace(plan, name="", notes=()))
