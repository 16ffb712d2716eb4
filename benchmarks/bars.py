"""The bars that the project set itself, judged from the measured cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from .cells import Sizes
from .cells import cells as cells_of
from .ratios import geometric_mean
from .variants import MASKED

Cells = dict[str, Any]
EXPECTED = cells_of(Sizes())
# The error that passes wherever it is: that of rounding to bfloat16. Above, what the test suite grants.
FLOOR, FACTOR = 2**-9, 1.5
# (cell, figure) for each cell that a bar is about; NaN where something that it needs is not measured.
Figures = list[tuple[str, float]]


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
      against, what: as the tables say it.
      limit: what the figure has to reach; with `most`, what it must not pass.
      figure: the one by which the bar is judged, NaN where nothing was measured.
      where: the cell it is from, or how many cells it sums up.
      missing: cells that the bar is about and that have no figure yet.
      strict: whether the limit itself is not enough.
    """

    against: str
    what: str
    limit: float
    figure: float
    where: str
    missing: int = 0
    most: bool = False
    strict: bool = False

    @property
    def margin(self) -> float:
        """How many times better than the limit; below 1 the bar is missed."""
        if self.figure <= 0:
            return math.inf if self.most else 0.0
        return self.limit / self.figure if self.most else self.figure / self.limit

    @property
    def is_missed(self) -> bool:
        return self.margin <= 1 if self.strict else self.margin < 1

    @property
    def verdict(self) -> str:
        if math.isnan(self.figure):
            return "not measured"
        if self.is_missed:
            return "**missed**"
        return "met so far" if self.missing else "met"


def on_one_gpu(data: dict[str, Any]) -> Cells:
    """The cells of a file, each with the "gpu" that ours ran on and without rivals that ran on another."""

    def gpu(found: dict[str, Any]) -> str | None:
        return data["runs"][found["run"]]["gpu"] if found else None

    kept = {}
    for name, cell in data["cells"].items():
        where = gpu(cell["rivals"].get("ours", {}))
        rivals = {r: found for r, found in cell["rivals"].items() if where in (None, gpu(found))}
        kept[name] = {**cell, "gpu": where, "rivals": rivals}
    return kept


def entry(cells: Cells, name: str, rival: str, key: str = "ms") -> float:
    """A figure of the file; NaN where it is not there."""
    value = cells.get(name, {}).get("rivals", {}).get(rival, {}).get(key)
    return math.nan if value is None else float(value)


def fastest(cells: Cells, name: str, *rivals: str, key: str = "ms") -> float:
    """The least time of these rivals, of those that ran; NaN if none did."""
    times = [t for r in rivals if not math.isnan(t := entry(cells, name, r, key))]
    return min(times, default=math.nan)


def matching(cells: Cells, *patterns: str) -> list[str]:
    return [name for name in cells if any(fnmatch(name, p) for p in patterns)]


def speedups(cells: Cells, names: Iterable[str], *rivals: str, key: str = "ms") -> Figures:
    """Their time over ours, for the cells in which one of them takes part."""
    return [
        (n, fastest(cells, n, *rivals, key=key) / entry(cells, n, "ours", key))
        for n in names
        if any(r in EXPECTED[n].rivals and "skipped" not in cells[n]["rivals"].get(r, {}) for r in rivals)
    ]


def bars(data: dict[str, Any]) -> list[Bar]:
    """Every bar, in the order of the plan. What a file lacks of the suite counts as missing."""
    measured = on_one_gpu(data) if data else {}
    cells = {name: measured.get(name, {"rivals": {}}) for name in EXPECTED}
    found = (_flex(cells), _others(cells), _decode(cells), _process(cells), _training(cells), _errors(cells))
    return [bar for group in found for bar in group]


def _flex(cells: Cells) -> Iterator[Bar]:
    ratios = speedups(cells, matching(cells, "flex/*"), "flex")
    yield _mean("FlexAttention", "seven variants, geometric mean", 1.20, ratios)
    yield _worst("FlexAttention", "seven variants, each cell", 1.0, ratios)
    yield _worst("FlexAttention", "softcap", 1.8, [r for r in ratios if "/softcap/" in r[0]])
    made = [n for n in matching(cells, "flex/*/S4096") if n.split("/")[1] in MASKED]
    # Masks are made by the host as much as by the GPU, so that the clock tells.
    for rival, how in (("flex_and_mask", "mask creation"), ("flex_and_compiled_mask", "compiled mask creation")):
        ratios = speedups(cells, made, rival, key="wall_ms")
        yield _worst(f"FlexAttention with {how}", "masked variants, S = 4096, by the clock", 2.5, ratios)


