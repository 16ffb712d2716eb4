"""Which of several kernels is the fastest: on a GPU at its full clock, and on one that has been busy for a while.

A busy GPU lowers its clock to stay within its power limit, more so under kernels that move more bytes for the same
arithmetic. On an H200, rows of 64 and of 256 that take the same time at first are 9 % apart after 80 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Launch = Callable[[], None]

# What is not this much faster takes the same time, but for noise.
CLEARLY = 0.98
# How many are timed under load too, and how far behind the fastest they may be at full clock.
FINALISTS, NEAR = 4, 1.15
# Milliseconds until the clock has settled, and for how long a kernel is then launched to take its time. Shorter ones
# than LEAST do not bring a GPU to its limit.
SETTLED, TIMED, LEAST = 80.0, 40.0, 0.1
# How often each is timed, in turn: the least counts, for what else runs on the GPU and on the host makes times longer
# only, and for a while. Beside six processes, medians of each by itself found choices that took twice as long.
ROUNDS = 5


def fastest(launches: Sequence[Launch]) -> int:
    """Index of the launch that takes least time on the current device; 0 unless another is clearly faster.

    The clock under load decides, for attention runs in the midst of other work, which heats the GPU as well; among
    those that are level there, full clock.
    """
    alone = dict(enumerate(milliseconds(launches)))
    first, *others = sorted(alone, key=alone.__getitem__)
    near = [n for n in others[: FINALISTS - 1] if alone[n] <= NEAR * alone[first]]
    level = {*alone}
    if near and alone[first] >= LEAST:
        loaded = {n: _under_load(launches[n], alone[n]) for n in sorted((first, *near))}
        level = {n for n in loaded if CLEARLY * loaded[n] <= min(loaded.values())}
    best = min(level, key=alone.__getitem__)
    return 0 if 0 in level and CLEARLY * alone[0] <= alone[best] else best


def level(launches: Sequence[Launch], within: float) -> list[int]:
    """Indices of the launches that take at most `within` times the least time on the current device, at full clock."""
    alone = milliseconds(launches)
    return [n for n, ms in enumerate(alone) if ms <= within * min(alone)]


def milliseconds(launches: Sequence[Launch]) -> list[float]:
    """The least time of each launch on the current device and stream, of ROUNDS."""
    for launch in launches:
        launch()
    # Short kernels are launched several times between two events, or the launches would be timed.
    repeats = [max(1, min(20, int(0.5 / max(_mean(launch, 1), 1e-3)))) for launch in launches]
    rounds = [[*map(_mean, launches, repeats)] for _ in range(ROUNDS)]
    return [*map(min, zip(*rounds, strict=True))]


def _under_load(launch: Launch, alone: float) -> float:
    """Time of a launch, milliseconds, after as many others as let the clock settle; `alone` is its time without."""
    for _ in range(math.ceil(SETTLED / alone)):
        launch()
    return min(_mean(launch, math.ceil(TIMED / ROUNDS / alone)) for _ in range(ROUNDS))


def _mean(launch: Launch, times: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        launch()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / times
