"""Estimates of work and memory traffic, for reports and choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .dtype import itemsize
from .expr import Expr, Op, Reduce, free_axes, loads, walk
from .passes.region import Region
from .passes.unfused import moved, nbytes
from .passes.weigh import volume
from .pipeline import Schedule
from .plan import Accumulator, KernelPlan
from .program import Program


@dataclass(frozen=True)
class Cost:
    """Floating operations, bytes moved through device memory, and the largest tensor made on the way (bytes)."""

    flops: int
    bytes: int
    largest: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, max(self.largest, other.largest))


def fused_costs(schedule: Schedule) -> list[Cost]:
    """Of the kernels of each region: each reads every operand once, and writes what it stores once; every distinct node
    of their expressions is evaluated once per index of its axes. Skipped tiles are not accounted for."""
    every = (s for plans in schedule.kernels for plan in plans for s in plan.stores)
    sizes = {v.name: nbytes(v) for v in (*schedule.program.facts, *schedule.program.values)}
    sizes |= {s.name: math.prod(s.shape) * itemsize(s.dtype) for s in every}
    return [_fused(plans, region, sizes) for region, plans in zip(schedule.regions, schedule.kernels, strict=True)]


def _fused(plans: Sequence[KernelPlan], region: Region, sizes: Mapping[str, int]) -> Cost:
    """The cost of a region's kernels; `sizes` of all that is loaded and stored, bytes."""
    between = (sizes[s.name] for plan in plans for s in plan.stores if s.name not in region.outputs)
    total = Cost(0, 0, max(between, default=0))
    for plan in plans:
        nodes: set[Expr] = set()
        contracted = 0
        for loop in plan.loops:
            for step in loop.steps:
                if isinstance(step, Accumulator):
                    nodes.update(walk(step.update))
                    contracted += volume(free_axes(step.update))
        nodes.update(n for s in plan.stores for n in walk(s.expr))
        sources = {n.source for e in nodes for n in loads(e)}
        read = sum(sizes[s] for s in sources)
        written = sum(sizes[s.name] for s in plan.stores)
        total = total + Cost(contracted + sum(_node_flops(n) for n in nodes), read + written)
    return total


def unfused_cost(program: Program, region: Region) -> Cost:
    """Each member computed by itself: its operands read, itself written."""
    total = Cost(0, 0)
    for name in region.members:
        v = program.by_name[name]
        assert v.expr is not None
        total = total + Cost(sum(_node_flops(n) for n in walk(v.expr)), moved(program, v), nbytes(v))
    return total


def _node_flops(n: Expr) -> int:
    if isinstance(n, Reduce):
        return volume(free_axes(n.body))
    if isinstance(n, Op) and n.dtype in ("f16", "bf16", "f32", "f64"):
        return volume(free_axes(n))
    return 0