def _others(cells: Cells) -> Iterator[Bar]:
    plain = matching(cells, "flex/full/*", "flex/causal/*")
    for d, limit in ((64, 0.95), (128, 0.80)):
        long = [n for n in plain if f"/D{d}/" in n and int(n.rpartition("/S")[2]) >= 2048]
        yield _worst("SDPA cuDNN", f"full and causal, D{d}, S ≥ 2048", limit, speedups(cells, long, "sdpa_cudnn"))
    yield _worst("SDPA flash", "full and causal", 1.25, speedups(cells, plain, "sdpa_flash"))
    compilers = ("compile", "compile_max")
    for pattern, what, limit in (
        ("differential/weights/D64/*", "differential attention, weights subtracted, D64", 2.5),
        ("differential/weights/D128/*", "differential attention, weights subtracted, D128", 1.7),
        ("differential/outputs/D64/*", "differential attention, results subtracted, D64", 2.5),
        ("differential/outputs/D128/*", "differential attention, results subtracted, D128", 1.7),
        ("evoformer/*/B8", "Evoformer row attention, B8", 5.0),
        ("evoformer/*/B1", "Evoformer row attention, B1", 3.0),
        ("ipa/*", "IPA", 3.0),
        ("triangle/*", "triangle attention", 3.0),
    ):
        found = speedups(cells, matching(cells, pattern), *compilers)
        yield _worst("torch.compile, the faster mode", what, limit, found)
    for pattern, what, limit in (
        ("differential/outputs/D64/*", "differential attention, D64, geometric mean", 5.8),
        ("evoformer/D64/*", "Evoformer, D64, geometric mean", 7.9),
        ("evoformer/D128/*", "Evoformer, D128, geometric mean", 4.7),
    ):
        found = speedups(cells, matching(cells, pattern), "eager")
        yield _mean("eager: the reference system's published ratio", what, limit, found, strict=True)


def _decode(cells: Cells) -> Iterator[Bar]:
    names = matching(cells, "decode/*")
    shares = [(n, _bandwidth(cells, n, "ours") / _sdpa_bandwidth(cells, n)) for n in names]
    yield _worst("SDPA's bandwidth", "decode, six variants", 0.85, shares)
    ratios = speedups(cells, matching(cells, "decode/*/B8/S8192"), "flex")
    yield _worst("FlexAttention", "decode, six variants, B8, S = 8192", 3.0, ratios)


def _bandwidth(cells: Cells, name: str, rival: str) -> float:
    return cells[name].get("bytes", math.nan) / entry(cells, name, rival)


def _sdpa_bandwidth(cells: Cells, name: str) -> float:
    """SDPA's without a mask, at the same shape; that of a window on the keys cut to the window."""
    variant, shape = name.split("/")[1], name.split("/", 2)[2]
    same = name if variant == "window" else f"decode/plain/{shape}"
    return _bandwidth(cells, same, "sdpa") if cells[same].get("gpu") == cells[name].get("gpu") else math.nan


def _process(cells: Cells) -> Iterator[Bar]:
    hosts = matching(cells, "host/*")
    yield _worst("host time", "µs of a one-kernel call", 20, [(n, entry(cells, n, "ours", "us")) for n in hosts], True)
    ratios = [(n, entry(cells, n, "ours", "us") / entry(cells, n, "sdpa", "us")) for n in hosts]
    yield _worst("SDPA's host time", "one-kernel call", 1.4, ratios, True)
    many = matching(cells, "lengths/*")
    built = [(n, entry(cells, n, "ours", "kernels")) for n in many]
    yield _worst("200 lengths in one process", "kernels built", 3, built, True)
    slower = []
    for n in many:
        rows = cells[n]["rivals"].get("ours", {}).get("rows") or [{"length": "", "ms": math.nan, "static_ms": 1}]
        slower += [(f"{n} at {row['length']}", row["ms"] / row["static_ms"]) for row in rows]
    yield _worst("200 lengths in one process", "time over the static kernel's", 1.15, slower, True)
    first = matching(cells, "compile/*")
    cold = [(n, entry(cells, n, "ours", "cold_s")) for n in first]
    yield _worst("first call", "s, nothing cached", 8, cold, True)
    beyond = [(n, s - entry(cells, n, "flex", "cold_s")) for n, s in cold]
    yield _worst("first call", "s more than FlexAttention's, nothing cached", 3, beyond, True)
    warm = [(n, entry(cells, n, "ours", "warm_s")) for n in first]
    yield _worst("first call", "s, from the disk cache", 0.5, warm, True)
    # A tensor of q's size; the scores of one head would be 128 GiB.
    peaks = [(n, entry(cells, n, "ours", "peak_bytes") / 2**20) for n in matching(cells, "memory/*")]
    yield _worst("memory", "MiB beside inputs and outputs, S = 262144, each of three masks runs", 256, peaks, True)


