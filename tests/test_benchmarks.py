"""The benchmark suite, as far as no GPU is needed: the rivals compute the same thing, and the report is right."""

from __future__ import annotations

import json
import math
import multiprocessing
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import bars, bench, cells, corpus, report, sweep, variants
from benchmarks.measure import Reference
from benchmarks.problem import Problem
from benchmarks.run import Bench

CPU, EXACT = torch.device("cpu"), torch.float32
# Long enough that window and prefix leave something out.
LONG = cells.Sizes(**{**vars(cells.TINY), "seqs": (300,), "tokens": 600, "decode_seqs": (1100,)})
KERNELS = [c for c in cells.cells(LONG).values() if c.kind == "kernel"]


def flexed(p: Problem) -> torch.Tensor:
    assert p.flex is not None
    batches, queries, keys = p.mask_shape
    mask = create_block_mask(p.mask_mod, batches, None, queries, keys, "cpu") if p.mask_mod else None
    return p.flex(flex_attention, mask, *p.inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", KERNELS, ids=lambda c: c.name)
def test_rivals_compute_the_same(cell: cells.Cell) -> None:
    p = cell.make(CPU)
    with torch.no_grad():
        exact = Reference(p)
        assert exact.error(p.plain(*p.inputs)) < 1e-5
        if "flex" in cell.rivals:
            assert exact.error(flexed(p)) < 1e-5
        if p.sdpa is not None:
            assert exact.error(p.sdpa()(*p.inputs)) < 1e-5


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_pairs_are_counted(name: str) -> None:
    p = variants.attention(name, 2, 1, 300, 4, CPU, EXACT)
    mod = p.mask_mod or (lambda b, h, i, j: (i >= 0) & (j >= 0))
    i = torch.arange(300)
    kept = mod(torch.arange(2)[:, None, None], 0, i[:, None], i[None, :]).expand(2, 300, 300).sum().item()
    assert p.flops == 4 * kept * 4


def test_reference_tells_a_wrong_output() -> None:
    p = variants.attention("causal", 2, 2, 40, 8, CPU, EXACT, kv_heads=1)
    right = p.plain(*p.inputs)
    assert Reference(p).error(1.1 * right) == pytest.approx(0.1, rel=1e-3)
    assert math.isnan(Reference(p).error(right * math.nan))


def test_cells_are_well_formed() -> None:
    every = cells.cells(cells.Sizes())
    assert {c.group for c in every.values()} == set(cells.GROUPS)
    assert {c.group for c in cells.cells(cells.TINY).values()} == set(cells.GROUPS)
    assert all(c.rivals[0] == "ours" and len(set(c.rivals)) == len(c.rivals) for c in every.values())
    for name, rivals in cells.SHORT.items():
        assert set(rivals) <= set(every[name].rivals)
    for group in cells.GROUPS:
        assert group in report.TITLES
    chosen = [c.name for c, _ in bench.selected(every, ["flex/*/D64", "ipa"], ["ours"], False)]
    assert len(chosen) == 7 * 6 + 3


def test_a_failure_is_an_entry() -> None:
    def broken(device: torch.device) -> Problem:
        raise RuntimeError("out of everything")

    cell = cells.Cell("flex/none", broken, ("ours",))
    found = Bench(cell, CPU, tiny=True)
    assert found.run("ours") == {"failed": "RuntimeError: out of everything"}
    assert "flops" not in found.facts()


def test_bench_runs_and_merges(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    common = ["--device", "cpu", "--out", str(out)]
    bench.main(["--only", "decode/plain", "--rivals", "ours", *common])
    bench.main(["--only", "decode/plain", "--rivals", "sdpa", *common])
    data = json.loads(out.read_text())
    (cell,) = data["cells"].values()
    assert [cell["rivals"][r]["run"] for r in ("ours", "sdpa")] == [0, 1] and len(data["runs"]) == 2
    assert cell["rivals"]["ours"]["error"] < 1e-5 and cell["rivals"]["ours"]["ms"] > 0


def synthetic() -> dict:
    """A file in which we need 1 ms and everybody else 2 ms, in every cell but one."""
    found = {}
    for name, cell in cells.cells(cells.Sizes()).items():
        them = {r: {"ms": 2.0, "us": 18.0, "error": 1e-3, "peak_bytes": 2**20, "run": 0} for r in cell.rivals}
        them["ours"] |= {"ms": 1.0, "us": 16.0, "cold_s": 5.0, "warm_s": 0.6, "kernels": 2}
        them["ours"]["rows"] = [{"length": 500, "ms": 1.1, "static_ms": 1.0, "error": 1e-3}]
        if "flex" in them:
            them["flex"] |= {"cold_s": 4.0, "warm_s": 3.0}
        found[name] = {"kind": cell.kind, "shape": cell.shape, "flops": 4e11, "bytes": 1e9, "rivals": them}
    found["flex/full/D64/S512"]["rivals"]["flex"]["ms"] = 0.5
    found["flex/full/D128/S512"]["rivals"]["flex"] = {"failed": "it broke", "run": 0}
    found["ipa/S256"]["rivals"]["eager"] = {"skipped": "too | large", "run": 0}
    run = {"gpu": "none such", "torch": "2", "rates": {"matmul": 8e14, "copy": 4e12}}
    return {"runs": [run], "cells": found}


def test_the_corpus_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which tunes a kernel, on another thread, while it has the lock: others wait for it."""
    lock = multiprocessing.Lock()
    monkeypatch.setattr(sweep.launch, "fastest", sweep.fastest)
    monkeypatch.setattr(sweep, "fastest", lambda launches: len(launches))
    sweep._begin(lock)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **given: real(fn, **given) if given else fn)
    timed = []

    def busy(*_: object) -> float:
        with ThreadPoolExecutor(1) as other:
            timed.append(other.submit(sweep.launch.fastest, [None] * 5).result(10))
        return 1.0 if not lock.acquire(block=False) else 0.0

    monkeypatch.setattr(sweep, "busy_ms", busy)
    rows = [sweep.measured((corpus.make, name, 48, "cpu", sweep.PASSES)) for name in ("vanilla", "in_place")]
    assert timed == [5] * 9 * sweep.TIMES  # in_place has no gradient, in PyTorch either
    assert lock.acquire(block=False)
    assert not any(r["forward"]["outside of the bar"] for r in rows) and "ours failed" not in str(rows[0])
    assert "2 cases, torch.compile / ours 1.00" in sweep.summary(rows)
    assert "both: 1 cases" in sweep.summary(rows)


def test_bars() -> None:
    found = {(b.against, b.what): b for b in bars.bars(synthetic())}
    mean = found["FlexAttention", "seven variants, geometric mean"]
    assert mean.figure == pytest.approx(math.exp((82 * math.log(2) + math.log(0.5)) / 83))
    assert mean.missing == 1 and mean.verdict == "met so far"
    worst = found["FlexAttention", "seven variants, each cell"]
    assert (worst.figure, worst.where, worst.verdict) == (0.5, "flex/full/D64/S512", "**missed**")
    compiled = found["torch.compile, the faster mode", "IPA"]
    assert compiled.figure == 2 and compiled.margin == pytest.approx(2 / 3) and not compiled.missing
    warm = found["first call", "s, from the disk cache"]
    assert warm.verdict == "**missed**" and warm.margin == pytest.approx(0.5 / 0.6)
    assert found["host time", "µs of a one-kernel call"].verdict == "met"
    assert found["200 lengths in one process", "time over the static kernel's"].figure == pytest.approx(1.1)
    assert found["SDPA's bandwidth", "decode, six variants"].figure == 2


def test_what_ran_on_another_gpu_is_not_compared() -> None:
    data = synthetic()
    data["runs"].append({**data["runs"][0], "gpu": "another"})
    for name, rival in (("ipa/S512", "compile"), ("decode/plain/B8/S8192", "ours"), ("decode/plain/B8/S8192", "sdpa")):
        data["cells"][name]["rivals"][rival] |= {"run": 1, "ms": 1e-3}
    found = {(b.against, b.what): b for b in bars.bars(data)}
    assert found["torch.compile, the faster mode", "IPA"].figure == 2  # max-autotune's
    bandwidth = found["SDPA's bandwidth", "decode, six variants"]
    assert bandwidth.figure == 1 and bandwidth.missing == 4  # the cell's own, and not those that ask for it


def test_bars_of_nothing() -> None:
    assert {b.verdict for b in bars.bars({})} == {"not measured"}


def measured_layers() -> dict[str, Any]:
    """Results of layers.py: one that is half as fast as torch.compile, and one twice."""

    def row(name: str, theirs: float) -> dict[str, Any]:
        times = {"ours": 2.0, "torch.compile": theirs, "eager": 4.0, "error": 1e-3, "error of eager": 2e-3}
        return {"variant": name, "forward": times, "both": times}

    versions = {"torch": "2", "jax": "1", "triton": "3", "commit": "abc"}
    rows = [row("fast", 4.0), row("slow", 1.0), {"variant": "absent", "failed": "no such package"}]
    return {"gpu": "none such", **versions, "seq": 64, "rows": rows}


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "figures.json"
    source.write_text(json.dumps(synthetic()))
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps(measured_layers()))
    monkeypatch.setattr(report, "LAYERS", layers)
    report.main([str(source), "--docs", str(tmp_path)])
    page = (tmp_path / "performance.md").read_text()
    assert "| flex/causal/D64/S4096 | B4 H32 S4096 D64 | 1 | 400 | 1 | 50 % | 2 (2.00×) |" in page
    assert "| FlexAttention | softcap | ≥ 1.8 | 2 |" in page
    assert "| flex/full/D128/S512 | FlexAttention | failed: it broke |" in page
    missed = page.partition("## Bars that are missed")[2].partition("\n## ")[0]
    assert missed.count("\n| ") == 2 + sum(b.is_missed for b in bars.bars(synthetic()))
    assert (
        "| slow | 2 | 1 (0.50×) | 4 (2.00×) | 2 | 1 (0.50×) | 4 (2.00×) | 1.0e-03 (2.0e-03) | 1.0e-03 (2.0e-03) |"
        in page
    )
    assert page.index("| slow |") < page.index("| fast |") and "| absent | no such package |" in page
    assert "both, geometric mean of 2 layers: 1." in page
    assert "too \\| large" in page and "nan" not in page
    for line in page.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line[line.index("(") + 1 : -1]).exists()


def test_what_limits_a_missed_bar_is_said_of_bars_there_are() -> None:
    known = {(b.against, b.what) for b in bars.bars({})}
    said = {(against, what) for against, found in tomllib.loads(report.MISSED.read_text()).items() for what in found}
    assert said <= known
