"""schedule(): the passes in order, on one screen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..errors import Unsupported
from .dtype import is_float, itemsize
from .expr import Axis, Expr, sources
from .passes.again import grow_again
from .passes.align import align, beside
from .passes.along import take_along
from .passes.asked import asked
from .passes.both_sides import on_both_sides
from .passes.build_plan import build_plan
from .passes.by_cases import by_cases, solved
from .passes.by_distance import by_distance
from .passes.compared import check_comparisons
from .passes.copies import store_copies
from .passes.cut import cut_apart
from .passes.distances import look_up_distances
from .passes.exchange import exchange, short_first
from .passes.expand_squares import expand_squares
from .passes.factors import store_multiplied
from .passes.flatten import flatten
from .passes.fuse import Fused, Output, fuse
from .passes.group_rows import group_features, group_rows
from .passes.guess import guess
from .passes.hold import hold
from .passes.in_parts import in_parts
from .passes.interchange import interchange
from .passes.itself import itself
from .passes.lay_out import lay_out, lay_out_results
from .passes.look_up import look_up
from .passes.masked_sides import mask_sides
from .passes.of_positions import of_positions
from .passes.pairs import Streamed
from .passes.part import Kernel, part_outputs, ways_to_part
from .passes.picked import picked
from .passes.places import places
from .passes.prologue import into_prologues
from .passes.region import Growth, Region, Rejected
from .passes.roots import without_roots
from .passes.rounded import grow_rounded
from .passes.scans import grow_scanned, scans
from .passes.share import lend, loading, share
from .passes.share_out import share_out_long
from .passes.skip_tiles import skip_tiles
from .passes.split_loop import split_loop
from .passes.split_sums import split_sums
from .passes.stored_masks import store_masks
from .passes.stream import parallel_axes, stream
from .passes.strength import by_element, without_divisions
from .passes.summaries import join_summaries
from .passes.tabulate import tabulate
from .passes.unflatten import unflatten
from .passes.unfused import slower
from .passes.weigh import cheapest, covering
from .passes.write_out import write_out
from .plan import Choices, KernelPlan, Loop, Store, stored_in
from .program import Program, Value, compute_of, left_to_pytorch
from .target import HOPPER, Target
from .text import fused_text, growth_text, plan_text, program_text
from .verify import verify_operands, verify_plan, verify_program, verify_stores

Record = Callable[[str, Callable[[], str]], None]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Schedule:
    """What becomes of a Program.

    Attributes:
      program: the Program with views resolved.
      regions: the fused regions; their `outputs` are computed by `kernels`, the rest stays with PyTorch.
      kernels: for each region, its kernels in order.
      rejected: blow-ups that stay with PyTorch, and why.
    """

    program: Program
    regions: tuple[Region, ...]
    kernels: tuple[tuple[KernelPlan, ...], ...]
    rejected: tuple[Rejected, ...]


def schedule(
    program: Program, target: Target = HOPPER, record: Record = lambda stage, text: None, verify: bool = False
) -> Schedule:
    """Run all passes; `record(stage, text)` receives the IR after each, `text()` being its print.

    Raises: ScheduleError if, with `verify`, a Program or KernelPlan is not well formed: an error in a pass.
    """
    if verify:
        verify_program(program)
    record("program", partial(program_text, program))
    try:
        made = _scheduled(*grow_scanned(program), target, record, verify)
    except Unsupported:
        if not scans(program):
            raise
        # Whatever a scan stood in the way of: it is PyTorch's, and what it reads is stored.
        made = _scheduled(*grow_again(program, *grow_rounded(program)), target, record, verify)
    if apart := frozenset[str]().union(*(r.apart for r in made.rejected)):
        why = "kernels would store more on the way to it than PyTorch does, or take longer"
        return schedule(left_to_pytorch(program, apart, why), target, record, verify)
    return made


def _scheduled(
    viewed: Program,
    program: Program,
    growth: Growth,
    rounded: frozenset[str],
    target: Target,
    record: Record,
    verify: bool,
) -> Schedule:
    """Run all passes behind the growth of regions."""
    program, growth = store_copies(viewed, program, growth, rounded)
    if verify:
        verify_program(program)
    record("resolve_views", partial(program_text, program))
    record("grow_regions", partial(growth_text, growth))
    compute = compute_of(program)
    shapes: Shapes = {v.name: v.shape for v in (*program.values, *program.facts)}
    # What is known of operands is compared with what the groups hold.
    facts = tuple(f if f.expr is None else replace(f, expr=solved(f.expr, f.axes)) for f in program.facts)
    regions, kernels = [], []
    rejected = list(growth.rejected)
    taken = frozenset(m for region in growth.regions for m in region.members)
    written: dict[str, Value] = {}
    for n, region in enumerate(growth.regions):
        groups = fuse(program, region)
        _record_each(record, "fuse", groups)
        groups = asked(groups, f"r{n}")
        groups = tuple(map(by_cases, map(itself, map(flatten, groups))))
        groups = tuple(map(unflatten, groups))
        _record_each(record, "unflatten", groups)
        groups = tuple(map(picked, map(places, groups)))
        short, groups = short_first(*exchange(groups, program, facts, f"r{n}", compute))
        _record_each(record, "exchange", groups)
        groups = tuple(without_divisions(without_roots(fused), facts) for fused in groups)
        groups = tabulate(short, groups, f"r{n}", compute)
        region, along = take_along(program, region, taken, groups[: len(short)], written)
        groups = (*along, *groups[len(short) :])
        taken |= {*region.members}
        _record_each(record, "without_divisions", groups)
        groups = tuple(map(expand_squares, groups))
        _record_each(record, "expand_squares", groups)
        groups = tuple(map(interchange, map(by_distance, map(of_positions, groups))))
        _record_each(record, "interchange", groups)
        tables, groups = look_up(groups, f"r{n}_p", compute, shapes)
        by_distance_alone, groups = look_up_distances(groups, f"r{n}_x")
        tables = (*tables, *by_distance_alone)
        _record_each(record, "look_up", (*tables, *groups))
        groups = beside(groups)
        kernels_of = functools.cache(partial(_made, program, region, f"r{n}", compute, shapes, target, tables))

        def plans_of(parts: tuple[Fused, ...], made: Callable[..., _Made] = kernels_of) -> tuple[KernelPlan, ...]:
            return made(parts).plans

        def cut_plans_of(
            groups: tuple[Fused, ...], plans_of: Callable[..., tuple[KernelPlan, ...]] = plans_of, name: str = f"r{n}"
        ) -> tuple[KernelPlan, ...]:
            return plans_of(cut_apart(groups, name))

        whole, groups = groups, hold(groups, f"r{n}_h", compute, cut_plans_of, target, region.outputs)
        _record_each(record, "hold", groups)
        # What is cut may itself be computed many times over, from what can be stored (scores, before heads are mixed).
        held = len(groups) - len(whole)
        parts = hold(cut_apart(groups, f"r{n}"), f"r{n}_g", compute, plans_of, target, region.outputs, held)
        made = kernels_of(parts)
        if made.plans and (left := slower(program, region, made.plans, target)) is not None:
            rejected.append(left)
            continue
        rejected += made.between
        if not made.plans:
            continue
        regions.append(region)
        _record_each(record, "cut", made.parts)
        shapes |= made.shapes
        plans = store_masks(made.plans, f"r{n}_m", shapes, target)
        plans = store_multiplied(into_prologues(plans, region.outputs), f"r{n}_l")
        plans = lay_out_results(plans, region.outputs)
        plans = in_parts(plans, shapes | {s.name: s.shape for plan in plans for s in plan.stores})
        plans = [part for plan in plans for part in share_out_long(plan, target)]
        check_comparisons(plans)
        for plan in plans:
            if verify:
                verify_plan(plan)
            record("plan", partial(plan_text, plan))
        if verify:
            verify_operands(program, region.members, plans)
        kernels.append(tuple(plans))
    if verify:
        verify_stores(plan for region in kernels for plan in region)
    return Schedule(program, tuple(regions), tuple(kernels), tuple(rejected))


def _record_each(record: Record, stage: str, groups: tuple[Fused, ...]) -> None:
    for fused in groups:
        record(stage, partial(fused_text, fused))


@dataclass(frozen=True)
class _Made:
    """What a region becomes.

    Attributes:
      parts: what its kernels compute.
      plans: the kernels; none if what they would hand on to each other is too large.
      between: what is so large, and what is large and stored all the same.
      shapes: of all that is loaded, by name.
    """

    parts: tuple[Fused, ...]
    plans: tuple[KernelPlan, ...]
    between: tuple[Rejected, ...]
    shapes: Shapes


def _made(
    program: Program,
    region: Region,
    name: str,
    compute: str,
    shapes: Shapes,
    target: Target,
    tables: tuple[Fused, ...],
    parts: tuple[Fused, ...],
) -> _Made:
    """What a region becomes whose kernels compute `parts`, which look things up in what `tables` store."""
    between = _stored(program, region, [o for part in parts for o in part.outputs])
    parts = _in_order((*tables, *parts))
    if not all(r.fused for r in between):
        # What is a result is stored in any case (an embedding's gradient, which PyTorch adds up without a matrix).
        return _Made(parts, (), tuple(r for r in between if r.value.name not in region.outputs), {})
    shapes = {**shapes}
    aligned = [tuple(map(align, part_outputs(part, compute))) for part in parts]
    kernels: list[Streamed | KernelPlan] = []
    for apart in lend(aligned, f"{name}_w", compute, shapes):
        shapes |= {o.name: o.shape for group in apart for o in group.outputs}
        held: dict[Expr, Expr] = {}
        if shared := share(apart, f"{name}_s{len(kernels)}", compute, shapes):
            storing, held = shared
            kernels.append(storing)
            shapes[storing.name] = storing.stores[0].shape
        kernels += [_streamed(group, held, compute) for group in apart]

    def plans_of(*way: Streamed | KernelPlan) -> tuple[KernelPlan, ...]:
        made: list[KernelPlan] = []
        for k in way:
            made += [k] if isinstance(k, KernelPlan) else _planned(k, f"{name}_k", len(made), compute, shapes, target)
        return tuple(made)

    streamed = partial(_streamed, held={}, compute=compute)
    plans = join_summaries(plans_of(*on_both_sides(kernels, region.outputs, streamed, plans_of, compute, target)))
    shapes |= {s.name: s.shape for plan in plans for s in plan.stores}
    return _Made(parts, tuple(lay_out(plans, shapes, region.outputs)), tuple(between), shapes)


def _in_order(parts: tuple[Fused, ...]) -> tuple[Fused, ...]:
    """`parts`, each behind those that store what it loads, and as they were otherwise."""
    left, ordered = [*parts], list[Fused]()
    while left:
        waiting = {o.name for part in left for o in part.outputs}
        ready = (n for n, p in enumerate(left) if waiting.isdisjoint(_loaded(p) - {o.name for o in p.outputs}))
        ordered.append(left.pop(next(ready, 0)))
    return tuple(ordered)


def _loaded(part: Fused) -> set[str]:
    return {name for o in part.outputs for name in sources(o.expr)}


def _streamed(part: Fused, held: dict[Expr, Expr], compute: str) -> Streamed:
    """The loops of one part; `held` is what they load in place of an expression."""
    loops, stores, notes = stream(part, compute)
    loops = by_element(mask_sides(loading(loops, held)))
    return Streamed((parallel_axes(part), loops, stores), notes, None if held else part)


def _in_place(streamed: Streamed, shapes: Shapes) -> tuple[tuple[Axis, ...], tuple[Loop, ...], tuple[Store, ...]]:
    """A kernel with its axes put in order."""
    parallel, loops, stores = streamed.kernel
    if any(stored_in(loop, stores) for loop in loops):
        return group_features(*streamed.kernel)
    return group_rows(*group_features(*write_out(parallel, loops, stores, shapes)))


def _planned(
    streamed: Streamed, name: str, number: int, compute: str, shapes: Shapes, target: Target
) -> list[KernelPlan]:
    """The kernels of one part, named by `name` and a number from `number` on.

    Args:
      shapes: of what is loaded, by name.
    """
    parallel, loops, stores = _in_place(streamed, shapes)

    def built(loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> KernelPlan:
        own = tuple(a for a in parallel if any(a in s.axes for s in stores))
        return replace(build_plan(own, loops, stores, streamed.notes, compute, target), name=name)

    def tiles(kernel: Kernel) -> Choices | None:
        return next(iter(covering(built(*kernel))), None)

    ways = ways_to_part(loops, stores, parallel, f"{name}{number}", compute, tiles)
    kernels = cheapest([tuple(built(*kernel) for kernel in way) for way in ways], target)
    plans: list[KernelPlan] = []
    for kernel in kernels:
        *tables, plan = skip_tiles(replace(kernel, name=f"{name}{number + len(plans)}"))
        split = split_loop if plan.loops else split_sums
        plans.extend((*tables, *map(guess, split(plan, f"{name}{number + len(plans) + 1}", target))))
    return plans


def _stored(program: Program, region: Region, between: list[Output]) -> list[Rejected]:
    """What kernels hand on to each other although it is larger than all that the region reads and returns, and has a
    number for each pair of a row and a column; refused if it is larger than all that PyTorch would store."""
    members = [program.by_name[m] for m in region.members]
    around = {*region.outputs, *(r for v in members for r in v.reads)} - {*region.members} | {*region.outputs}
    limit = max(program.by_name[name].numel for name in around)
    pairs = [v for m in region.large if (v := program.by_name[m]).numel > limit]

    def is_large(n: int, dtype: str) -> bool:
        # What all pairs of a member of the batch have is left where that is reduced; of a mask a byte a pair is no
        # matter.
        reduced = is_float(dtype) and any(v.numel % n == 0 and n >= math.prod(sorted(v.shape)[-2:]) for v in pairs)
        return n > limit and (reduced or n >= min((v.numel for v in pairs), default=limit))

    large = max(members, key=lambda v: v.numel)
    sizes = [(math.prod(a.extent for a in o.axes), o.dtype) for o in between if o.name not in region.outputs]
    why = "a reduction inside of another cannot be taken along with it, and is stored between two kernels"
    if any(n > large.numel for n, _ in sizes):
        larger = "a reduction inside of another cannot be taken along with it, and would be stored in more places"
        apart = _made_of_more(between, large.numel) & {*region.outputs}
        apart = apart if apart < {*region.outputs} else frozenset()
        return [Rejected(large, large, larger, large.numel * itemsize(large.dtype), apart=apart)]
    return [Rejected(large, large, why, n * itemsize(dtype), fused=True) for n, dtype in sizes if is_large(n, dtype)]


def _made_of_more(outputs: list[Output], limit: int) -> frozenset[str]:
    """What has more elements than `limit`, and what is computed from that."""
    found = {o.name for o in outputs if math.prod(a.extent for a in o.axes) > limit}
    known = 0
    while known < len(found):
        known = len(found)
        found |= {o.name for o in outputs if not found.isdisjoint(sources(o.expr))}
    return frozenset(found)
