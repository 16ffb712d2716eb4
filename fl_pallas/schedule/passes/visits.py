"""Visits: a loop goes through the granules of its axis that may contribute, where there are gaps between them.

Before: `for j0 in 0 .. x2.last + 1`, of which a mask, `j < 4 | i - j < 256`, leaves the first and the last tiles.
After: small kernels store, for each run of rows, which granules masks let through whole, which in part, and which not
at all, and sort them by that; the loop goes through the first two kinds. (FlexAttention's BlockMask is such a list,
arXiv 2412.05496, section 4; a user makes it, from a mask that is given apart. This one is derived.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from ..build import FALSE, TRUE, negate, op, substitute
from ..expr import Axis, Expr, Index, Load, Op, Reduce, children, free_axes, index, loads, ref_names, walk
from ..interior import constants
from ..plan import Choices, KernelPlan, Loop
from ..positions import is_of_positions
from ..spans import Span
from ..target import Target
from .bound_loops import masks
from .contributes import ASSUMING, contribution
from .lengths import of_lists, of_spans
from .listing import Classes, Granules, looked_at, with_visits
from .long_lists import long_lists
from .summarised import MIN_GRANULE, Known, Tables, block_of
from .weigh import LAUNCH, MOVED, cycles, volume

# The part of the granules above which a loop goes through all of them; and what is taken for it where data decides.
MOST, UNKNOWN_PART = 0.75, 0.5
# The least blocks of which one pair is looked at for all.
LEAST = 8
# The most conditions that a condition is parted into.
MOST_PARTS = 16
# Runs are half as long where they then visit less than this part of the granules.
NARROW = 0.75


def visiting(
    plan: KernelPlan, loop: Loop, tables: Tables, name: str, target: Target
) -> tuple[KernelPlan, Loop, tuple[KernelPlan, ...]] | None:
    """A plan with choices for a loop that visits certain granules, that loop, and the kernels that list these; None
    where the loop had better go through all between two ends.

    Args:
      tables: what is known of data.
      name: begins the names of the kernels.
    """
    for assuming in ASSUMING:
        about = assuming(loop, tables.rows)
        loop = about if may_have_gaps(contribution(about), loop.axis, tables.rows) else loop
    condition = contribution(loop)
    known_of = {loop.axis, *tables.rows, *tables.single}
    if not may_have_gaps(condition, loop.axis, tables.rows) or not free_axes(condition) <= known_of:
        return None
    known = Known(loop.axis, tables)
    rows = {a: known.block(a, condition) for a in plan.grid if a in tables.rows}
    apart = partial(_apart, axis=loop.axis, rows=rows, granule=tables.granule)
    by_pairs, by_blocks, others = apart(condition)
    looks, looks_at_blocks, unseen = (may_have_gaps(e, loop.axis, tables.rows) for e in (by_pairs, by_blocks, others))
    singles = tuple(a for a in plan.grid if a in tables.single)
    granules = Granules(loop.axis, tables.granule, known.granules, rows, singles)
    of_positions = is_of_positions(by_pairs)
    part = UNKNOWN_PART
    if looks and of_positions:
        narrowed, part = _narrowed(plan, loop, by_pairs, granules)
        looks = part <= MOST
        granules = narrowed if looks else granules
        if not looks and (looks_at_blocks or unseen):
            part = UNKNOWN_PART
    ways, rows = _fitting(plan, granules), {**granules.rows}
    read = 0 if of_positions else volume(free_axes(by_pairs)) / MOVED
    # What data tells of small blocks is looked at in each call, and leaves less out than of large ones.
    launches = 5 if looks_at_blocks else 3
    if not ways or part > MOST or (1 - part) * cycles(plan, target) < launches * LAUNCH + read:
        return None
    # What positions and given masks tell, pair by pair, what data tells of small blocks, by one pair of each; and what
    # other data does, by the ends of what it holds.
    seen, looking, left = list[Classes](), list[KernelPlan](), {0, 1, 2}
    for n, asked in enumerate((looks, looks_at_blocks)):
        if asked:
            exact = _classes(loop, lambda e: (e, e), lambda e, n=n: apart(e)[n])
            steps = _steps(op("and", exact.possible, exact.certain, dtype="bool"), (loop.axis, *rows)) if n else {}
            looked = None if steps is None else looked_at(exact, granules, f"{name}{'_b' * n}", plan.compute, steps)
            if looked is not None:
                seen.append(looked[0])
                looking += looked[1]
                left -= {n}
    rest = _classes(loop, lambda e: known.truth(e, rows), lambda e: _all(apart(e)[n] for n in sorted(left)))
    certain, possible = (_all(getattr(c, what) for c in (*seen, rest)) for what in ("certain", "possible"))
    found = Classes(certain, possible, rest.constants)
    if not looking and not (loads(found.possible) and may_have_gaps(found.possible, known.granules, tables.rows)):
        return None
    found = replace(found, certain=granules.are_whole(found.certain))
    listed = with_visits(loop, found, granules, part, name, plan.compute)
    if listed is None:
        return None
    plan = replace(plan, choices=ways[0], others=tuple(ways[1:]))
    visits = listed[0].visits
    if visits is not None and looks and of_positions:
        visits = replace(visits, long=long_lists(plan, loop, by_pairs, granules, target))
    return plan, replace(listed[0], visits=visits), (*looking, *listed[1])


def _narrowed(plan: KernelPlan, loop: Loop, condition: Expr, granules: Granules) -> tuple[Granules, float]:
    """Granules and runs of rows, these half as long where they visit far less then; and the part that they visit."""
    part = _part_visited(loop, condition, granules)
    half = replace(granules, rows={a: min(n, max(n // 2, MIN_GRANULE)) for a, n in granules.rows.items()})
    if half.rows == granules.rows or not _fitting(plan, half):
        return granules, part
    less = _part_visited(loop, condition, half)
    # Wide tiles save less than what narrow runs leave out, where that is much.
    return (half, less) if less < NARROW * part else (granules, part)


def _fitting(plan: KernelPlan, granules: Granules) -> list[Choices]:
    """The choices whose tiles are no larger than granules and runs."""
    sides = {granules.axis: granules.granule, **granules.rows}
    return [c for c in (plan.choices, *plan.others) if all((c.tile(a) or 1) <= n for a, n in sides.items())]


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


def may_have_gaps(condition: Expr, axis: Axis, rows: Collection[Axis]) -> bool:
    """Whether a condition on indices of a loop's axis is no conjunction of comparisons, which hold between two ends.

    Args:
      rows: the axes of which a program takes a tile, of whose indices or ends the condition may be.
    """
    nodes = [n for n in walk(condition) if axis in free_axes(n)]
    paired = [n for n in nodes if isinstance(n, Load) and n.dtype == "bool"]
    by_pairs = (not free_axes(n).isdisjoint(rows) or bool(ref_names(n)) for n in paired)
    return any(by_pairs) or any(isinstance(n, Reduce) or isinstance(n, Op) and n.name in ("or", "mod") for n in nodes)


def _apart(condition: Expr, axis: Axis, rows: Mapping[Axis, int], granule: int) -> tuple[Expr, Expr, Expr]:
    """What joins to a condition by `and`: that of positions, and of masks that are given for each pair of a row and an
    index of the axis; that of data of blocks, some smaller than a granule or a run of rows; and the rest.

    Args:
      rows: how many indices a run has of each.
    """

    def kind(e: Expr) -> int:
        given = {n for n in loads(e) if n.dtype == "bool" and _is_of_pairs(n, axis, rows)}
        if is_of_positions(e, given):
            return 0
        steps = _steps(e, (axis, *rows)) or {}
        return 1 if any(step % {axis: granule, **rows}[a] for a, step in steps.items()) else 2

    found = [TRUE, TRUE, TRUE]
    for whole in _conjuncts(condition):
        for e in (whole,) if kind(whole) < 2 else _distributed(whole):
            n = kind(e)
            found[n] = op("and", found[n], e, dtype="bool")
    return found[0], found[1], found[2]


def _steps(condition: Expr, axes: Iterable[Axis]) -> dict[Axis, int] | None:
    """How many indices of each axis a condition does not tell from each other, powers of two, for it asks for their
    blocks alone; None where these are smaller than LEAST."""
    steps: dict[Axis, int] = {}
    for a in axes:
        users = [n for n in walk(condition) if index(a) in children(n)]
        blocks = [size for n in users if (size := block_of(n, a))]
        if len(blocks) < len(users):
            return None
        if blocks:
            size = math.gcd(*blocks)
            steps[a] = size & -size
    return steps if steps and min(steps.values()) >= LEAST else None


def _is_of_pairs(n: Load, axis: Axis, rows: Collection[Axis]) -> bool:
    """Whether a tensor is read by an index of the axis and by a row: by neither's block."""
    plain = {i.axis for i in n.index if isinstance(i, Index)}
    return axis in plain and not plain.isdisjoint(rows)


