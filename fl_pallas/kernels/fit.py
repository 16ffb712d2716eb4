"""Which of a plan's choices fit a device: compiled, and their registers and shared memory looked at."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from ..errors import Unsupported
from ..schedule.plan import Choices, KernelPlan, above_along
from ..schedule.target import Target, target_of
from .cubin import SOUND, WARP, Cubin, check, compile_ttir, compiled, is_serial, newest_ptx, simplified
from .lower import Lowered
from .pipelined import copied, overtakes
from .processes import SIDE_BY_SIDE, call
from .reproducers import off_the_terminal

# Bytes of spilled registers that a thread may have; a few, outside of the loop, do no harm. Some more are not taken
# unseen: tuning tells whether wide tiles are worth them, where narrower ones leave Hopper's matrix instructions unused.
SPILL, TRIED_SPILL = 64, 256
# A multiprocessor's registers and warps; registers are handed out to a thread in such steps; shared memory that a
# program takes besides its own.
REGISTERS, WARPS, STEP, RESERVED = 65536, 64, 8, 1024
# The first compute capability whose matrix instructions are asynchronous.
ASYNCHRONOUS = 90
# The part of its registers that a thread may be left with for another program to run beside: where tuning tells
# whether it pays, and where it is taken unseen. With fewer than LEAST there are programs enough, and ptxas may refuse.
TRIED, ENOUGH, LEAST = 0.7, 0.9, 96
# Short loops, which end before a copy engine has caught up, may be faster by addresses; so many choices are tried so.
SHORT, BY_ADDRESSES = 256, 3


@dataclass(frozen=True)
class Fitted:
    """A kernel under one of its choices, compiled.

    Attributes:
      in_place: whether its products add to their accumulators in place (see `_forms`).
    """

    choices: Choices
    lowered: Lowered
    cubin: Cubin
    in_place: bool


# A plan, under its choices, as Triton IR.
Lower = Callable[[KernelPlan], Lowered]


def fitting(
    plan: KernelPlan,
    lower: Lower,
    capability: int,
    count: int = 1,
    met: Callable[[int, int], object] = lambda *arguments: None,
) -> tuple[Fitted, ...]:
    """Those of the first `count` choices of a plan that fit the device, and of further ones until half as many do; the
    one that spills least if none does.

    Args:
      plan: with its choices, best first.
      lower: in other processes, if it can be pickled.
      capability: compute capability of the device; 90 is sm_90.
      count: how many are wanted; as many are compiled at once. With several, the first may come in two forms and by
        addresses too, and each with as many registers as it asks for and with fewer, and about guesses, and those met
        on the way that spill somewhat more come last, for tuning to tell.
      met: is told early what a kernel may be launched with (`Lowered.arguments`).

    Raises: Unsupported if none compiles and fits shared memory.
    """
    pick, *others = [replace(c, guesses=count == 1) for c in (plan.choices, *plan.others)]
    # A loop about guesses comes with another about running maxima, once or never, in a third; and one looks at what
    # bounds rest on.
    loops = (3 if count == 1 and has_guesses(plan) else 1) + any(map(above_along, plan.loops))
    (first, *more), arguments = call(_forms, plan.with_choices(pick), lower, capability, count, loops)
    met(*arguments)
    waiting = [(pick, form) for form in (first, *more)] + [(c, first) for c in others]
    if count > 1 and arguments[1]:
        met(arguments[0], 0)
        is_short = all(loop.axis.extent <= SHORT for loop in plan.loops)
        plain = [replace(c, blocks=False) for c in (pick, *others[: BY_ADDRESSES - 1 if is_short else 0])]
        waiting[1:1] = [(c, first) for c in plain]
        more += [first] * len(plain)
    count += len(more)
    fit: list[Fitted] = []
    guessing: list[Fitted] = []
    tighter: list[Fitted] = []
    spilling: list[Fitted] = []
    refusal: Unsupported | None = None
    wanted = count
    while waiting and len(fit) < wanted:
        size, wanted = wanted - len(fit), max(1, count // 2)
        batch, waiting = waiting[:size], waiting[size:]
        # Other choices are the fastest about guesses than about running maxima.
        if count > 1 and has_guesses(plan):
            batch += [(replace(c, guesses=True), form) for c, form in batch if c.blocks]
        with off_the_terminal():
            tried = _tried(plan, batch, lower, capability, TRIED if count > 1 else ENOUGH)
        for made in tried:
            if isinstance(made, Unsupported):
                refusal = refusal or made
                continue
            first, *fewer = made
            if count > 1 and first.choices.guesses:
                guessing += [f for f in made if f.cubin.stack <= SPILL]
                continue
            (spilling if first.cubin.stack > SPILL else fit).append(first)
            tighter += [f for f in fewer if f.cubin.stack <= SPILL and f.choices.blocks]
    if fit:
        some = [f for f in spilling if f.cubin.stack <= TRIED_SPILL]
        return (*fit, *guessing, *tighter, *some) if count > 1 else tuple(fit)
    if not spilling:
        raise refusal or Unsupported(plan.name, "it has no choices")
    return (min(spilling, key=lambda f: f.cubin.stack),)


@functools.cache
def workers() -> ThreadPoolExecutor:
    """As many kernels are compiled at once as there are processors, in whichever region they are."""
    return ThreadPoolExecutor(SIDE_BY_SIDE)


@functools.cache
def _checkers() -> ThreadPoolExecutor:
    """What looks at machine code while the kernel is compiled for fewer registers."""
    return ThreadPoolExecutor(2)


# Threads do not live on in a forked process.
os.register_at_fork(after_in_child=workers.cache_clear)
os.register_at_fork(after_in_child=_checkers.cache_clear)


def _tried(
    plan: KernelPlan, batch: Iterable[tuple[Choices, bool]], lower: Lower, capability: int, enough: float
) -> list[tuple[Fitted, ...] | Unsupported]:
    """Choices and whether products add in place, compiled: in one way or two; or why not."""

    def one(candidate: tuple[Choices, bool]) -> tuple[Fitted, ...] | Unsupported:
        choices, in_place = candidate
        return call(_ways, plan.with_choices(choices), in_place, lower, capability, enough)

    batch = list(batch)
    return [one(c) for c in batch] if len(batch) < 2 else list(workers().map(one, batch))


def _ways(
    plan: KernelPlan, in_place: bool, lower: Lower, capability: int, enough: float
) -> tuple[Fitted, ...] | Unsupported:
    """A plan under one of its choices, compiled in one way or two; or why it is not."""
    try:
        return _sound(_fitted(plan, in_place, lower(plan), capability, enough))
    except Unsupported as refusal:
        return refusal


# One choice, compiled in one way or two, once their machine code has been looked at, which goes on meanwhile.
_Ways = tuple["Future[Fitted]", ...]


def _fitted(plan: KernelPlan, in_place: bool, lowered: Lowered, capability: int, enough: float) -> _Ways:
    """One choice, with as many registers as it asks for, and with fewer.

    Raises: Unsupported if it does not compile or takes too much shared memory.
    """
    name, choices = plan.name, plan.choices
    lowered, cubin = _ordered(simplified(lowered, capability) if in_place else lowered, capability)
    target = target_of(capability)
    if cubin.shared > target.shared_bytes:
        have = f"sm_{capability} has {target.shared_bytes}"
        raise Unsupported(name, f"{cubin.shared} bytes of shared memory, and {have}")
    fitted = Fitted(choices, lowered, cubin, in_place)
    checked = _checkers().submit(_checked, fitted, name)
    # Loops about guesses take the longest to compile: not again for a program more that may not pay.
    tighter = _tighter(fitted, target, ENOUGH if choices.guesses else enough)
    return (checked,) if tighter is None else (checked, _checkers().submit(_checked, tighter, name))


def _ordered(lowered: Lowered, capability: int) -> tuple[Lowered, Cubin]:
    """A kernel, compiled so that no copy overtakes a product that still reads what it would replace.

    Raises: Unsupported.
    """
    cubin = compiled(lowered, capability)
    if overtakes(cubin.asm["ttgir"]):
        lowered = replace(lowered, ttir=copied(lowered.ttir))
        cubin = compiled(lowered, capability)
    return lowered, cubin


def _checked(made: Fitted, name: str) -> Fitted:
    """A kernel whose machine code does what it should: by the newest ptxas, where Triton's own gets it wrong.

    Raises: Unsupported if there is no such code.
    """
    try:
        check(made.cubin, name)
        return made
    except Unsupported:
        if newest_ptx() < SOUND:
            raise
        lowered = replace(made.lowered, newest=True)
        return replace(made, lowered=lowered, cubin=compile_ttir(lowered, made.cubin.capability))


def _sound(ways: _Ways) -> tuple[Fitted, ...] | Unsupported:
    """The ways to compile a choice that are worth a trial, or why it has none."""
    first, *others = ways
    try:
        fitted = first.result()
    except Unsupported as refusal:
        return refusal
    tighter = next((other.result() for other in others if other.exception() is None), None)
    if tighter is None:
        return (fitted,)
    free = tighter.cubin.stack <= fitted.cubin.stack and tighter.lowered.registers >= ENOUGH * fitted.cubin.registers
    return (tighter,) if free else (fitted, tighter)


def has_guesses(plan: KernelPlan) -> bool:
    """Whether sums of a plan may be taken about guesses."""
    return any(loop.guesses for loop in plan.loops)


def _forms(
    plan: KernelPlan, lower: Lower, capability: int, count: int, loops: int
) -> tuple[tuple[bool, ...], tuple[int, int]]:
    """Whether to simplify a kernel, so that products add to their accumulators in place; or both, for tuning to tell.
    And what it is launched with.

    In place takes fewer registers, and a product has to wait until its accumulator has been corrected. Not where ptxas
    would have the products of several loops, more than `loops`, wait for each other then.
    """
    lowered = lower(plan)
    forms = (True, False) if count > 1 and "tt.dot" in lowered.ttir else (True,)
    if capability >= ASYNCHRONOUS and lowered.ttir.count("scf.for") > loops:
        with contextlib.suppress(Unsupported):
            if is_serial(_ordered(simplified(lowered, capability), capability)[1]):
                forms = (False,)
    return forms, lowered.arguments


def _tighter(fitted: Fitted, target: Target, enough: float) -> Fitted | None:
    """The kernel with fewer registers, so that one more program fits beside it; None if none does for want of shared
    memory, or of a part `enough` of its registers.
    """
    cubin, threads = fitted.cubin, fitted.lowered.warps * WARP
    steps = -(-cubin.registers // STEP) * STEP
    programs = 1 + REGISTERS // (threads * steps)
    registers = REGISTERS // (threads * programs) // STEP * STEP
    room = min(WARPS // fitted.lowered.warps, (target.shared_bytes + RESERVED) // (cubin.shared + RESERVED))
    if programs > room or registers < max(LEAST, enough * cubin.registers):
        return None
    lowered = replace(fitted.lowered, registers=registers)
    try:
        return replace(fitted, lowered=lowered, cubin=compiled(lowered, cubin.capability))
    except Unsupported:  # some matrix instructions want more
        return None
