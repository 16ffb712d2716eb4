"""Measures one rival on one cell; the answer is an entry of the JSON file."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fl_pallas as fl

from . import training
from .cells import Cell
from .measure import Reference, first_call_s, host_us, kernel_ms, outputs, peak_bytes, wall_ms
from .problem import Problem
from .rivals import RIVALS, UNFUSED, Call, Skipped, ours

Entry = dict[str, Any]

FIRST_CALL = Path(__file__).parent / "first_call.py"
# Reads the compilers' own files: whoever comes first waits for the disk, half a gigabyte of it, and no rival is to.
WARMING = """
import pathlib, jaxlib, triton, torch._inductor.compile_fx
for package in (jaxlib, triton):
    for path in pathlib.Path(package.__file__).parent.rglob("*"):
        if path.is_file():
            path.read_bytes()
"""
# Rows of the output that the reference of a very long sequence covers.
CHECKED_ROWS = 4096
# Seconds after which no further lengths are tried.
PATIENCE = 60


class Bench:
    """A cell's problem and reference, drawn once and shared by its rivals."""

    def __init__(self, cell: Cell, device: torch.device, tiny: bool):
        self.cell, self.device, self.tiny = cell, device, tiny
        self._problem: Problem | None = None
        self._reference: Reference | None = None

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            self._problem = self.cell.make(self.device)
        return self._problem

    @property
    def reference(self) -> Reference:
        if self._reference is None:
            self._reference = Reference(self.problem)
        return self._reference

    def facts(self) -> Entry:
        """What the tables and the roofline need to know of the cell, as far as its problem was drawn."""
        known: Entry = {"kind": self.cell.kind, "shape": self.cell.shape}
        if self._problem is not None:
            factor = training.BACKWARD_FLOPS if self.cell.kind == "training" else 1
            known |= {"flops": factor * self._problem.flops, "bytes": self._problem.bytes}
        return known

    def run(self, rival: str) -> Entry:
        """Measure; whatever goes wrong is the entry then."""
        torch._dynamo.reset()  # or the limit of recompilations is reached, and what follows runs unfused, silently
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return KINDS[self.cell.kind](self, rival)
        except Skipped as reason:
            return {"skipped": str(reason)}
        except Exception as e:  # every rival is reported, whatever happens to it
            return {"failed": f"{type(e).__name__}: {str(e)[:300]}"}


def kernel(bench: Bench, rival: str) -> Entry:
    """Time on the GPU and by the clock, error, peak memory; seconds of the first call, caches as they were."""
    p, device = bench.problem, bench.device
    size = 2 * p.scores
    if rival in UNFUSED and size > bench.cell.score_bytes:
        return {"skipped": f"scores of {size / 2**30:.1f} GiB are more than {bench.cell.score_bytes / 2**30:.0f}"}
    call, entry = _started(p, rival, device)
    entry["error"] = bench.reference.error(call())
    entry["peak_bytes"] = peak_bytes(call, device)
    entry["ms"] = kernel_ms(call, device)
    entry["wall_ms"] = wall_ms(call, device)
    return entry


def _started(p: Problem, rival: str, device: torch.device) -> tuple[Call, Entry]:
    """A rival that was called once. Where we leave something to PyTorch, the entry says what."""
    if rival != "ours":
        call = RIVALS[rival](p)
        return call, {"first_call_s": first_call_s(call, device)}
    try:
        call = ours(p, fallback="error")
        return call, {"first_call_s": first_call_s(call, device)}
    except fl.Unsupported as refusal:
        call = ours(p)
        return call, {"first_call_s": first_call_s(call, device), "unfused": str(refusal)}


def host(bench: Bench, rival: str) -> Entry:
    """CPU time of a call on inputs so small that the GPU waits."""
    call = RIVALS[rival](bench.problem)
    call()
    return {"us": host_us(call, bench.device, 20 if bench.tiny else 2000)}


