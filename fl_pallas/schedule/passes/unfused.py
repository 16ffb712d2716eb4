"""Regions that kernels would take far longer for than PyTorch does, operation by operation: they are PyTorch's.

The scheduler knows no program for some of them that matrix units could run, and computes a sum of products element by
element (a batch of products, normed along the batch). An estimate of the kernels tells.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dtype import is_float, itemsize
from ..expr import Expr, Op, Reduce, children, free_axes, loads, reductions, ref_names, walk
from ..plan import KernelPlan, Loop, made_once
from ..program import Program, Value
from ..target import Target
from .lengths import of_spans
from .region import Region, Rejected
from .registers import COSTLY
from .weigh import ISSUED, LAUNCH, MOVED, MULTIPLIED, POWERS, cycles, volume

# How many times as long kernels may take as PyTorch without any fusion (Inductor takes less, and more memory), and the
# least cycles that this has to cost (50 us).
TIMES, COST = 1.5, 90_000
# Matrix units multiply 32-bit floats so many times slower (without TF32).
SLOWER_IN_32 = 16


def slower(program: Program, region: Region, plans: Sequence[KernelPlan], target: Target) -> Rejected | None:
    """Why kernels are not to compute a region, if there is room for all that PyTorch makes on the way; else None."""
    members = [v for m in region.members if not (v := program.by_name[m]).is_view]
    stored = sum(nbytes(v) for v in members if v.name not in region.outputs)
    without = sum(_cycles(program, v, target) for v in members)
    once = made_once(plans, region.outputs)
    ours = sum(cycles(plan, target) * visited(plan) for plan in plans if plan.name not in once)
    if stored > target.room or ours < TIMES * without or ours - without < COST:
        return None
    large = max(members, key=lambda v: v.numel)
    why = f"kernels would take {ours / without:.1f} times as long as PyTorch's own operations, by the estimate"
    return Rejected(large, large, why, nbytes(large), apart=_first(program, region))


def _first(program: Program, region: Region) -> frozenset[str]:
    """Products of what a region is given that are smaller than that, without which kernels may be faster: of each query
    with keys of its own, beside those that all have."""
    outside = (v for m in region.members if not {*region.members} & {*(v := program.by_name[m]).reads})
    products = (v for v in outside if v.expr is not None and any(map(_multiplies, reductions(v.expr))))
    return frozenset(v.name for v in products if v.numel < max(program.by_name[r].numel for r in v.reads))


def visited(plan: KernelPlan) -> float:
    """The part of its loops that a kernel goes through, where positions alone bound them (one side of a diagonal; of a
    table of distances, those that a sequence has), or lists: of some programs, spread over the grid."""
    shares = [_share(plan, loop) * (loop.visits.part if loop.visits else 1) for loop in plan.loops]
    return sum(shares) / len(shares) if shares else 1.0


def _share(plan: KernelPlan, loop: Loop) -> float:
    bounds = [b for b in (loop.lower, loop.upper) if b is not None]
    names = frozenset[str]().union(*map(ref_names, bounds))
    rows = {a: plan.choices.tile(a) or a.extent for a in plan.grid if names & {f"{a.name}.first", f"{a.name}.last"}}
    spans = of_spans(loop, rows, ()) if len(rows) == 1 else None
    return 1.0 if spans is None else float(spans.mean()) / loop.axis.extent


def _cycles(program: Program, v: Value, target: Target) -> float:
    """Cycles of PyTorch's kernel for one value: its operands read, itself written, computed meanwhile."""
    assert v.expr is not None
    nodes = {*walk(v.expr)}
    multiplied = {_body(n) for n in nodes if isinstance(n, Reduce) and _is_product(n)}
    work = sum(map(_work, nodes - multiplied)) / target.processors
    return max(work, moved(program, v) / MOVED) + LAUNCH


def moved(program: Program, v: Value) -> int:
    """Bytes that a kernel for one value reads and writes."""
    return nbytes(v) + sum(nbytes(program.by_name[r]) for r in v.reads)


def nbytes(v: Value) -> int:
    """The size of a value."""
    return v.numel * itemsize(v.dtype)


def _work(n: Expr) -> float:
    """Cycles of one processor for a node, at every index of its axes."""
    if isinstance(n, Reduce):
        count = volume(free_axes(n.body))
        if not _is_product(n):
            return count / ISSUED
        sides = max((itemsize(m.dtype) for m in loads(n.body)), default=4)
        return 2 * count / MULTIPLIED * (SLOWER_IN_32 if sides > 2 else 1)
    if isinstance(n, Op) and is_float(n.dtype):
        return volume(free_axes(n)) / (POWERS if n.name in COSTLY else ISSUED)
    return 0


def _is_product(r: Reduce) -> bool:
    """Whether a sum is of products of what has fewer axes each: one of matrices."""
    body = _body(r)
    return _multiplies(r) and all(free_axes(a) < free_axes(body) for a in children(body))


def _multiplies(r: Reduce) -> bool:
    body = _body(r)
    return r.kind == "sum" and isinstance(body, Op) and body.name == "mul"


def _body(r: Reduce) -> Expr:
    """What is summed, before it is cast."""
    body = r.body
    while isinstance(body, Op) and body.name == "cast":
        body = body.args[0]
    return body
