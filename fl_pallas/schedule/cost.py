"""Estimates of work and memory traffic, for reports and choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .dtype import itemsize
from .expr import Axis, Expr, Op, Reduce, free_axes, loads, walk
from .passes.grow_regions import Region
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


def plan_cost(plan: KernelPlan, program: Program) -> Cost:
    """Each operand read once, each output written once; every distinct node of the expressions evaluated
    once per index of its axes. Skipped tiles are not accounted for."""
    nodes: set[Expr] = set()
    contracted = 0
    for loop in plan.loops:
        for step in loop.steps:
            if isinstance(step, Accumulator):
                nodes.update(walk(step.update))
                contracted += _volume(free_axes(step.update))
    nodes.update(n for s in plan.stores for n in walk(s.expr))
    flops = contracted + sum(_node_flops(n) for n in nodes)
    sources = {n.source for n in nodes for n in loads(n) if n.source in program.by_name}
    read = sum(_bytes(program, s) for s in sources)
    written = sum(math.prod(a.extent for a in s.axes) * itemsize(s.dtype) for s in plan.stores)
    return Cost(flops, read + written)


def unfused_cost(program: Program, region: Region) -> Cost:
    """Each member computed by itself: its operands read, itself written."""
    total = Cost(0, 0)
    for name in region.members:
        v = program.by_name[name]
        assert v.expr is not None
        moved = _bytes(program, name) + sum(_bytes(program, r) for r in v.reads)
        total = total + Cost(sum(_node_flops(n) for n in walk(v.expr)), moved, _bytes(program, name))
    return total


def _node_flops(n: Expr) -> int:
    if isinstance(n, Reduce):
        return _volume(free_axes(n.body))
    if isinstance(n, Op) and n.dtype in ("f16", "bf16", "f32", "f64"):
        return _volume(free_axes(n))
    return 0


def _volume(axes: frozenset[Axis]) -> int:
    return math.prod(a.extent for a in axes)


def _bytes(program: Program, name: str) -> int:
    v = program.by_name[name]
    return v.numel * itemsize(v.dtype)
