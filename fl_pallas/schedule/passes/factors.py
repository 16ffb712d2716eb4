"""Factors: what all kernels that load a number multiply it by, the kernel that stores it has multiplied already.

Before: `r0_l0[x] = m[x] + log(l[x])` is stored, and a loop over x has `exp2(... - r0_l0[j] * 1.4427)`.
After: `r0_l0[x] = (m[x] + log(l[x])) * 1.4427`, once for each row, and not again in every tile of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..build import op
from ..dtype import is_float
from ..expr import Const, Expr, Load, Op, children, load, walk
from ..plan import KernelPlan, expressions
from .rewritten import rewritten


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
            while (factor := _factor(name, made)) is not None:
                made = [_multiplied(p, name, factor) for p in made]
    return made


def _factor(name: str, plans: Sequence[KernelPlan]) -> Const | None:
    """The number by which every load of `name` is multiplied, if there is one."""
    found: set[Const | None] = set()
    for e in (e for p in plans for e in expressions(p)):
        readers = (n for n in walk(e) if any(isinstance(c, Load) and c.source == name for c in children(n)))
        found |= {_multiplier(n, name) for n in readers}
        if isinstance(e, Load) and e.source == name:
            found.add(None)
    return found.pop() if len(found) == 1 else None


def _multiplier(n: Expr, name: str) -> Const | None:
    """The number by which `n` multiplies a load of `name`, if it does nothing else."""
    if not isinstance(n, Op) or n.name != "mul":
        return None
    loaded, factor = n.args
    return factor if isinstance(loaded, Load) and loaded.source == name and isinstance(factor, Const) else None


def _multiplied(plan: KernelPlan, name: str, factor: Const) -> KernelPlan:
    # Until all are done, loads without their factor are of another name: of `x * 5 * 2`, x * 5 goes, and not x * 2.
    done = f"{name} * {factor.value}"
    made = rewritten(plan, lambda n: n if _multiplier(n, name) is None else _named(children(n)[0], done))
    made = rewritten(made, lambda n: _named(n, name) if isinstance(n, Load) and n.source == done else n)
    stores = (
        replace(s, expr=op("mul", s.expr, factor, dtype=s.expr.dtype)) if s.name == name else s for s in made.stores
    )
    return replace(made, stores=tuple(stores))


def _named(n: Expr, name: str) -> Expr:
    assert isinstance(n, Load)
    return load(name, n.index, n.dtype)
