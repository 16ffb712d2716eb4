"""Which of a plan's choices fit a device: compiled, and their registers and shared memory looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import Unsupported
from ..schedule.plan import Choices, KernelPlan
from ..schedule.target import target_of
from .cubin import Cubin, compile_ttir, simplified
from .lower import Lowered

# Bytes of spilled registers that a thread may have; a few, outside of the loop, do no harm.
SPILL = 64


@dataclass(frozen=True)
class Fitted:
    """A kernel under one of its choices, compiled."""

    choices: Choices
    lowered: Lowered
    cubin: Cubin


def fitting(
    plan: KernelPlan, lower: Callable[[KernelPlan], Lowered], capability: int, count: int = 1
) -> tuple[Fitted, ...]:
    """The first `count` choices of a plan that fit the device; the one that spills least if none does.

    Args:
      plan: with its choices, best first.
      lower: a plan to Triton IR.
      capability: compute capability of the device; 90 is sm_90.
      count: how many are wanted; as many are compiled at once.

    Raises: Unsupported if none compiles and fits shared memory.
    """
    waiting = [plan.choices, *plan.others]
    fit: list[Fitted] = []
    spilling: list[Fitted] = []
    refusal: Unsupported | None = None
    while waiting and len(fit) < count:
        batch, waiting = waiting[: count - len(fit)], waiting[count - len(fit) :]
        for made in _tried(plan, batch, lower, capability):
            if isinstance(made, Unsupported):
                refusal = refusal or made
            elif made.cubin.stack > SPILL:
                spilling.append(made)
            else:
                fit.append(made)
    if fit:
        return tuple(fit)
    if not spilling:
        raise refusal or Unsupported(plan.name, "it has no choices")
    return (min(spilling, key=lambda f: f.cubin.stack),)


def _tried(
    plan: KernelPlan, batch: Iterable[Choices], lower: Callable[[KernelPlan], Lowered], capability: int
) -> list[Fitted | Unsupported]:
    def one(choices: Choices) -> Fitted | Unsupported:
        try:
            lowered = simplified(lower(plan.with_choices(choices)), capability)
            cubin = compile_ttir(lowered, capability)
        except Unsupported as refusal:
            return refusal
        limit = target_of(capability).shared_bytes
        if cubin.shared > limit:
            return Unsupported(plan.name, f"{cubin.shared} bytes of shared memory, and sm_{capability} has {limit}")
        return Fitted(choices, lowered, cubin)

    batch = list(batch)
    if len(batch) == 1:
        return [one(batch[0])]
    with ThreadPoolExecutor(len(batch)) as pool:
        return list(pool.map(one, batch))
