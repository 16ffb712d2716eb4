"""Structural fusion: the members of a region are inlined into what it returns.

Inlining is substitution of index expressions, so an axis that is parallel in a producer and reduced
over by its consumer becomes the consumer's loop axis by itself (the paper's dimension demotion).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ..build import substitute
from ..expr import Axis, Expr, index, loads, reductions
from ..program import Program, Value
from .grow_regions import Region
from .resolve_views import inline_load

# Ways of naming the axes of a further output that are tried.
MAX_RENAMINGS = 512
# Elements along the axes that only some outputs of a kernel have.
MAX_FEATURES = 256


@dataclass(frozen=True)
class Output:
    """A tensor a kernel stores: `expr` gives its elements over `axes`."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    expr: Expr


@dataclass(frozen=True)
class Fused:
    """What one kernel computes: outputs over shared axes, reading only operands."""

    outputs: tuple[Output, ...]


def fuse(program: Program, region: Region) -> tuple[Fused, ...]:
    """A region's values → its outputs as expressions of operands, grouped by the reductions they share."""
    inlined: dict[str, Value] = {}
    for name in (*region.members, *region.outputs):
        v = program.by_name[name]
        assert v.expr is not None
        found = {n: inline_load(n, inlined[n.source]) for n in loads(v.expr) if n.source in inlined}
        inlined[name] = Value(v.name, v.axes, v.dtype, substitute(v.expr, {}, dict(found)))
    outputs = sorted((inlined[o] for o in region.outputs), key=lambda v: -len(v.axes))
    groups: list[list[Output]] = []
    for v in outputs:
        for n, group in enumerate(groups):
            joined = _join_group(v, group)
            if joined is not None:
                groups[n] = [*group, joined]
                break
        else:
            names = (Axis(f"x{i}", a.extent) for i, a in enumerate(v.axes))
            groups.append([_renamed(v, tuple(names))])
    return tuple(Fused(tuple(g)) for g in groups)


def _renamed(v: Value, axes: tuple[Axis, ...]) -> Output:
    assert v.expr is not None
    expr = substitute(v.expr, {a: index(b) for a, b in zip(v.axes, axes, strict=True)})
    return Output(v.name, axes, v.dtype, expr)


def _join_group(v: Value, group: list[Output]) -> Output | None:
    """`v` over the axes of `group`, renamed so that it shares most reductions; None if it shares none."""
    lead = group[0]
    shared = {r for o in group for r in reductions(o.expr)}
    best: tuple[tuple[int, int], Output] | None = None
    choices = [[a for a in lead.axes if a.extent == own.extent] + [None] for own in v.axes]
    for pick in itertools.islice(itertools.product(*choices), MAX_RENAMINGS):
        used = [a for a in pick if a is not None]
        if len(set(used)) != len(used):
            continue
        axes = tuple(a or Axis(f"x{len(lead.axes) + i}_{len(group)}", v.axes[i].extent) for i, a in enumerate(pick))
        candidate = _renamed(v, axes)
        extra = math.prod(own.extent for a, own in zip(pick, v.axes, strict=True) if a is None)
        # What is shared must have no axis of its own: it would be computed once for each.
        score = sum(r in shared for r in reductions(candidate.expr))
        if score and extra <= MAX_FEATURES and (best is None or (score, -extra) > best[0]):
            best = (score, -extra), candidate
    return best[1] if best else None
