"""A plan with other expressions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..build import rewrite
from ..expr import Expr
from ..plan import Accumulator, KernelPlan, Loop, Step


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

    stores = tuple(replace(s, expr=rewrite(s.expr, rule)) for s in plan.stores)
    return replace(plan, loops=tuple(map(of_loop, plan.loops)), stores=stores)
