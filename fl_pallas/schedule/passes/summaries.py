"""Summaries that several kernels look at (the same padding, for queries and for keys) are found by one kernel.

Before: `r0_k0_tiles` and `r0_k2_tiles` each store whether all of a granule's keys are seen. After: the first of them
does, and both kernels read it there. A launch takes longer than what these compute. So it is with lists of what loops
visit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ..expr import ref
from ..plan import Accumulator, KernelPlan, operand_names
from .rewritten import renamed

# What a granule is summarised by.
SUMMARIES = ("min", "max", "any", "all")


def join_summaries(plans: Sequence[KernelPlan]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, those that summarise the same granules as one, where the first
    of them was."""
    made: list[KernelPlan] = []
    names: dict[str, str] = {}
    joined: dict[str, str] = {}
    for plan in (renamed(plan, names, joined) for plan in plans):
        reads = {*operand_names(plan)}
        same = next((other for other in made if plan.minor and _nameless(other) == _nameless(plan)), None)
        at = next((n for n, other in enumerate(made) if _are_alike(other, plan)), None)
        if same is not None:
            joined[plan.name] = same.name
            names |= {b.name: a.name for a, b in zip(same.stores, plan.stores, strict=True)}
        # What is summarised may itself be made in between.
        elif at is None or any(s.name in reads for other in made[at:] for s in other.stores):
            made.append(plan)
        else:
            joined[plan.name] = made[at].name
            made[at], known = _both(made[at], plan)
            names |= known
    return made


def _nameless(plan: KernelPlan) -> KernelPlan:
    """A plan without the names by which others know it."""
    return replace(plan, name="", stores=tuple(replace(s, name="") for s in plan.stores))


def _are_alike(a: KernelPlan, b: KernelPlan) -> bool:
    """Whether two kernels summarise the same granules: all that their one loop finds, and nothing else, is stored."""
    if not all(p.minor and len(p.loops) == 1 and len(p.loops[0].steps) == len(p.stores) for p in (a, b)):
        return False
    if not all(s.kind in SUMMARIES for p in (a, b) for s in p.loops[0].steps if isinstance(s, Accumulator)):
        return False
    bare = [replace(p, name="", loops=tuple(replace(loop, steps=()) for loop in p.loops), stores=()) for p in (a, b)]
    return bare[0] == bare[1]


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
