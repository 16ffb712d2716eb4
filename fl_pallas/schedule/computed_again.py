"""What the kernels of a forward pass keep to themselves, and PyTorch would compute again for the backward pass."""

from __future__ import annotations

from .dtype import is_float
from .expr import Const, Expr, Load, Op, loads
from .pipeline import Schedule
from .program import Program, Value


def computed_again(forward: Schedule, backward: Schedule) -> list[Value]:
    """The values that stay inside of the kernels of the forward pass, and that PyTorch would compute for the backward
    pass; and floats that PyTorch computes in the forward pass, where kernels were expected to, and that the backward
    pass computes as they would.

    In 16 bits PyTorch rounds it, and the kernels do not: it would not fit the row statistics that are kept.
    """
    inside = frozenset[str]().union(*(region.large for region in forward.regions))
    by_kernels = {m for region in forward.regions for m in region.members}
    by_pytorch = {v.name for v in forward.program.values if is_float(v.dtype) and v.name not in by_kernels}
    fused = {m for region in backward.regions for m in region.members}
    moved = _moved(backward.program)
    made = (v for v in backward.program.values if v.expr is not None and not v.is_view and v.name not in moved)
    return [v for v in made if (v.name in inside and v.name not in fused) or v.name in by_pytorch]


def _moved(program: Program) -> frozenset[str]:
    """What is given, and what puts its elements in other places with constants between, to twice as many at most
    (weights that are returned, padded): PyTorch has them as they were rounded."""
    given = {v.name: v.numel for v in program.given}
    for v in program.values:
        sources = _sources_of_move(v.expr)
        if sources and all(s in given for s in sources) and v.numel <= 2 * max(given[s] for s in sources):
            given[v.name] = max(given[s] for s in sources)
    return frozenset(given)


def _sources_of_move(e: Expr | None) -> frozenset[str]:
    """What is loaded where elements are moved alone; nothing where more is done."""
    match e:
        case Load(source=source):
            return frozenset({source})
        case Op(name="select", args=(where, a, b)) if not loads(where):
            moves = [_sources_of_move(x) for x in (a, b) if not isinstance(x, Const)]
            return frozenset().union(*moves) if all(moves) else frozenset()
    return frozenset()
