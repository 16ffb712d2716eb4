"""Tile analysis of data: bounds of loops whose masks read tensors, from what those hold in each run of indices.

Before: a document mask varies by loaded data, so every tile is visited. After: a small kernel writes the
least and greatest id of every 64 positions, and the loop runs from the first to the last of these
granules that may hold an id of its rows. The granule is no choice, so that any choice of tiles will do.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..build import FALSE, TRUE, negate, op, reduce, select, substitute
from ..expr import (
    Expr,
    const,
    free_axes,
    loads,
)  # fmt: skip
from ..interior import constants, interior_steps
from ..plan import Accumulator, Interior, KernelPlan, Loop, bounds_of, operand_names, stored_in
from ..spans import truth
from ..target import HOPPER, Target
from ..text import expr_text
from .bound_loops import masks, narrowed
from .contributes import ASSUMING, contribution
from .summarised import MIN_GRANULE, Known, Tables, sides_of
from .visits import visiting

# Below this extent a loop has too few tiles to pay for a kernel that looks at the masks' data, unless there are many
# such loops: at the second extent, with so many scores in all.
MIN_EXTENT, MIN_EXTENT_OF_MANY, MANY = 1024, 256, 2**23


def skip_tiles(plan: KernelPlan, target: Target = HOPPER) -> tuple[KernelPlan, ...]:
    """`plan` alone, or kernels that summarise the data of its masks and list the tiles that its loops visit, and `plan`
    with loops that read these."""
    if not any(_pays(loop, plan) for loop in plan.loops):
        return (plan,)
    # Fine summaries save more than wide tiles.
    narrow = replace(plan, others=tuple(c for c in plan.others if max(sides_of(plan, c), default=1) <= 2 * MIN_GRANULE))
    tables = Tables(narrow)
    loops, lists = [], list[KernelPlan]()
    for n, loop in enumerate(plan.loops):
        listed = visiting(narrow, loop, tables, f"{plan.name}_v{n}", target) if _pays(loop, narrow) else None
        if listed is not None:
            narrow, loop, made = listed
            lists += made
        loops.append(loop if listed else _bounded(loop, tables))
    read = {n.source for loop in loops for e in bounds_of(loop) if e for n in loads(e)}
    made = tables.kernel(read | {name for k in lists for name in operand_names(k)})
    if made is None:
        return (*lists, replace(narrow if lists else plan, loops=tuple(loops)))
    plan = replace(narrow, loops=tuple(loops))
    steps = [s for s in made.loops[0].steps if isinstance(s, Accumulator)]
    read = ", ".join(dict.fromkeys(expr_text(s.update) for s in steps))
    note = f"empty tiles are skipped by what {made.name} finds, {tables.granule} indices at a time, in {read}"
    return made, *lists, replace(plan, notes=(*plan.notes, note))


def _pays(loop: Loop, plan: KernelPlan) -> bool:
    """Whether what a kernel of summaries may save is more than its launch takes; a loop that stores skips no tile."""
    if stored_in(loop, plan.stores):
        return False
    scores = loop.axis.extent * math.prod(a.extent for a in plan.grid if a not in plan.features)
    return loop.axis.extent >= (MIN_EXTENT_OF_MANY if scores >= MANY else MIN_EXTENT)


def _bounded(loop: Loop, tables: Tables) -> Loop:
    """`loop` from the first granule that may contribute to the last, and its interior."""
    if not _pays(loop, tables.plan):
        return loop
    known = Known(loop.axis, tables)
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


def _interior(loop: Loop, known: Known) -> Interior | None:
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
