"""Measures everything on one NVIDIA GPU and writes JSON, which report.py turns into docs/performance.md.

python benchmarks/bench.py --short                      # under two minutes
python benchmarks/bench.py --only flex/*/D64 decode     # groups or cells, by name
python benchmarks/bench.py --only flex --rivals ours    # into the same file as other runs
python benchmarks/bench.py --only flex --missing --budget 500     # go on where the last run ended
python benchmarks/bench.py --device cpu --out /tmp/tiny.json      # try the suite out; writes no report
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.cells import SHORT, TINY, Cell, Sizes, cells  # noqa: E402
from benchmarks.machine import machine  # noqa: E402
from benchmarks.measure import rates  # noqa: E402
from benchmarks.run import Bench  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "performance.json"


def selected(every: dict[str, Cell], only: Sequence[str], rivals: Sequence[str], short: bool) -> Iterator[
    tuple[Cell, tuple[str, ...]]
]:  # fmt: skip
    """The cells that were asked for, each with its rivals."""
    for cell in every.values():
        if only and not any(_matches(cell.name, pattern) for pattern in only):
            continue
        if short and cell.name not in SHORT:
            continue
        takes_part = SHORT[cell.name] if short else cell.rivals
        chosen = tuple(r for r in takes_part if not rivals or r in rivals)
        if chosen:
            yield cell, chosen


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern, part by part, begins the name."""
    parts, wanted = name.split("/"), pattern.rstrip("/").split("/")
    return len(wanted) <= len(parts) and all(map(fnmatch, parts, wanted))


def brief(entry: dict[str, Any]) -> str:
    """An entry in one line."""
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in entry.items() if k not in ("rows", "run")}
    return " ".join(f"{k}={v}" for k, v in shown.items() if v is not None)


def poisoned(device: torch.device) -> bool:
    """Whether the GPU answers no longer, as after an illegal memory access."""
    gc.collect()
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few cells, under two minutes")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups, cells, or patterns of them")
    parser.add_argument("--rivals", nargs="+", default=[], help="only these")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file; what it holds already is kept")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="start nothing after it")
    parser.add_argument("--missing", action="store_true", help="only what the file has no measurement of")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", default="", help="for a copy of the code without git")
    parser.add_argument("--list", action="store_true", help="print the cells and measure nothing")
    parser.add_argument("--no-report", action="store_true")
    given = parser.parse_args(arguments)

    device, tiny = torch.device(given.device), given.device == "cpu"
    if tiny and given.out == OUT:
        parser.error("--device cpu only tries the suite out: give it an --out of its own")
    chosen = list(selected(cells(TINY if tiny else Sizes()), given.only, given.rivals, given.short))
    if given.list:
        print(*(f"{cell.name}: {' '.join(rivals)}" for cell, rivals in chosen), sep="\n")
        return
    start = time.perf_counter()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    data = json.loads(given.out.read_text()) if given.out.exists() else {"runs": [], "cells": {}}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    run = len(data["runs"])
    data["runs"].append({**machine(device, given.commit), "rates": rates(device)})
    print(data["runs"][-1], flush=True)

    dead = False
    for cell, rivals in chosen:
        bench = Bench(cell, device, tiny)
        for rival in rivals:
            kept = data["cells"].get(cell.name, {}).get("rivals", {}).get(rival, {"failed": "not yet"})
            if given.missing and "failed" not in kept:
                continue
            if time.perf_counter() - start > given.budget or dead:
                break
            entry = bench.run(rival)
            print(f"{time.perf_counter() - start:6.1f} s  {cell.name}  {rival}: {brief(entry)}", flush=True)
            row = data["cells"].setdefault(cell.name, {"rivals": {}})
            row.update(bench.facts())
            row["rivals"][rival] = {**entry, "run": run}
            _write(given.out, data)
            dead = poisoned(device)
            if dead:
                print("the GPU answers no longer; run again with --missing", flush=True)
    _write(given.out, data)
    if not (given.no_report or tiny):
        report.main([str(given.out)])


def _write(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all: a run may be killed at any time."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1))
    part.replace(path)


if __name__ == "__main__":
    main()
