"""Long lists: rows that go through so much more than others that several programs had better share each of them.

Keys that all queries see (sinks, global tokens) among others that few do: a program for a tile of the former goes
through every query, and ends when all others have long ended.
"""

from __future__ import annotations

import math

from ..expr import Axis, Expr, free_axes, ref_names
from ..plan import KernelPlan, Long, Loop
from ..positions import Array
from ..target import Target
from .lengths import of_lists, of_spans
from .listing import Granules
from .split_loop import programs_of
from .weigh import LAUNCH, WARPS, cycles

# Lists are long that are more than this part of what programs go through where all end together; one is to be longer
# than the second part, or little is won.
LONG, LONGEST = 0.5, 0.75
# The least indices of a part, and programs that share a list; runs of which one may be long.
MIN_PART, MAX_PARTS, FEW = 256, 16, 4


def long_lists(plan: KernelPlan, loop: Loop, condition: Expr, granules: Granules, target: Target) -> Long | None:
    """Which of the lists of a loop had better be shared out, those being of where a condition on positions holds."""
    _, rows = granules.seen_by(condition)
    if len(rows) != 1:
        return None
    ((axis, side),) = rows.items()
    return _long(plan, loop, axis, side, of_lists(condition, granules), target)


def long_spans(plan: KernelPlan, loop: Loop, target: Target) -> Long | None:
    """The same of what lies between the ends of a loop that goes through all of that."""
    ends = [e for e in (loop.lower, loop.upper) if e is not None]
    names = frozenset[str]().union(*map(ref_names, ends))
    rows = [a for a in plan.grid if names & {f"{a.name}.first", f"{a.name}.last"}]
    singles = singles_of(plan, loop)
    if len(rows) != 1 or plan.choices.tiled & {*singles}:
        return None
    side = max(c.tile(rows[0]) or 1 for c in (plan.choices, *plan.others))
    lengths = of_spans(loop, {rows[0]: side}, singles)
    return None if lengths is None else _long(plan, loop, rows[0], side, lengths, target)


def _long(plan: KernelPlan, loop: Loop, axis: Axis, side: int, lengths: Array, target: Target) -> Long | None:
    """Which runs had better be shared out, the indices that each goes through being known."""
    if not all(axis in s.axes for s in loop.steps):
        return None
    total, resident = -(-axis.extent // side), _resident(plan, target)
    programs = programs_of(plan) / total
    balanced = lengths.mean() * total * programs / resident
    longest, many = lengths.max(), math.ceil((lengths > LONG * balanced).mean() * total)
    # Cycles of an index, in one of the programs that run at a time.
    each = cycles(plan, target) * resident / (total * programs * loop.axis.extent)
    if not many or many * FEW > total or longest < LONGEST * balanced or longest * LONG * each < 3 * LAUNCH:
        return None
    runs = 1 << (many - 1).bit_length()
    parts = max(2 * resident / (runs * programs), longest / (LONG * balanced))
    parts = 1 << (max(2, min(MAX_PARTS, round(parts), int(longest) // MIN_PART)) - 1).bit_length()
    return Long(axis, side, runs, parts)


def _resident(plan: KernelPlan, target: Target) -> int:
    """How many programs run at a time."""
    return target.processors * max(1, WARPS // plan.choices.warps)


def singles_of(plan: KernelPlan, loop: Loop) -> tuple[Axis, ...]:
    """The axes of the grid, rows apart, for whose indices a loop goes through something else."""
    ends = [loop.visits.some] if loop.visits else [e for e in (loop.lower, loop.upper) if e is not None]
    own = frozenset[Axis]().union(*map(free_axes, ends))
    return tuple(a for a in plan.grid if a in own)
