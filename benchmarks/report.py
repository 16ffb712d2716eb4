"""Writes docs/performance.md and its figures from what bench.py measured: python benchmarks/report.py [JSON]"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import plots  # noqa: E402
from benchmarks.bars import Bar, Cells, bars, entry, on_one_gpu  # noqa: E402
from benchmarks.cells import GROUPS  # noqa: E402
from benchmarks.ratios import PASSES, geometric_mean, over_ours  # noqa: E402
from benchmarks.rivals import RIVALS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "performance.json"
GAPS = ROOT / "benchmarks" / "results" / "gaps.json"
LAYERS = ROOT / "benchmarks" / "results" / "layers.json"
DOCS = ROOT / "docs"
# Written by hand: of bars that are missed, what limits them and what was tried; and what was found on the way.
MISSED = ROOT / "benchmarks" / "missed.toml"
NOTES = ROOT / "benchmarks" / "notes.md"
TITLES = {
    "flex": "FlexAttention's seven variants",
    "gqa": "Grouped heads: 32 of queries, 8 of keys",
    "evoformer": "Evoformer row attention with mask, pair bias and gate",
    "differential": "Differential attention",
    "ipa": "Invariant point attention",
    "triangle": "Triangle attention",
    "pairs": "Pairs outside of attention",
    "vision": "Attention of images",
    "float32": "Attention in float32",
    "decode": "Decoding: one query",
    "host": "Host time of a call, µs",
    "compile": "First call, s",
    "lengths": "Many lengths in one process",
    "memory": "262144 tokens",
    "training": "Training: the backward pass",
    "training_host": "Host time of a forward and a backward pass, µs",
    "training_compile": "First forward and backward pass, s",
}
LABELS = {
    "ours": "fl_pallas",
    "flex": "FlexAttention",
    "flex_and_mask": "with its mask made",
    "flex_and_compiled_mask": "with it made, compiled",
    "sdpa": "SDPA",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "compile": "torch.compile",
    "compile_max": "torch.compile max-autotune",
    "eager": "eager",
}
# Whose times by the clock are shown, where masks are made.
CLOCKED = ("ours", "flex", "flex_and_mask", "flex_and_compiled_mask")
METHOD = """\
Made by `python benchmarks/report.py` from what `python benchmarks/bench.py` measured. Times are medians of 5 to 50
calls by CUDA events, with the L2 cache flushed before each and the host ahead of the GPU; block masks and biases of
the rivals are made outside of them, unless a column says otherwise. Times by the clock are from an idle machine to an
idle one, host and GPU. All get the same tensors. Errors are relative Frobenius norms against float64, on up to eight
(batch, head) pieces of a cell. The roofline is the longer of the useful operations at the measured rate of an 8192³
bf16 matrix product and of the least traffic at that of a copy."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of performance.md and figures/")
    given = parser.parse_args(arguments)
    data = json.loads(given.json.read_text())
    given.docs.mkdir(parents=True, exist_ok=True)
    figures = plots.draw(data, given.docs / "figures")
    (given.docs / "performance.md").write_text(text(data, figures))
    for bar in bars(data):
        print(f"{bar.verdict:12s} {bar.against}: {bar.what}: {number(bar.figure)} of {number(bar.limit)} {bar.where}")


def text(data: dict[str, Any], figures: Sequence[str] = ()) -> str:
    """The whole page."""
    used = sorted({e["run"] for cell in data["cells"].values() for e in cell["rivals"].values()})
    runs = [data["runs"][n] for n in used]
    parts = ["# Performance", METHOD]
    parts += ["\n".join(_machines(runs)), *(f"![{name}](figures/{name}.svg)" for name in figures)]
    found = bars(data)
    parts += ["## Bars", "\n".join(_bars(found))]
    if any(b.is_missed for b in found):
        parts += ["## Bars that are missed", "\n".join(_missed(found))]
    if NOTES.exists():
        parts.append(NOTES.read_text().strip())
    alike = on_one_gpu(data)
    for group in GROUPS:
        cells = {name: cell for name, cell in alike.items() if name.split("/")[0] == group}
        if cells:
            parts += [f"## {TITLES[group]}", *_group(group, cells, data["runs"])]
    if LAYERS.exists():
        parts += ["## Layers of other people's packages", *_layers(json.loads(LAYERS.read_text()))]
    if GAPS.exists():
        parts += ["## Masks with gaps", *_gaps(json.loads(GAPS.read_text()))]
    problems = list(_problems(data["cells"]))
    if problems:
        parts += ["## What did not run", "\n".join(table(("cell", "who", "why"), problems))]
    return "\n\n".join(parts) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    head = list(head)
    clean = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *clean)]


