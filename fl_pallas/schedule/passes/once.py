"""Once: kernels of a region that are the same but for their names, and what one stores twice, are made once.

Before: three kernels each have a copy of `bias` made in another order, and two a row sum of the same gradients.
After: one copy, and one kernel for the sum, which all of them load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..build import rewrite
from ..expr import Expr, Load, load
from ..plan import KernelPlan, Loop, Store, operand_names
from .lay_out import rewritten


def once(plans: Sequence[KernelPlan], results: Collection[str]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same without repeats.

    Args:
      results: names of what is stored for others than these kernels.
    """
    made: list[KernelPlan] = []
    known: dict[KernelPlan, KernelPlan] = {}
    names: dict[str, str] = {}
    for plan in plans:
        plan = _kept(_renamed(plan, names), names, results)
        same = known.setdefault(_unnamed(plan), plan)
        if same is plan or any(s.name in results for s in plan.stores):
            made.append(plan)
        else:
            names |= {s.name: t.name for s, t in zip(plan.stores, same.stores, strict=True)}
    return made


def _kept(plan: KernelPlan, names: dict[str, str], results: Collection[str]) -> KernelPlan:
    """A plan that stores nothing twice; `names` is told what stands for what is left out."""
    found: dict[Store, str] = {}
    for store in plan.stores:
        first = found.setdefault(replace(store, name=""), store.name)
        if first != store.name and store.name not in results:
            names[store.name] = first
    return replace(plan, stores=tuple(s for s in plan.stores if s.name not in names))


def _unnamed(plan: KernelPlan) -> KernelPlan:
    return replace(plan, name="", notes=(), stores=tuple(replace(s, name="") for s in plan.stores))


def _renamed(plan: KernelPlan, names: Mapping[str, str]) -> KernelPlan:
    """A plan that loads what `names` says in place of what it did."""
    if names.keys().isdisjoint(operand_names(plan)):
        return plan

    def rule(n: Expr) -> Expr:
        return load(names[n.source], n.index, n.dtype) if isinstance(n, Load) and n.source in names else n

    def bound(e: Expr | None) -> Expr | None:
        return None if e is None else rewrite(e, rule)

    def of_loop(loop: Loop) -> Loop:
        inner = loop.interior and replace(
            loop.interior, lower=bound(loop.interior.lower), upper=bound(loop.interior.upper)
        )
        return replace(loop, lower=bound(loop.lower), upper=bound(loop.upper), interior=inner)

    return rewritten(replace(plan, loops=tuple(map(of_loop, plan.loops))), rule)
