"""Factors: what all kernels that load a number multiply it by, the kernel that stores it has multiplied already.

Before: `r0_l0[x] = m[x] + log(l[x])` is stored, and a loop over x has `exp2(... - r0_l0[j] * 1.4427)`.
After: `r0_l0[x] = (m[x] + log(l[x])) * 1.4427`, once for each row, and not again in every tile of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..build import op
from ..dtype import is_float
from ..expr import Const, Expr, Load, Op, children, walk
from ..plan import KernelPlan, expressions
from .lay_out import rewritten


def store_multiplied(plans: Sequence[KernelPlan], tables: str) -> list[KernelPlan]:
    """Plans of a region with factors of what they hand on to each other in the kernels that store it.

    Args:
      tables: what the names of numbers of rows begin with, that `tabulate` has stored for these kernels alone.
    """
    made = list(plans)
    for plan in plans:
        # What is rounded as it is stored would be rounded elsewhere.
        own = [s for s in plan.stores if s.name.startswith(tables) and is_float(s.dtype) and s.dtype == plan.compute]
        for name in (s.name for s in own):
            factor = _factor(name, made)
            if factor is not None:
                made = [_multiplied(p, name, factor) for p in made]
    return made


def _factor(name: str, plans: Sequence[KernelPlan]) -> Const | None:
    """The number by which every load of `name` is multiplied, if there is one."""
    found: set[Expr | None] = set()
    for e in (e for p in plans for e in expressions(p)):
        readers = (n for n in walk(e) if any(isinstance(c, Load) and c.source == name for c in children(n)))
        found |= {n.args[1] if isinstance(n, Op) and _is_multiple(n, name) else None for n in readers}
        if isinstance(e, Load) and e.source == name:
            found.add(None)
    factor = found.pop() if len(found) == 1 else None
    return factor if isinstance(factor, Const) else None


def _is_multiple(n: Expr, name: str) -> bool:
    return (
        isinstance(n, Op)
        and n.name == "mul"
        and isinstance(n.args[0], Load)
        and n.args[0].source == name
        and isinstance(n.args[1], Const)
    )


def _multiplied(plan: KernelPlan, name: str, factor: Const) -> KernelPlan:
    made = rewritten(plan, lambda n: n.args[0] if isinstance(n, Op) and _is_multiple(n, name) else n)
    stores = (
        replace(s, expr=op("mul", s.expr, factor, dtype=s.expr.dtype)) if s.name == name else s for s in made.stores
    )
    return replace(made, stores=tuple(stores))
