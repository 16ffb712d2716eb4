"""Summaries that several kernels look at (the same padding, for queries and for keys) are found by one kernel.

Before: `r0_k0_tiles` and `r0_k2_tiles` each store whether all of a granule's keys are seen. After: the first of them
does, and both kernels read it there. A launch takes longer than what these compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ..expr import ref
from ..plan import Accumulator, KernelPlan, operand_names
from .rewritten import renamed


def join_summaries(plans: Sequence[KernelPlan]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, those that summarise the same granules as one, where the first
    of them was."""
    made: list[KernelPlan] = []
    names: dict[str, str] = {}
    joined: dict[str, str] = {}
    for plan in plans:
        reads = {*operand_names(plan)}
        at = next((n for n, other in enumerate(made) if _are_alike(other, plan)), None)
        # What is summarised may itself be made in between.
        if at is None or any(s.name in reads for other in made[at:] for s in other.stores):
            made.append(renamed(plan, names, joined))
        else:
            joined[plan.name] = made[at].name
            made[at], known = _both(made[at], plan)
            names |= known
    return made


def _are_alike(a: KernelPlan, b: KernelPlan) -> bool:
    """Whether two kernels summarise the same granules."""
    bare = [replace(p, name="", loops=tuple(replace(loop, steps=()) for loop in p.loops), stores=()) for p in (a, b)]
    return a.minor and b.minor and bare[0] == bare[1]


def _both(a: KernelPlan, b: KernelPlan) -> tuple[KernelPlan, dict[str, str]]:
    """`a` with what `b` summarises; and the names of those of b's stores that `a` had under another."""
    (loop,), (other,) = a.loops, b.loops
    steps, stores, names = [*loop.steps], [*a.stores], dict[str, str]()
    for step, store in zip(other.steps, b.stores, strict=True):
        assert isinstance(step, Accumulator)
        same = next((n for n, s in enumerate(steps) if replace(s, name=step.name) == step), None)
        if same is None:
            # Either may have left some of its numbers out.
            taken = {s.name for s in steps}
            name = next(f"s{n}" for n in itertools.count() if f"s{n}" not in taken)
            steps.append(replace(step, name=name))
            stores.append(replace(store, expr=ref(name, step.axes, store.dtype)))
        else:
            names[store.name] = stores[same].name
    return replace(a, loops=(replace(loop, steps=tuple(steps)),), stores=tuple(stores)), names
