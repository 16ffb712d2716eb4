"""schedule(): the passes in order, on one screen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .dtype import compute_dtype, itemsize
from .passes.build_plan import build_plan
from .passes.cut import cut
from .passes.fuse import Output, fuse
from .passes.group_rows import group_rows
from .passes.grow_regions import Region, Rejected, grow_regions
from .passes.resolve_views import resolve_views
from .passes.skip_tiles import skip_tiles
from .passes.split_loop import split_loop
from .passes.split_reductions import split_reductions
from .passes.stream import parallel_axes, stream
from .plan import KernelPlan
from .program import Program
from .target import HOPPER, Target
from .text import fused_text, growth_text, plan_text, program_text

Record = Callable[[str, str], None]


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


def schedule(program: Program, target: Target = HOPPER, record: Record = lambda stage, text: None) -> Schedule:
    """Run all passes; `record(stage, text)` receives the IR after each."""
    record("program", program_text(program))
    program = resolve_views(program)
    record("resolve_views", program_text(program))
    growth = grow_regions(program)
    record("grow_regions", growth_text(growth))
    compute = compute_dtype([v.dtype for v in program.values if v.axes])
    kernels = []
    rejected = list(growth.rejected)
    for n, region in enumerate(growth.regions):
        plans: list[KernelPlan] = []
        for fused in fuse(program, region):
            record("fuse", fused_text(fused))
            fused = split_reductions(fused)
            record("split_reductions", fused_text(fused))
            parts = cut(fused, f"r{n}_{len(plans)}")
            rejected += _stored(program, region, [o for part in parts[:-1] for o in part.outputs])
            for part in parts:
                record("cut", fused_text(part))
                loops, stores, notes = stream(part, compute)
                parallel, loops, stores = group_rows(parallel_axes(part), loops, stores)
                plan = build_plan(f"r{n}_k{len(plans)}", parallel, loops, stores, notes, compute, target)
                *tables, plan = skip_tiles(plan)
                for made in (*tables, *split_loop(plan, f"r{n}_k{len(plans) + 1}", target)):
                    record("plan", plan_text(made))
                    plans.append(made)
        kernels.append(tuple(plans))
    return Schedule(program, growth.regions, tuple(kernels), tuple(rejected))


def _stored(program: Program, region: Region, between: list[Output]) -> list[Rejected]:
    """What kernels hand on to each other although it is larger than all that the region reads and returns."""
    members = [program.by_name[m] for m in region.members]
    around = {*region.outputs, *(r for v in members for r in v.reads)} - {*region.members} | {*region.outputs}
    limit = max(program.by_name[name].numel for name in around)
    large = max(members, key=lambda v: v.numel)
    sizes = [(math.prod(a.extent for a in o.axes), o.dtype) for o in between]
    why = "a reduction inside of another cannot be taken along with it, and is stored between two kernels"
    return [Rejected(large, large, why, n * itemsize(dtype), fused=True) for n, dtype in sizes if n > limit]