def number(x: float) -> str:
    """Four digits at most; nothing for NaN."""
    if math.isnan(x):
        return ""
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _machines(runs: list[dict[str, Any]]) -> list[str]:
    keys = ("date", "gpu", "driver", "torch", "jax", "triton", "cudnn", "commit")
    rows = [
        [
            *(str(r.get(k, "")) for k in keys),
            number(r["rates"]["matmul"] / 1e12),
            number(r["rates"]["copy"] / 1e12),
        ]
        for r in runs
    ]
    return table((*keys, "matrix product, TFLOP/s", "copy, TB/s"), rows)


def _limit(b: Bar) -> str:
    return f"{'≤' if b.most else '>' if b.strict else '≥'} {number(b.limit)}"


def _missed(found: list[Bar]) -> list[str]:
    """What was missed, by how much, what limits it and what was tried."""
    known = tomllib.loads(MISSED.read_text()) if MISSED.exists() else {}
    rows = []
    for b in found:
        if b.is_missed:
            why = known.get(b.against, {}).get(b.what, {})
            words = why.get("limits", "not looked into"), why.get("tried", "")
            rows.append((f"{b.against}: {b.what}", _limit(b), f"{number(b.figure)} ({b.where})", *words))
    return table(("against", "bar", "measured", "what limits it", "what was tried"), rows)


def _bars(found: list[Bar]) -> list[str]:
    rows = []
    for b in found:
        margin = number(b.margin) + "×" if not math.isnan(b.figure) else ""
        where = b.where + (f"; {b.missing} cells without a figure" if b.missing else "")
        rows.append((b.against, b.what, _limit(b), number(b.figure), where, b.verdict, margin))
    head = ("against", "what", "bar", "measured", "where (the worst cell)", "", "bar reached")
    return table(head, rows)


def _group(group: str, cells: Cells, runs: list[dict[str, Any]]) -> Iterator[str]:
    present = [r for r in RIVALS if any(r in cell["rivals"] for cell in cells.values())]
    if group in ("host", "training_host"):
        rows = [[n, *(number(entry(cells, n, r, "us")) for r in present)] for n in cells]
        yield "\n".join(table(("cell", *(LABELS[r] for r in present)), rows))
    elif group in ("compile", "training_compile"):
        head = ("cell", *(f"{LABELS[r]}, {state}" for r in present for state in ("cold", "warm")))
        rows = [[n, *(number(entry(cells, n, r, k)) for r in present for k in ("cold_s", "warm_s"))] for n in cells]
        yield "\n".join(table(head, rows))
    elif group == "lengths":
        yield "\n".join(table(("cell", "lengths", "kernels built", "s for all", "time over static"), _lengths(cells)))
    else:
        yield from _times(cells, present, runs)


def _lengths(cells: Cells) -> Iterator[list[str]]:
    for name, cell in cells.items():
        found = cell["rivals"].get("ours", {})
        ratios = "; ".join(f"{r['length']}: {r['ms'] / r['static_ms']:.2f}" for r in found.get("rows", []))
        counts = (number(entry(cells, name, "ours", key)) for key in ("lengths", "kernels", "total_s"))
        yield [name, *counts, ratios]


def _times(cells: Cells, present: list[str], runs: list[dict[str, Any]]) -> Iterator[str]:
    others = [r for r in present if r != "ours"]
    rows, details, parts = [], [], []
    for name, cell in cells.items():
        ours = entry(cells, name, "ours")
        sizes = " ".join(f"{k.upper()}{v}" for k, v in cell["shape"].items())
        rate = number(cell.get("flops", math.nan) / ours / 1e9), number(cell.get("bytes", math.nan) / ours / 1e9)
        theirs = [_against(entry(cells, name, r), ours) for r in others]
        rows.append([name, sizes, number(ours), *rate, share(cell, runs), *theirs])
        facts = [
            f"{entry(cells, name, r, 'error'):.1e}, {number(entry(cells, name, r, 'peak_bytes') / 2**20)}"
            if not math.isnan(entry(cells, name, r, "error"))
            else ""
            for r in present
        ]
        details.append([name, *facts])
        parts.append([name, *(_passes(cells, name, r) for r in present)])
    head = ("cell", "sizes", "fl_pallas, ms", "TFLOP/s", "TB/s", "of the roofline")
    if others:
        yield "Others in ms, and in brackets their time over ours."
    yield "\n".join(table((*head, *(LABELS[r] for r in others)), rows))
    if any(any(part[1:]) for part in parts):
        yield "Forward, and forward and backward together, ms."
        yield "\n".join(table(("cell", *(LABELS[r] for r in present)), parts))
    clocked = [r for r in CLOCKED if r in present]
    walls = [[n, *_clocked(cells, n, clocked)] for n in cells if not math.isnan(_clock(cells, n, "flex_and_mask"))]
    if walls:
        yield "Masks made anew by each call, by the clock: ms."
        yield "\n".join(table(("cell", *(LABELS[r] for r in clocked)), walls))
    lines = "\n".join(table(("cell", *(LABELS[r] for r in present)), details))
    summary = "Error against float64; MiB at the peak beside inputs and outputs"
    yield f"<details><summary>{summary}</summary>\n\n{lines}\n\n</details>"


