"""Parting: kernels that do better apart, because their outputs want other rows, or their chains want more registers."""

from __future__ import annotations

import math

from ..build import substitute
from ..expr import Axis, Expr, Reduce, Ref, children, free_axes, index, load, ref_names, walk
from ..plan import Accumulator, KernelPlan, Loop, Step, Store
from .choose import roles
from .fuse import Fused, Output
from .stream import parallel_axes, stream


def part_outputs(fused: Fused, compute: str) -> tuple[Fused, ...]:
    """Before: one kernel whose outputs reuse what they load along different axes. After: one for each such axis.

    A tile has rows along one axis; an output whose operands are not shared along it would be no matrix product.
    What the kernels have in common is computed by each.
    """
    groups: dict[Axis | None, list[Output]] = {}
    for out in fused.outputs:
        alone = Fused((out,))
        loops, stores, _ = stream(alone, compute)
        row = roles(parallel_axes(alone), loops, stores).row if loops else None
        groups.setdefault(row, []).append(out)
    if len(groups) < 2 or None in groups:
        return (fused,)
    return tuple(Fused(tuple(outputs)) for outputs in groups.values())


def work_of_a_warp(plan: KernelPlan) -> float:
    """Elements of the tile of rows by loop indices, for each warp; 0 for a plan without both."""
    rows = [n for a, n in plan.choices.tiles if n > 1 and a in plan.grid and a not in plan.features]
    columns = [plan.choices.tile(loop.axis) or 1 for loop in plan.loops]
    return math.prod(rows) * max(columns) / plan.choices.warps if rows and columns else 0


def part_chains(
    loops: tuple[Loop, ...], stores: tuple[Store, ...], parallel: tuple[Axis, ...], name: str, compute: str
) -> tuple[tuple[tuple[Loop, ...], tuple[Store, ...]], ...]:
    """Before: one loop with accumulators of which some know nothing of the others. After: a kernel that stores what
    the first of them come to, and one that takes it from there.

    Returns: (loops, stores) of each kernel; as they were if there is but one chain, or if chains share a reduction,
    which both kernels would compute.
    """
    if len(loops) != 1:
        return ((loops, stores),)
    (loop,) = loops
    chain = _chain(loop.steps)
    others = tuple(s for s in loop.steps if s not in chain)
    if not others or _reductions(chain) & _reductions(others):
        return ((loops, stores),)
    own = frozenset(s.name for s in chain)
    kept: dict[Expr, Store] = {}

    def visit(e: Expr) -> None:
        names = ref_names(e)
        if names and names <= own and e not in kept:
            axes = tuple(a for a in parallel if a in free_axes(e))
            kept[e] = Store(f"{name}_p{len(kept)}", axes, compute, e)
        elif names & own and not names <= own:
            for c in children(e):
                visit(c)

    for s in stores:
        visit(s.expr)
    loaded: dict[Expr, Expr] = {e: load(s.name, tuple(map(index, s.axes)), s.dtype) for e, s in kept.items()}
    first = (Loop(loop.axis, chain),), tuple(kept.values())
    second = (
        (Loop(loop.axis, others),),
        tuple(Store(s.name, s.axes, s.dtype, substitute(s.expr, {}, loaded), s.dims) for s in stores),
    )
    return first, second


def _chain(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The first step and all that are tied to it by references, in order."""
    names = {s.name for s in steps}
    ties = {s.name: {s.name, *(r for e in _exprs(s) for r in _refs(e) & names)} for s in steps}
    found = {steps[0].name}
    while more := {n for tied in ties.values() if tied & found for n in tied} - found:
        found |= more
    return tuple(s for s in steps if s.name in found)


def _reductions(steps: tuple[Step, ...]) -> set[Reduce]:
    return {n for s in steps for e in _exprs(s) for n in walk(e) if isinstance(n, Reduce)}


def _exprs(step: Step) -> tuple[Expr, ...]:
    if isinstance(step, Accumulator):
        return (step.update,) if step.correct is None else (step.update, step.correct)
    return (step.value,)


def _refs(e: Expr) -> set[str]:
    return {n.name.removesuffix(".old") for n in walk(e) if isinstance(n, Ref)}