def compiling(bench: Bench, rival: str) -> Entry:
    """The first call, or step of training, of a new process: with nothing cached, then with what that one left."""
    with tempfile.TemporaryDirectory() as folder:
        keep = {"FL_CACHE": f"{folder}/fl", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        environment = {**os.environ, **keep}
        if rival != "ours":  # ours keeps Triton's files in its own cache
            environment["TRITON_CACHE_DIR"] = f"{folder}/triton"
        command = [sys.executable, str(FIRST_CALL), bench.cell.name, rival]
        command += ["--device", bench.device.type]
        entry: Entry = {}
        if not bench.tiny:
            subprocess.run([sys.executable, "-c", WARMING], env=environment, capture_output=True, timeout=300)
        for name in ("cold_s", "warm_s"):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            if not done.stdout:
                return {"failed": done.stderr[-300:]}
            entry[name] = float(done.stdout.splitlines()[-1])
            if done.returncode:  # it had its figure, and died on its way out
                entry["died"] = done.stderr[-300:]
        return entry


def lengths(bench: Bench, rival: str) -> Entry:
    """Many lengths in one process: the kernels that were built, and their time beside kernels of fixed length."""
    longest, device = bench.problem, bench.device
    shape = bench.cell.shape
    few = random.Random(0).sample(range(shape["least"], shape["most"]), shape["count"])
    call = fl.compile(longest.plain)
    kept = fl.config.cache
    with tempfile.TemporaryDirectory() as folder:
        fl.config.cache = folder
        try:
            total, met = 0.0, []
            for n in few:
                if total > PATIENCE:
                    break
                total += first_call_s(lambda n=n: call(*_cut(longest, n).inputs), device)
                met.append(n)
            built = fl.cache.info().entries
        finally:
            fl.config.cache = kept
    checked = sorted(met)[:: max(1, len(met) // 8)]
    problems = [_cut(longest, n) for n in checked]
    errors = [Reference(p).error(call(*p.inputs)) for p in problems]
    varying = [kernel_ms(lambda p=p: call(*p.inputs), device, 0.05) for p in problems]
    rows = []
    for n, p, error, ms in zip(checked, problems, errors, varying, strict=True):
        torch._dynamo.reset()
        static = kernel_ms(RIVALS[rival](p), device, 0.05)
        rows.append({"length": n, "ms": ms, "static_ms": static, "error": error})
    return {"kernels": built or None, "lengths": len(met), "total_s": total, "rows": rows}


def memory(bench: Bench, rival: str) -> Entry:
    """A sequence so long that only linear memory does; the error is that of its first rows."""
    p, device = bench.problem, bench.device
    call, entry = _started(p, rival, device)
    out = outputs(call())[0]
    entry["peak_bytes"] = peak_bytes(call, device)
    entry["ms"] = kernel_ms(call, device)
    rows = min(CHECKED_ROWS, bench.cell.shape["s"])
    if "documents" in bench.cell.name:
        rows = int((p.inputs[3][0] == 0).sum())  # the first document sees itself alone
    entry["error"] = Reference(_cut(p, rows)).error(out[:, :, :rows])
    return entry


def _cut(p: Problem, length: int) -> Problem:
    """The problem's first `length` positions, as tensors of their own."""

    def cut(t: torch.Tensor, axes: str) -> torch.Tensor:
        return t.narrow(axes.index("s"), 0, length).contiguous() if "s" in axes else t

    return replace(p, inputs=tuple(cut(t, a) for t, a in zip(p.inputs, p.axes, strict=True)))


@torch.enable_grad()
def trained(bench: Bench, rival: str) -> Entry:
    """The backward pass, the forward pass that keeps what it needs, and both; peak memory of both; gradients' error."""
    p, device = bench.problem, bench.device
    if rival in UNFUSED and 2 * p.scores > bench.cell.score_bytes:
        return {"skipped": f"scores of {2 * p.scores / 2**30:.1f} GiB"}
    made = training.step(p, lambda p: RIVALS[rival](p)())
    call, entry = _started(made.problem, rival, device)
    entry |= _backward(made, call(), device)
    entry["forward_ms"] = kernel_ms(call, device)
    entry["both_ms"] = kernel_ms(lambda: made.gradients(call(), False), device)
    entry["peak_bytes"] = peak_bytes(lambda: made.gradients(call(), False), device)
    return entry


def _backward(made: training.Step, out: Any, device: torch.device) -> Entry:
    return {
        "error": made.errors(made.gradients(out, True)),
        "ms": kernel_ms(lambda: made.gradients(out, True), device),
    }


@torch.enable_grad()
def trained_host(bench: Bench, rival: str) -> Entry:
    """CPU time of a forward and a backward pass on inputs so small that the GPU waits."""
    made = training.step(bench.problem, lambda p: RIVALS[rival](p)())
    call = RIVALS[rival](made.problem)
    made.gradients(call(), False)
    return {"us": host_us(lambda: made.gradients(call(), False), bench.device, 10 if bench.tiny else 1000)}


KINDS: dict[str, Callable[[Bench, str], Entry]] = {
    "kernel": kernel,
    "training": trained,
    "training_host": trained_host,
    "host": host,
    "compile": compiling,
    "training_compile": compiling,
    "lengths": lengths,
    "memory": memory,
}