def _passes(cells: Cells, name: str, rival: str) -> str:
    forward, both = (entry(cells, name, rival, key) for key in ("forward_ms", "both_ms"))
    return "" if math.isnan(both) else f"{number(forward)}, {number(both)}"


def _clock(cells: Cells, name: str, rival: str) -> float:
    return entry(cells, name, rival, "wall_ms")


def _clocked(cells: Cells, name: str, rivals: list[str]) -> Iterator[str]:
    ours = _clock(cells, name, "ours")
    for r in rivals:
        yield number(ours) if r == "ours" else _against(_clock(cells, name, r), ours)


def _layers(data: dict[str, Any]) -> Iterator[str]:
    """What layers.py measured: each pass of each layer, the slowest beside torch.compile first."""
    measured = [r for r in data["rows"] if all("ours" in r.get(which, {}) for which in PASSES)]
    keys = ("gpu", "torch", "jax", "triton", "commit")
    yield (
        f"By `python benchmarks/layers.py`: two sequences of {data['seq']} tokens, 16 heads of 64 features, bfloat16, "
        "with projections, norms and the gradients of weights; kernels' time by the profiler, in brackets others' time "
        "over ours, and behind errors (of the result, and of the gradient that is furthest off for its bound) eager's. "
        f"{', '.join(f'{k} {data[k]}' for k in keys)}."
    )
    for which in PASSES:
        found = over_ours(measured, which).values()
        mean = number(geometric_mean(found))
        yield f"torch.compile over ours, {which}, geometric mean of {len(found)} layers: {mean}."
    rows = []
    for r in sorted(measured, key=lambda r: r["both"].get("torch.compile", math.inf) / r["both"]["ours"]):
        cells = [r["variant"]]
        for which in PASSES:
            ours = r[which]["ours"]
            cells += [number(ours), *(_against(r[which].get(f, math.nan), ours) for f in ("torch.compile", "eager"))]
        cells += [
            f"{r[which]['error']:.1e} ({r[which]['error of eager']:.1e})" if "error" in r[which] else ""
            for which in PASSES
        ]
        rows.append(cells)
    head = [f"{which}, {who}" for which in PASSES for who in ("ms", "torch.compile", "eager")]
    yield "\n".join(table(("layer", *head, *(f"error, {which}" for which in PASSES)), rows))
    failed = [(r["variant"], str(r.get("failed", ""))) for r in data["rows"] if "failed" in r]
    failed += [
        (f"{r['variant']}, {which}", f"{key}: {text}")
        for r in data["rows"]
        for which in PASSES
        for key, text in r.get(which, {}).items()
        if key.endswith(" failed")
    ]
    if failed:
        yield "\n".join(table(("layer", "what did not run"), failed))


def _gaps(data: dict[str, Any]) -> Iterator[str]:
    """What gaps.py measured."""
    on = ", ".join(f"{k} {data['machine'][k]}" for k in ("gpu", "torch", "jax", "triton", "commit"))
    yield (
        "By `python benchmarks/gaps.py`: 16 heads of 64 features, bfloat16; kernels' time in ms by the profiler, in "
        "brackets FlexAttention's over ours, its mask made beforehand. Errors are of outputs and gradients together, "
        f"against float64. {on}."
    )
    rows = []
    for r in data["rows"]:
        pairs = ((r[f"flex_{which}_ms"], r[f"ours_{which}_ms"]) for which in ("forward", "both"))
        cells = [cell for theirs, ours in pairs for cell in (number(ours), _against(theirs, ours))]
        errors = (f"{r[f'{who}_error']:.1e}" for who in ("ours", "flex", "eager"))
        rows.append([r["mask"], str(r["seq"]), f"{r['visited']:.0%}", *cells, number(r["flex_mask_ms"]), *errors])
    head = (
        "mask",
        "tokens",
        "visited by FlexAttention",
        "forward",
        "FlexAttention",
        "both",
        "FlexAttention",
        "its mask",
    )
    yield "\n".join(table((*head, "error", "FlexAttention's", "eager's"), rows))


def _against(theirs: float, ours: float) -> str:
    return "" if math.isnan(theirs) else f"{number(theirs)} ({theirs / ours:.2f}×)".replace("(nan×)", "")


def share(cell: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """The time that the measured matrix rate and bandwidth allow, over ours."""
    ours = cell["rivals"].get("ours", {})
    if "ms" not in ours or "flops" not in cell:
        return ""
    rates = runs[ours["run"]]["rates"]
    least = max(cell["flops"] / rates["matmul"], cell["bytes"] / rates["copy"])
    return f"{100 * least / (ours['ms'] * 1e-3):.0f} %"


def _problems(cells: Cells) -> Iterator[tuple[str, str, str]]:
    for name, cell in cells.items():
        for rival, found in cell["rivals"].items():
            for key in ("failed", "skipped", "unfused", "died"):
                if key in found:
                    yield name, LABELS[rival], f"{key}: {found[key]}"


if __name__ == "__main__":
    main()