def _distributed(e: Expr) -> list[Expr]:
    """(a and b) or c, as what it joins by `and`: a or c, b or c."""
    if not (isinstance(e, Op) and e.name == "or"):
        return [e]
    left, right = ([*_conjuncts(a)] for a in e.args)
    return [op("or", a, b, dtype="bool") for a in left for b in right] if len(left) * len(right) <= MOST_PARTS else [e]


def _conjuncts(e: Expr) -> Iterator[Expr]:
    """What a condition joins by `and`, and what both sides of an `or` so join."""
    if isinstance(e, Op) and e.name == "and":
        yield from (c for a in e.args for c in _conjuncts(a))
    elif isinstance(e, Op) and e.name == "or":
        left, right = ([*_conjuncts(a)] for a in e.args)
        common = [c for c in left if c in right]
        yield from common
        yield op("or", *(_all(c for c in side if c not in common) for side in (left, right)), dtype="bool")
    else:
        yield e


def _all(conditions: Iterable[Expr]) -> Expr:
    """That all of some conditions hold."""
    return reduce(lambda a, b: op("and", a, b, dtype="bool"), conditions, TRUE)


def _part_visited(loop: Loop, condition: Expr, granules: Granules) -> float:
    """The part of what lies between a loop's bounds where a condition on positions holds somewhere in a granule."""
    singles, rows = granules.seen_by(condition)
    between = of_spans(loop, rows, singles)
    every = np.asarray(loop.axis.extent) if between is None else between
    covering = np.ceil(every / granules.granule) * granules.granule
    return min(1.0, float(of_lists(condition, granules).mean() / max(1.0, covering.mean())))
