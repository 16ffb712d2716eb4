"""A plan with other expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..build import rewrite
from ..expr import Expr, Load, load
from ..plan import Accumulator, KernelPlan, Loop, Step, Store, Visits, operand_names


def rewritten(plan: KernelPlan, rule: Callable[[Expr], Expr]) -> KernelPlan:
    """A plan with `rule` applied to the nodes of what its loops and stores compute."""

    def of_step(s: Step) -> Step:
        if isinstance(s, Accumulator):
            return replace(s, update=rewrite(s.update, rule))
        return replace(s, value=rewrite(s.value, rule))

    def of_loop(loop: Loop) -> Loop:
        inner = loop.interior and replace(loop.interior, constants=tuple(map(of_pair, loop.interior.constants)))
        return replace(loop, steps=tuple(map(of_step, loop.steps)), interior=inner)

    def of_pair(pair: tuple[Expr, Expr]) -> tuple[Expr, Expr]:
        return rewrite(pair[0], rule), rewrite(pair[1], rule)

    def of_store(s: Store) -> Store:
        return replace(s, expr=rewrite(s.expr, rule), dims=tuple((rewrite(i, rule), n) for i, n in s.dims))

    stores = tuple(map(of_store, plan.stores))
    return replace(plan, loops=tuple(map(of_loop, plan.loops)), stores=stores)


def renamed(plan: KernelPlan, names: Mapping[str, str], kernels: Mapping[str, str]) -> KernelPlan:
    """A plan that loads tensors under other names, those that bound its loops too, and tells of kernels by others."""
    notes = plan.notes
    for old, new in kernels.items():
        notes = tuple(note.replace(old, new) for note in notes)
    if names.keys().isdisjoint(operand_names(plan)):
        return replace(plan, notes=notes)

    def rule(n: Expr) -> Expr:
        return load(names[n.source], n.index, n.dtype) if isinstance(n, Load) and n.source in names else n

    def of_bound(e: Expr | None) -> Expr | None:
        return None if e is None else rewrite(e, rule)

    def of_loop(loop: Loop) -> Loop:
        inner = loop.interior and replace(
            loop.interior, lower=of_bound(loop.interior.lower), upper=of_bound(loop.interior.upper)
        )
        above = tuple((rewrite(e, rule), least) for e, least in loop.above)
        ends = {"lower": of_bound(loop.lower), "upper": of_bound(loop.upper)}
        return replace(loop, **ends, interior=inner, above=above, visits=loop.visits and of_visits(loop.visits))

    def of_visits(v: Visits) -> Visits:
        at, whole, some, every = (rewrite(e, rule) for e in (v.at, v.whole, v.some, v.every))
        return replace(v, at=at, whole=whole, some=some, every=every)

    made = rewritten(plan, rule)
    return replace(made, loops=tuple(map(of_loop, made.loops)), notes=notes)
