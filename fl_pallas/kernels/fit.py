"""Which of a plan's choices fit a device: compiled, and their registers and shared memory looked at."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
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
      in_place: whether its products add to their accumulators in place.
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
      met: is told what a kernel is launched with (`Lowered.arguments`) once one has been compiled.

    Raises: Unsupported if none compiles and fits shared memory.
    """
    pick, *others = [replace(c, guesses=count == 1) for c in (plan.choices, *plan.others)]
    waiting = [_Candidate(pick)]
    if count > 1:
        is_short = all(loop.axis.extent <= SHORT for loop in plan.loops)
        plain = [replace(c, blocks=False) for c in (pick, *others[: BY_ADDRESSES - 1 if is_short else 0]) if c.blocks]
        waiting += [_Candidate(c, is_another=True) for c in plain]
        waiting.append(_Candidate(pick, in_place=False, is_another=True))
    count += len(waiting) - 1
    waiting += map(_Candidate, others)
    fit: list[Fitted] = []
    guessing: list[Fitted] = []
    tighter: list[Fitted] = []
    spilling: list[Fitted] = []
    refusal: Unsupported | None = None
    wanted = count
    while waiting and len(fit) < wanted:
        batch, waiting = waiting[: wanted - len(fit)], waiting[wanted - len(fit) :]
        # Other choices are the fastest about guesses than about running maxima.
        if count > 1 and has_guesses(plan):
            batch += [replace(c, choices=replace(c.choices, guesses=True)) for c in batch if c.choices.blocks]
        with off_the_terminal():
            tried = _tried(plan, batch, lower, capability, TRIED if count > 1 else ENOUGH, met)
        for candidate, made in zip(batch, tried, strict=True):
            if isinstance(made, Unsupported):
                refusal = refusal or made
                continue
            if made is None:
                count -= not candidate.choices.guesses
                continue
            first, *fewer = made
            if count > 1 and first.choices.guesses:
                guessing += [f for f in made if f.cubin.stack <= SPILL]
                continue
            (spilling if first.cubin.stack > SPILL else fit).append(first)
            tighter += [f for f in fewer if f.cubin.stack <= SPILL and f.choices.blocks]
        wanted = max(1, count // 2)
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


@dataclass(frozen=True)
class _Candidate:
    """A way to compile a kernel.

    Attributes:
      in_place: whether its products add to their accumulators in place, where ptxas lets them.
      is_another: there is one that differs in that alone, or has tiles brought by the copy engine.
    """

    choices: Choices
    in_place: bool = True
    is_another: bool = False


def _tried(
    plan: KernelPlan,
    batch: Sequence[_Candidate],
    lower: Lower,
    capability: int,
    enough: float,
    met: Callable[[int, int], object],
) -> list[tuple[Fitted, ...] | Unsupported | None]:
    """Candidates, compiled; or why not, or None for what is the same as another."""

    def one(candidate: _Candidate) -> tuple[Fitted, ...] | Unsupported | None:
        made = call(_ways, plan, candidate, lower, capability, enough)
        if isinstance(made, tuple):
            met(*made[0].lowered.arguments)
        return made

    return [one(c) for c in batch] if len(batch) < 2 else list(workers().map(one, batch))


def _ways(
    plan: KernelPlan, candidate: _Candidate, lower: Lower, capability: int, enough: float
) -> tuple[Fitted, ...] | Unsupported | None:
    """A candidate, compiled in one way or two; or why it is not, or None for what is the same as another."""
    choices, in_place = candidate.choices, candidate.in_place
    try:
        lowered = lower(plan.with_choices(choices))
        if candidate.is_another and not (
            "tt.dot" in lowered.ttir
            if choices.blocks
            else lower(plan.with_choices(replace(choices, blocks=True))).blocks
        ):
            return None
        # A loop about guesses comes with another about running maxima, once or never, in a third; and one looks at what
        # bounds rest on.
        loops = (3 if choices.guesses and has_guesses(plan) else 1) + any(map(above_along, plan.loops))
        in_place = in_place and not _waits_in_place(lowered, capability, loops)
        return _sound(_fitted(plan.name, choices, in_place, lowered, capability, enough))
    except Unsupported as refusal:
        return refusal


def _waits_in_place(lowered: Lowered, capability: int, loops: int) -> bool:
    """Whether ptxas would have products that add to their accumulators in place, of more loops than `loops`, wait for
    each other. In place takes fewer registers, and a product has to wait until its accumulator has been corrected.
    """
    if capability < ASYNCHRONOUS or lowered.ttir.count("scf.for") <= loops:
        return False
    try:
        return is_serial(_ordered(simplified(lowered, capability), capability)[1])
    except Unsupported:
        return False


# One choice, compiled in one way or two, once their machine code has been looked at, which goes on meanwhile.
_Ways = tuple["Future[Fitted]", ...]


def _fitted(name: str, choices: Choices, in_place: bool, lowered: Lowered, capability: int, enough: float) -> _Ways:
    """One choice, with as many registers as it asks for, and with fewer.

    Raises: Unsupported if it does not compile or takes too much shared memory.
    """
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
