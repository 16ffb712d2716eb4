"""Whether a row sees anything is found once for all heads, where kernels would look for each sum anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..build import negate, substitute
from ..expr import Axis, Expr, Index, Op, Reduce, free_axes, index, load, reductions, walk
from .fuse import Fused, Output

# Columns that are asked as often as there is something to ask them for.
FEW = 16


def asked(groups: tuple[Fused, ...], name: str) -> tuple[Fused, ...]:
    """`sum[d](select(any[j](seen[b, i, j]), g[b, h, i, d], 0) * ...)` → a kernel that stores `any[j](seen[b, i, j])`
    for each b and i, and loads of that.

    What one kernel asks as it goes over the columns in any case stays, where the scores are masked by that alone: it
    would look at columns that others of its masks let it skip.

    Args:
      name: begins the names of what is stored.
    """
    most = max((math.prod(o.shape) for g in groups for o in g.outputs), default=0)
    every = dict.fromkeys(e for g in groups for o in g.outputs for e in walk(o.expr) if _asks(e))
    found = [e for e in every if math.prod(a.extent for a in free_axes(e)) <= most]  # of rows, and not of pairs
    first: dict[Expr, Output] = {}
    held: dict[Expr, Expr] = {}
    for e in found:
        if any(_stands_in(e, g) for g in groups):
            order = [*dict.fromkeys(n.axis for n in walk(e) if isinstance(n, Index) and n.axis in free_axes(e))]
            own = tuple(Axis(f"x{n}", a.extent) for n, a in enumerate(order))
            expr = substitute(e, {a: index(b) for a, b in zip(order, own, strict=True)})
            output = first.setdefault(expr, Output(f"{name}_q{len(first)}", own, "bool", expr))
            held[e] = load(output.name, tuple(map(index, order)), "bool")
    rest = (Fused(tuple(replace(o, expr=substitute(o.expr, {}, held)) for o in g.outputs)) for g in groups)
    return (*(Fused((o,)) for o in first.values()), *rest) if held else groups


def _asks(e: Expr) -> bool:
    """Whether `e` asks something of all columns, of masks alone, and for each row."""
    if not isinstance(e, Reduce) or e.kind not in ("any", "all"):
        return False
    return e.axis.extent > FEW and bool(free_axes(e)) and not reductions(e.body)


def _stands_in(e: Expr, kernel: Fused) -> bool:
    """Whether a kernel would ask `e` for something that it sums up, or look at more columns for it than otherwise."""
    assert isinstance(e, Reduce)
    for o in kernel.outputs:
        around = [r for r in reductions(o.expr) if r.kind not in ("any", "all")]
        inside = {n for r in around for n in walk(r.body)}
        if e in inside:
            return True
        if e in walk(o.expr) and any(t not in (e.body, negate(e.body)) for t in _tests(around, e)):
            return True
    return False


def _tests(found: list[Reduce], asking: Reduce) -> Iterator[Expr]:
    """Conditions on columns under which reductions take something, by the names that `asking` has for its axis."""
    for r in found:
        if r.axis.extent == asking.axis.extent:
            for n in walk(r.body):
                if isinstance(n, Op) and n.name == "select" and r.axis in free_axes(n.args[0]):
                    yield substitute(n.args[0], {r.axis: index(asking.axis)})
