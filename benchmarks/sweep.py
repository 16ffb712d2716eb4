"""Many programs of one kind, each against torch.compile and eager PyTorch: what corpus.py and layers.py share.

Programs are compiled by many processes at once. One at a time is timed, tunes a kernel, or is judged; what the first
calls of others do on the GPU meanwhile takes a moment, and the least of several times counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing as mp
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

import fl_pallas as fl
from benchmarks.machine import machine
from benchmarks.measure import busy_ms
from benchmarks.ratios import PASSES, geometric_mean, over_ours
from fl_pallas.bridge import launch
from fl_pallas.bridge.tuning import fastest
from tests.oracle import errors, gradient_errors, leaves

# Seconds that a program may take, all its compilations and runs.
PATIENCE = 300
# How often a program's kernels are timed.
TIMES = 3

# Name, length, device → what is compiled, and its inputs.
Make = Callable[[str, int, torch.device], tuple[Callable[..., Any], tuple[Tensor, ...]]]

_lock: Any
_has_lock = False


def _begin(lock: Any) -> None:
    """What each process does first."""
    global _lock
    _lock = lock
    torch.set_num_threads(1)
    # There are processes enough.
    torch._inductor.config.compile_threads = 1
    warnings.simplefilter("ignore")
    launch.fastest = _fastest_alone


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Within, no other process times anything. What is timed may tune a kernel, on a thread of autograd's."""
    global _has_lock
    if _has_lock:
        yield
        return
    with _lock:
        _has_lock = True
        try:
            yield
        finally:
            _has_lock = False


def _fastest_alone(launches: Sequence[Any]) -> int:
    with _alone():
        return fastest(launches)


def _late(_: int, frame: FrameType | None) -> None:
    place = traceback.extract_stack(frame)[-1]
    raise TimeoutError(f"more than {PATIENCE} s, at {place.filename}:{place.lineno}")


def measured(job: tuple[Make, str, int, str, Sequence[str]]) -> dict[str, Any]:
    """A program's milliseconds, in each pass and by each of ours, torch.compile and eager, and the error of ours beside
    eager's; or why there are none.

    Args:
      job: what makes the program, its name, length, device, passes.
    """
    make, name, seq, place, passes = job
    device = torch.device(place)
    row: dict[str, Any] = {"variant": name}
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(PATIENCE)
    try:
        target, inputs = make(name, seq, device)
        row["shapes"] = [list(t.shape) for t in inputs]
        for which in passes:
            row[which] = _by_each(target, inputs, device, which == "both")
    except Exception as error:  # every program is reported, whatever happens to it
        row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return row


def _by_each(
    target: Callable[..., Any], inputs: tuple[Tensor, ...], device: torch.device, training: bool
) -> dict[str, Any]:
    if isinstance(target, nn.Module):
        target.requires_grad_(training)
    found: dict[str, Any] = {}
    forms = {"ours": lambda: fl.compile(target, dynamic=False), "torch.compile": lambda: torch.compile(target)}
    for form, made in (*forms.items(), ("eager", lambda: target)):
        torch.compiler.reset()
        try:
            compiled = made()
            call = _step(compiled, target, inputs) if training else _call(compiled, inputs)
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[f"{form}, first call in s"] = time.perf_counter() - start
            with _alone():
                found[form] = min(busy_ms(call, device) for _ in range(TIMES))
                if form == "ours":
                    found |= _judged(target, compiled, inputs, training)
        except TimeoutError:
            raise
        except Exception as error:
            found[f"{form} failed"] = f"{type(error).__name__}: {str(error)[:150]}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _judged(
    target: Callable[..., Any], compiled: Callable[..., Any], inputs: tuple[Tensor, ...], training: bool
) -> dict[str, Any]:
    """The error, of outputs or of gradients, that is largest for its bound."""
    if training:
        verdicts = gradient_errors(target, compiled, inputs)
    else:
        verdicts = errors(target, inputs, _call(compiled, inputs)())
    worst = max(verdicts, key=lambda e: e.compiled / e.bound)
    found = {"error": worst.compiled, "error of eager": worst.eager, "error is of": worst.name}
    return {**found, "outside of the bar": not worst.ok}


def _call(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    @torch.no_grad()
    def call() -> Any:
        return fn(*inputs)

    return call


def _step(fn: Callable[..., Any], target: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """Forward and backward, for gradients of all that is a float."""
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    asked = [t for t in given if t.requires_grad]
    asked += target.parameters() if isinstance(target, nn.Module) else []
    with torch.no_grad():
        tangents = {name: torch.randn_like(t) for name, t in leaves(target(*inputs)).items() if t.is_floating_point()}

    def call() -> Any:
        outs = {name: t for name, t in leaves(fn(*given)).items() if t.requires_grad}
        return torch.autograd.grad([*outs.values()], asked, [tangents[name] for name in outs], allow_unused=True)

    return call


def summary(rows: list[dict[str, Any]]) -> str:
    """What is slowest against torch.compile, and the geometric mean, of each pass; what is wrong, and what failed."""
    lines = []
    for which in PASSES:
        times = {r["variant"]: r.get(which, {}) for r in rows}
        ratios = sorted((ratio, name) for name, ratio in over_ours(rows, which).items())
        mean = geometric_mean([ratio for ratio, _ in ratios] or [1.0])
        lines.append(f"{which}: {len(ratios)} cases, torch.compile / ours {mean:.2f} (geometric mean)")
        lines += [
            f"  {ratio:5.2f} {name:28s} {times[name]['ours']:8.4f} ms for {times[name]['torch.compile']:8.4f}"
            for ratio, name in ratios
            if ratio < 1
        ]
        for r in rows:
            if (of := r.get(which, {})).get("outside of the bar"):
                errors_of = f"error {of['error']:.1e}, eager's {of['error of eager']:.1e}"
                lines.append(f"  {r['variant']}: {of['error is of']}: {errors_of}")
        lines += [f"  {r['variant']}: {r[which]['ours failed']}" for r in rows if "ours failed" in r.get(which, {})]
    return "\n".join(lines + [f"{r['variant']}: {r['failed']}" for r in rows if "failed" in r])


def main(make: Make, names: Sequence[str], out: Path, description: str | None) -> None:
    """The command: measures what it is asked to, of `names`, and writes JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="all by default")
    parser.add_argument("--seq", type=int, default=2048, help="length of keys")
    parser.add_argument("--passes", nargs="*", choices=PASSES, default=PASSES)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; what is measured by then is written")
    parser.add_argument("--commit", default="", help="for a copy of the code without git")
    parser.add_argument("--out", type=Path, default=out)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = given.names or names
    context = mp.get_context("spawn")
    made = {**machine(torch.device(device), given.commit), "seq": given.seq}
    given.out.parent.mkdir(exist_ok=True, parents=True)
    end, rows = time.monotonic() + given.budget, []
    pool = context.Pool(given.processes, _begin, (context.Lock(),))
    coming = pool.imap_unordered(measured, [(make, name, given.seq, device, given.passes) for name in names])
    with contextlib.suppress(mp.TimeoutError):
        while len(rows) < len(names):
            left = None if given.budget == math.inf else max(0.1, end - time.monotonic())
            rows.append(coming.next(timeout=left))
            given.out.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")
    print(summary(rows), flush=True)
    # Within a compilation they hear of no other end, and a pool that is told to end would wait for them.
    for worker in mp.active_children():
        worker.kill()
    os._exit(0)
