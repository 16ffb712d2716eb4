"""Masks that are costly to tell, and that heads share, are told once and stored, a byte for each pair.

Before: `select(any[r](picked[b, i, r] == j), ...)` in the kernel of each head, forward and backward, of 24 comparisons
each time. After: a kernel stores whether key j is picked, and the others load that. So it is with powers and logarithms
of distances. Memory is given only as far as the region's operands and results take it in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..build import substitute
from ..dtype import itemsize
from ..expr import (
    Axis,
    Const,
    Expr,
    Load,
    Op,
    Reduce,
    children,
    free_axes,
    index,
    load,
    loads,
    reductions,
    ref_names,
    walk,
)
from ..plan import Accumulator, Choices, KernelPlan, Loop, Store, expressions
from ..target import Target
from .registers import COSTLY
from .rewritten import rewritten
from .share import renaming
from .unfused import visited
from .weigh import CLEARLY, ISSUED, LAUNCH, LOADED, MOVED, POWERS, cycles, evaluated, volume

# Instructions for an element: of a function that a library has, of a division, and of a load that each looks up.
CALLED, DIVIDED, GATHERED = 30, 8, 8
# What an element takes that is loaded.
READ = ISSUED / LOADED
# Sides of a tile of the kernel that stores.
SIDE = 64


@dataclass(frozen=True)
class _Found:
    """A mask that a kernel tells.

    Attributes:
      axes: of the grid, then the loop's.
      issued: instructions for an element.
      again: how many elements all programs tell.
    """

    mask: Expr
    axes: tuple[Axis, ...]
    issued: float
    again: float


def store_masks(
    plans: Sequence[KernelPlan], name: str, shapes: Mapping[str, tuple[int, ...]], target: Target
) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, with masks that some of them load, and kernels that store
    these in front.

    Args:
      name: begins the names of what is stored.
      shapes: of what is loaded, by name.
    """
    found = [f for plan in plans for f in _costly_of(plan)]
    sources = {n.source: n for plan in plans for e in expressions(plan) for n in loads(e)}
    room = sum(math.prod(shapes[s]) * itemsize(n.dtype) for s, n in sources.items() if s in shapes)
    least = max(LAUNCH, (1 - CLEARLY) * sum(cycles(plan, target) for plan in plans))
    made, storing = list(plans), list[KernelPlan]()
    while found:
        first, alike = found[0], [f for f in found if renaming(f.mask, found[0].mask) is not None]
        found = [f for f in found if f not in alike]
        size, each = volume(first.axes), first.issued
        saved = sum(f.again for f in alike) * (each - READ) / ISSUED / target.processors
        own = size * each / ISSUED / target.processors + 2 * size / MOVED + LAUNCH
        made_by = {n.source for n in loads(first.mask)} & {s.name for plan in plans for s in plan.stores}
        if size <= room and saved - own > least and not made_by:
            storing.append(_storing(first, f"{name}{len(storing)}", plans[0].compute))
            made = [_loading(plan, first, storing[-1].name) for plan in made]
    return [*storing, *made]


def _costly_of(plan: KernelPlan) -> Iterator[_Found]:
    """The masks of a kernel's loops that take more than a load."""
    for loop in plan.loops:
        updates = [s.update for s in loop.steps if isinstance(s, Accumulator)]
        wide = frozenset((*(a for a in plan.grid if (plan.choices.tile(a) or 1) > 1), loop.axis))
        times, _ = evaluated(plan, updates, loop.axis)
        for e in dict.fromkeys(m for u in updates for m in _masks(u, plan, loop, wide)):
            axes = tuple(a for a in (*plan.grid, loop.axis) if a in free_axes(e))
            again = times.get(e, volume(axes)) * visited(plan)
            yield _Found(e, axes, _issued(e, wide), again)


def _masks(e: Expr, plan: KernelPlan, loop: Loop, wide: frozenset[Axis]) -> Iterator[Expr]:
    """Conditions on a loop's index and a row, which nothing that the kernel computes takes part in, and that take more
    than a load; of those that conditions join, the one that does."""
    stack, seen = [e], {e}
    while stack:
        n = stack.pop()
        own = free_axes(n)
        given = n.dtype == "bool" and own <= {*plan.grid, loop.axis} and not ref_names(n)
        given = given and all(r.kind in ("any", "all") for r in reductions(n))
        if given and loop.axis in own and len(own & wide) > 1 and not isinstance(n, Load):
            costly = [c for c in children(n) if c.dtype == "bool" and _issued(c, wide) > READ]
            if isinstance(n, Op) and n.name in ("and", "or", "not") and len(costly) == 1:
                stack += costly
            elif _issued(n, wide) > READ:
                yield n
        elif not isinstance(n, Load):
            stack += {*children(n)} - seen
            seen |= {*children(n)}


def _issued(mask: Expr, wide: frozenset[Axis]) -> float:
    """Instructions for an element of a mask: of what is told of a row or of an index alone, none.

    Args:
      wide: the axes of which a tile has more than one index.
    """

    def cost(e: Expr, known: set[Expr]) -> float:
        if e in known or len(free_axes(e) & wide) < 2:
            return 0
        known.add(e)
        if isinstance(e, Reduce):
            return e.axis.extent * (1 + cost(e.body, set()))
        if isinstance(e, Load):
            return GATHERED
        return _own(e) + sum(cost(c, known) for c in children(e))

    return cost(mask, set())


def _own(e: Expr) -> float:
    if not isinstance(e, Op):
        return 0
    if e.name in ("floordiv", "mod"):
        by = e.args[1]
        return 1 if isinstance(by, Const) and not int(by.value) & int(by.value) - 1 else DIVIDED
    if e.name in ("sin", "cos", "tan", "pow", "atan2"):
        return CALLED
    if e.name in ("div", "quotient"):
        return DIVIDED
    return ISSUED / POWERS if e.name in (*COSTLY, "log2", "exp2", "sqrt", "rsqrt") else 1


def _storing(found: _Found, name: str, compute: str) -> KernelPlan:
    """The kernel that stores a mask."""
    own = tuple(Axis(f"x{n}", a.extent) for n, a in enumerate(found.axes))
    e = substitute(found.mask, {a: index(b) for a, b in zip(found.axes, own, strict=True)})
    tiles = Choices(tuple((a, SIDE if n >= len(own) - 2 else 1) for n, a in enumerate(own)), 4, 1)
    return KernelPlan(name, own, (), (), (Store(name, own, "bool", e),), compute, tiles)


def _loading(plan: KernelPlan, found: _Found, name: str) -> KernelPlan:
    """A plan that loads a mask, under whatever names of its axes, from what is stored."""
    held: dict[Expr, Expr] = {}
    for n in (n for e in expressions(plan) for n in walk(e)):
        if n.dtype == "bool" and n not in held and isinstance(n, (Op, Reduce)):
            place = renaming(n, found.mask)
            if place is not None:
                held[n] = load(name, tuple(index(place[a]) for a in found.axes), "bool")
    if not held:
        return plan
    note = f"a mask that heads share is told once, by {name}"
    return replace(rewritten(plan, lambda n: held.get(n, n)), notes=(*plan.notes, note))
