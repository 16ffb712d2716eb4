"""Sharing: what one kernel gets from the matrix units and another could not is stored between them.

Before: kernels with rows along different axes each compute the scores, one of them element by element, for both
sides of the product have its rows. After: a kernel stores the scores, a tile at a time, and the others load them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..build import substitute
from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Reduce, free_axes, index, load, loads, reductions, ref_names, sources, walk
from ..inner import as_product, power_of_two
from ..interior import substituted
from ..plan import Accumulator, Choices, KernelPlan, Loop, Store
from .choose import MIN_TILE
from .fuse import Fused, Output
from .roles import roles
from .stream import parallel_axes, stream

# (row, column, warps) of the kernel that stores, best first.
TILES = ((64, 64, 4), (64, 128, 8), (32, 64, 4), (32, 32, 4), (16, 32, 4))

# Ways of naming axes that are tried.
MAX_RENAMINGS = 120


def share(
    groups: tuple[Fused, ...], name: str, compute: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[KernelPlan, dict[Expr, Expr]] | None:
    """The kernel that stores what the loops of `groups` share, and what they load in its place; None if nothing is.

    What is stored is no larger than some operand, so that memory stays linear in those.

    Args:
      name: of the kernel.
      shapes: of what is loaded, by name.
    """
    if len(groups) < 2:
        return None
    streamed = [stream(g, compute) for g in groups]
    rows = [roles(parallel_axes(g), *s[:2]).row for g, s in zip(groups, streamed, strict=True)]
    operands = {n for g in groups for o in g.outputs for n in loads(o.expr)}
    largest = max(math.prod(shapes[n.source]) * itemsize(n.dtype) for n in operands)
    kernels = [loops for loops, _, _ in streamed]
    for e, loop in _common(kernels):
        dtype = _stored(e, groups, kernels, compute)
        size = math.prod(a.extent for a in free_axes(e)) * itemsize(dtype)
        row = next((row for row in rows if row is not None and _multiplies_better(e, row, rows, loop)), None)
        if size <= largest and row is not None:
            axes = (*(a for a in parallel_axes(groups[0]) if a in free_axes(e)), loop)
            if frozenset(axes) == free_axes(e):
                plan = _storing(e, name, axes, row, dtype, compute)
                return plan, {e: load(name, tuple(map(index, axes)), dtype)}
    return None


def lend(
    parts: Sequence[tuple[Fused, ...]], name: str, compute: str, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[Fused, ...]]:
    """Before: a kernel multiplies weights of all heads by features, and computes each weight element by element; one
    of another, a head at a time, has them as products of matrices. After: that one stores them, and runs first.

    Args:
      parts: kernels by part, in the order in which they run; one that borrows becomes a part of its own.
      name: begins the names of what is stored.
    """
    made = list(parts)
    every = [g for part in parts for g in part]
    read = {n.source for g in every for o in g.outputs for n in loads(o.expr)}
    plain = [g for g in every if not stream(g, compute)[0]]
    for borrower in plain:
        if read & {o.name for o in borrower.outputs}:
            continue
        for n, part in enumerate(made):
            lenders = (g for g in part if g is not borrower and g in plain)
            pairs = ((g, _lent(borrower, g, f"{name}{n}", compute, shapes)) for g in lenders)
            lender, lent = next((pair for pair in pairs if pair[1] is not None), (None, None))
            if lent is not None:
                # Behind what stores anything else that it loads, too.
                own = next(k for k, part in enumerate(made) if any(g is borrower for g in part))
                made[n] = tuple(lent[1] if g is lender else g for g in part)
                made.insert(max(n, own) + 1, (lent[0],))
                rest = (tuple(g for g in part if g is not borrower) for part in made)
                made = [part for part in rest if part]
                break
    return made


def _lent(
    borrower: Fused, lender: Fused, name: str, compute: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Fused, Fused] | None:
    """Both kernels, the first with a load of what the second stores; None if that does not help."""
    operands = [n for o in borrower.outputs for n in loads(o.expr) if n.source in shapes]
    largest = max((math.prod(shapes[n.source]) * itemsize(n.dtype) for n in operands), default=0)
    largest = max(largest, *(math.prod(a.extent for a in o.axes) * itemsize(o.dtype) for o in borrower.outputs))
    tiled = _tiled(lender)

    def is_wanted(e: Expr) -> bool:
        small = math.prod(a.extent for a in free_axes(e)) * itemsize(compute) <= largest
        return small and not isinstance(e, Reduce) and not _multiplies(e, _tiled(borrower) | free_axes(e))

    wanted = [e for o in borrower.outputs for e in reversed([*walk(o.expr)]) if _is_worth(e) and is_wanted(e)]
    there = ((out, e) for out in lender.outputs for e in walk(out.expr) if _is_worth(e) and free_axes(e) <= {*out.axes})
    offered = [(out, e) for out, e in there if _multiplies(e, tiled)]
    for e, (out, same) in itertools.product(wanted, offered):
        place = renaming(e, same)
        if place is not None:
            axes = tuple(a for a in out.axes if a in place)
            stored = load(name, tuple(index(place[a]) for a in axes), compute)
            held = (replace(o, expr=substitute(o.expr, {}, {e: stored})) for o in borrower.outputs)
            return Fused(tuple(held)), Fused((*lender.outputs, Output(name, axes, compute, same)))
    return None


def _tiled(group: Fused) -> frozenset[Axis]:
    """The axes that tiles of a kernel without loops have."""
    kinds = roles(parallel_axes(group), (), tuple(Store(o.name, o.axes, o.dtype, o.expr) for o in group.outputs))
    return frozenset(a for a in (kinds.row, kinds.column, *kinds.features) if a is not None)


def _multiplies(e: Expr, tiled: frozenset[Axis]) -> bool:
    """Whether all sums of `e` that go with all of its axes are products of matrices."""
    wide = [r for r in reductions(e) if r.kind == "sum" and free_axes(r) == free_axes(e)]
    return bool(wide) and all(as_product(r.body, r.axis, tiled | {r.axis}) is not None for r in wide)


def renaming(e: Expr, other: Expr) -> dict[Axis, Axis] | None:
    """The axis of `e` for each of `other` with which they are the same; None if there are none."""
    own, theirs = (sorted(free_axes(n), key=lambda a: (a.extent, a.name)) for n in (e, other))
    if not sources(other) <= sources(e) or [a.extent for a in own] != [a.extent for a in theirs]:
        return None
    alike = [[*group] for _, group in itertools.groupby(theirs, key=lambda a: a.extent)]
    if math.prod(math.factorial(len(group)) for group in alike) > MAX_RENAMINGS:
        return None
    for picks in itertools.product(*map(itertools.permutations, alike)):
        pick = [*itertools.chain.from_iterable(picks)]
        if substitute(e, {a: index(b) for a, b in zip(own, pick, strict=True)}) is other:
            return dict(zip(pick, own, strict=True))
    return None


def _common(kernels: list[tuple[Loop, ...]]) -> list[tuple[Expr, Axis]]:
    """The largest expressions of products that the loops of all kernels evaluate at each step, and their loop."""
    found: list[dict[tuple[Expr, Axis], None]] = []
    for loops in kernels:
        steps = [(s, loop.axis) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
        nodes = ((n, axis) for s, axis in steps for n in walk(s.update) if axis in free_axes(n))
        found.append(dict.fromkeys(pair for pair in nodes if _is_worth(pair[0])))
    shared = [pair for pair in found[0] if all(pair in other for other in found[1:])]
    inside = {n for e, _ in shared for n in walk(e) if n is not e}
    return [pair for pair in shared if pair[0] not in inside]


def _stored(e: Expr, groups: Sequence[Fused], kernels: Sequence[tuple[Loop, ...]], compute: str) -> str:
    """The type in which `e` is stored: PyTorch's own, should it be what a softmax is taken of, which PyTorch rounds.

    Not beside wider statistics: a backward pass computes weights by those, of scores that it does not round.
    """
    steps = [[s for loop in k for s in loop.steps if isinstance(s, Accumulator)] for k in kernels]
    maxima = [{s.update for s in own if s.kind == "max"} for own in steps]
    widest = max(itemsize(o.dtype) for g in groups for o in g.outputs)
    return e.dtype if all(e in m for m in maxima) and widest <= itemsize(e.dtype) <= itemsize(compute) else compute


def _is_worth(e: Expr) -> bool:
    return is_float(e.dtype) and bool(reductions(e)) and not ref_names(e)


def _multiplies_better(e: Expr, row: Axis, rows: list[Axis | None], loop: Axis) -> bool:
    """Whether a product inside of `e` is one of matrices with these rows, and not so with another's."""

    def is_product(r: Reduce, row: Axis | None) -> bool:
        tiled = {loop, r.axis} if row is None else {loop, row, r.axis}
        return as_product(r.body, r.axis, frozenset(tiled)) is not None

    sums = [r for r in reductions(e) if r.kind == "sum"]
    return any(is_product(r, row) and not all(is_product(r, other) for other in rows) for r in sums)


def _storing(e: Expr, name: str, axes: tuple[Axis, ...], row: Axis, dtype: str, compute: str) -> KernelPlan:
    """The kernel that stores `e`; its last axis is the loop of others."""
    choices = []
    for rows, columns, warps in TILES:
        sides = {row: rows, axes[-1]: columns}
        tiles = tuple((a, min(sides[a], max(MIN_TILE, power_of_two(a.extent))) if a in sides else 1) for a in axes)
        choices.append(Choices(tiles, warps, stages=1))
    first, *others = dict.fromkeys(choices)
    store = Store(name, axes, dtype, e)
    return KernelPlan(name, axes, (), (), (store,), compute, first, tuple(others))


def loading(loops: tuple[Loop, ...], held: Mapping[Expr, Expr]) -> tuple[Loop, ...]:
    """Loops that load what is `held`."""

    return tuple(replace(loop, steps=substituted(loop.steps, held)) for loop in loops)
