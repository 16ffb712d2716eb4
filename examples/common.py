"""What the examples share: the device, one measured run, and its row in a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the corpus and the oracle live in tests/

import fl_pallas as fl  # noqa: E402
from tests.oracle import Error, errors  # noqa: E402
from tests.programs import Case  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
console = Console()


@dataclass(frozen=True)
class Run:
    """One variant, compiled and compared with PyTorch in float64."""

    name: str
    explanation: fl.Explanation
    worst: Error
    seconds: float

    @property
    def kernels(self) -> str:
        return str(self.explanation.kernel_count)

    @property
    def verdict(self) -> str:
        return "[green]ok[/]" if self.worst.ok else "[red]WRONG[/]"


def where() -> str:
    """What the kernels run on."""
    if DEVICE.type == "cuda":
        return torch.cuda.get_device_name()
    return "CPU, kernels in Pallas interpret mode (times mean nothing here)"


def run(name: str, fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Run:
    """Compile fn, run it on inputs, and judge it."""
    start = time.perf_counter()
    out = fl.compile(fn)(*inputs)
    seconds = time.perf_counter() - start
    worst = max(errors(fn, inputs, out), key=lambda e: e.compiled / e.bound)
    return Run(name, fl.explain(fn, *inputs), worst, seconds)


def run_case(case: Case, seq: int = 128, dtype: torch.dtype = torch.float32) -> Run:
    """The same for a program of the corpus."""
    return run(case.name, case.target(dtype, DEVICE), case.make_inputs(seq, dtype, DEVICE))


def table(runs: Sequence[Run], title: str) -> Table:
    """variant, kernels, what stayed in PyTorch, error against float64, eager's error, time of the first call."""
    view = Table(title=title)
    view.add_column("variant")
    for column in ("kernels", "in PyTorch", "error", "PyTorch's error", "first call, s"):
        view.add_column(column, justify="right")
    view.add_column("")
    for r in runs:
        left = ", ".join(sorted({f.what for f in r.explanation.fallbacks})) or "-"
        errs = f"{r.worst.compiled:.1e}", f"{r.worst.eager:.1e}"
        view.add_row(r.name, r.kernels, left, *errs, f"{r.seconds:.1f}", r.verdict)
    return view


def finish(runs: Sequence[Run], title: str) -> None:
    """Print the table; exit with 1 if a variant is wrong."""
    console.print(table(runs, title))
    wrong = [r.name for r in runs if not r.worst.ok]
    if wrong:
        sys.exit(f"outside 1.5x PyTorch's own error: {', '.join(wrong)}")