def _training(cells: Cells) -> Iterator[Bar]:
    ratios = speedups(cells, matching(cells, "training/flex/*"), "flex")
    yield _mean("FlexAttention, backward", "seven variants, geometric mean", 1.15, ratios)
    yield _worst("FlexAttention, backward", "seven variants, each cell", 0.95, ratios)
    plain = matching(cells, "training/flex/full/*", "training/flex/causal/*")
    long = [n for n in plain if int(n.rpartition("/S")[2]) >= 2048]
    yield _worst("SDPA cuDNN, backward", "full and causal, S ≥ 2048", 0.80, speedups(cells, long, "sdpa_cudnn"))
    yield _worst("SDPA flash, backward", "full and causal", 1.1, speedups(cells, plain, "sdpa_flash"))
    for group, what in (
        ("differential/weights", "differential attention, weights subtracted"),
        ("differential/outputs", "differential attention, results subtracted"),
        ("evoformer", "Evoformer"),
        ("ipa", "IPA"),
    ):
        found = speedups(cells, matching(cells, f"training/{group}/*"), "compile")
        yield _worst("torch.compile, backward", what, 2.0, found)
    peaks = [
        (n, entry(cells, n, "ours", "peak_bytes") / entry(cells, n, "flex", "peak_bytes"))
        for n in matching(cells, "training/flex/*/S16384")
    ]
    yield _worst("FlexAttention", "peak memory of forward and backward, S = 16384", 1.3, peaks, True)
    hosts = matching(cells, "training_host/*")
    ours = [(n, entry(cells, n, "ours", "us")) for n in hosts]
    yield _worst("host time", "µs of forward and backward of a one-kernel call", 120, ours, True)
    yield _worst(
        "FlexAttention's host time",
        "forward and backward",
        1.0,
        [(n, t / entry(cells, n, "flex", "us")) for n, t in ours],
        True,
    )


def _errors(cells: Cells) -> Iterator[Bar]:
    """Ours over the bound: 1.5 times the best rival's of the same cell, or FLOOR."""
    figures = []
    for n, expected in EXPECTED.items():
        if expected.kind in ("kernel", "training"):
            rivals = [entry(cells, n, r, "error") for r in expected.rivals if r != "ours"]
            best = min((e for e in rivals if not math.isnan(e)), default=math.nan)
            figures.append((n, entry(cells, n, "ours", "error") / max(FACTOR * best, FLOOR)))
    what = "every cell timed; over the larger of 1.5 × the best rival's error and 2^-9"
    yield _worst("error against float64", what, 1.0, figures, True)


def _worst(against: str, what: str, limit: float, figures: Figures, most: bool = False) -> Bar:
    return _bar(against, what, limit, figures, most, max if most else min)


def _mean(against: str, what: str, limit: float, figures: Figures, strict: bool = False) -> Bar:
    known = [f for _, f in figures if not math.isnan(f)]
    mean = geometric_mean(known)
    return Bar(against, what, limit, mean, f"{len(known)} cells", len(figures) - len(known), strict=strict)


def _bar(
    against: str, what: str, limit: float, figures: Figures, most: bool, pick: Callable[..., tuple[str, float]]
) -> Bar:
    known = [f for f in figures if not math.isnan(f[1])]
    where, figure = pick(known, key=lambda f: f[1]) if known else ("", math.nan)
    return Bar(against, what, limit, figure, where, len(figures) - len(known), most)
