"""Scores that a program returns, for it ends before what would have been fused with them."""

from __future__ import annotations

from ..expr import loads, reductions
from ..program import Program, Value
from .blow_ups import is_larger
from .joins import join
from .resolve_views import root_of


def handed_on(program: Program) -> Value | None:
    """A product of two sides, for each of a batch or of heads, or of one tensor with itself, that results are made of
    while they are larger than all that is given; None if there is none. (A product of two matrices may be a layer.)"""
    given = max((v.numel for v in program.given), default=0)
    stack, seen = [*program.outputs], set[str]()
    while stack:
        name = stack.pop()
        v = program.by_name[name]
        if name in seen or v.numel <= given:
            continue
        seen.add(name)
        seed = join(program, v)
        if seed is not None and v.expr is not None and reductions(v.expr):
            batched = any(a.extent > 1 for a in {*v.axes} - seed.rows - seed.cols)
            # Of something with itself, as in contrastive losses.
            own = len({root_of(program, n.source) for n in loads(v.expr)}) == 1
            if (batched or own) and is_larger(program, seed) and not v.projection:
                return v
        else:
            stack += v.reads
    return None
