"""Times, memory and errors of one call, on a GPU or, to try the suite out, on a CPU."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.oracle import reference

from .problem import Problem, nbytes

Call = Callable[[], Any]

# Written before each timed call: twenty times the L2 cache.
FLUSH_BYTES = 2**30
# How much longer than a call's host time the GPU is kept busy before its first kernel, and writes for that, at most.
MARGIN, MAX_FLUSHES = 1.5, 16
# How much longer than their median the slowest of equal writes takes on a GPU that does nothing else, at most.
STEADY = 1.5
MATMUL = 8192
COPY_BYTES = 2**30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_ms(call: Call, device: torch.device, seconds: float = 0.2) -> float:
    """Median time of a call on the GPU, with an empty L2 cache, and no waiting for the host; on a CPU its wall time.
    5 to 50 calls.
    """
    if device.type != "cuda":
        return wall_ms(call, device, 3)
    call()
    flushes = _flushes(call, device)
    first = _gpu_ms(call, device, 3, flushes)
    count = int(min(50, max(5, seconds * 1e3 / statistics.median(first))))
    return statistics.median(_gpu_ms(call, device, count, flushes))


def busy_ms(call: Call, device: torch.device, count: int = 10) -> float:
    """Time of a call's kernels and copies on the GPU, and of nothing between them: what a host that others use does not
    change. Of each the median of `count` calls, for the GPU may go to others for a while; the mean, where calls differ
    in what they launch. On a CPU wall time.
    """
    if device.type != "cuda":
        return wall_ms(call, device, 3)
    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            call()
        torch.cuda.synchronize(device)
    events = sorted(profiler.events(), key=lambda e: e.time_range.start)
    times = [e.self_device_time_total for e in events if e.self_device_time_total]
    each, rest = divmod(len(times), count)
    if rest:
        return sum(times) / count / 1e3
    return sum(statistics.median(times[k::each]) for k in range(each)) / 1e3


def settle(device: torch.device, seconds: float = 0.5) -> None:
    """Waits, for so long at most, until a GPU does nothing else: until the same work takes the same time again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        times = _gpu_ms(_flush(device).zero_, device, 8, 0)
        if max(times) < STEADY * statistics.median(times):
            return


def _flushes(call: Call, device: torch.device) -> int:
    """How often to write before a call so that the host has launched all of it before the GPU begins."""
    flush = _flush(device)
    (written,) = _gpu_ms(flush.zero_, device, 1, 1)
    synchronize(device)
    start = time.perf_counter()
    call()
    host = 1e3 * (time.perf_counter() - start)
    return min(MAX_FLUSHES, 1 + int(MARGIN * host / written))


def _gpu_ms(call: Call, device: torch.device, count: int, flushes: int) -> list[float]:
    flush = _flush(device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize(device)
    for start, stop in events:
        for _ in range(flushes):
            flush.zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) for start, stop in events]


@functools.cache
def _flush(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def wall_ms(call: Call, device: torch.device, count: int = 15) -> float:
    """Median time of a call from an idle machine to an idle machine, host and GPU, with an empty L2 cache."""
    times = []
    for _ in range(count):
        if device.type == "cuda":
            _flush(device).zero_()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def host_us(call: Call, device: torch.device, count: int = 2000) -> float:
    """Median CPU time of a call in microseconds; the queue is emptied now and then so that it never fills up."""
    times = []
    for n in range(count):
        if n % 20 == 0:
            synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    synchronize(device)
    return 1e6 * statistics.median(times)


def first_call_s(call: Call, device: torch.device) -> float:
    """Seconds of a call, compilation and all."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Bytes of GPU memory at the peak of a call, less what was there before and what it returns."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = outputs(call())
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - nbytes(*out)


def outputs(out: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


class Reference:
    """The problem in float64, a few (batch, head) pieces of it, one at a time so that long sequences fit."""

    def __init__(self, problem: Problem):
        self.pieces: list[tuple[Any, list[Tensor]]] = []
        for cut, out_cut in problem.pieces():
            exact = reference(problem.plain, [t[c] for t, c in zip(problem.inputs, cut, strict=True)])
            self.pieces.append((out_cut, [t.float() for t in outputs(exact)]))

    def error(self, out: Any) -> float:
        """||out - exact|| / ||exact|| over the pieces, of the output that is furthest off; NaN counts as such."""
        return max(self._error(n, t) for n, t in enumerate(outputs(out)))

    def _error(self, n: int, out: Tensor) -> float:
        square, norm = 0.0, 0.0
        for cut, exact in self.pieces:
            square += (out[cut[n]].double() - exact[n].double()).square().sum().item()
            norm += exact[n].double().square().sum().item()
        return (square / norm) ** 0.5


def rates(device: torch.device) -> dict[str, float]:
    """What this machine reaches: FLOP/s of a bf16 matrix product, bytes/s read and written by a copy."""
    tiny = device.type != "cuda"
    side, size = (128, 2**16) if tiny else (MATMUL, COPY_BYTES)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return {
        "matmul": 2 * side**3 / kernel_ms(lambda: a @ b, device) * 1e3,
        "copy": 2 * size / kernel_ms(lambda: target.copy_(source), device) * 1e3,
    }
