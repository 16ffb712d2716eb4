"""The figures of docs/performance.md, as SVG; none where matplotlib is not installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .bars import Cells, entry, fastest, matching
from .variants import VARIANTS


def draw(data: dict[str, Any], folder: Path) -> list[str]:
    """Draw what there are measurements for; returns the names of the figures."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no figures")
        return []
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fl_pallas", "svg.fonttype": "none", "axes.grid": True})
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, figure in (("flex", _flex), ("fused", _fused)):
        made = figure(data["cells"])
        if made is not None:
            made.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
            drawn.append(name)
    return drawn


def _flex(cells: Cells) -> Any:
    """FlexAttention's time over ours, along the sequence length; a panel for each head size."""
    from matplotlib.figure import Figure

    names = matching(cells, "flex/*")
    dims = sorted({int(n.split("/")[2][1:]) for n in names})
    if not dims:
        return None
    figure = Figure(figsize=(5 * len(dims), 3.5))
    for axis, d in zip(figure.subplots(1, len(dims), sharey=True, squeeze=False)[0], dims, strict=True):
        for variant in VARIANTS:
            found = sorted(
                (int(n.rpartition("/S")[2]), entry(cells, n, "flex") / entry(cells, n, "ours"))
                for n in matching(cells, f"flex/{variant}/D{d}/*")
            )
            points = [p for p in found if not math.isnan(p[1])]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=variant)
        axis.axhline(1, color="black", linewidth=1)
        axis.set(title=f"head size {d}", xlabel="sequence length", xscale="log")
        axis.set_xscale("log", base=2)
        axis.legend(fontsize="small")
    figure.axes[0].set_ylabel("times faster than FlexAttention")
    return figure


def _fused(cells: Cells) -> Any:
    """torch.compile's time (the faster mode) and eager's over ours, for what FlexAttention has no form of."""
    from matplotlib.figure import Figure

    names = matching(cells, "differential/outputs/*", "evoformer/*", "ipa/*", "triangle/*")
    names = [n for n in names if not math.isnan(entry(cells, n, "ours"))]
    if not names:
        return None
    figure = Figure(figsize=(7, 1 + 0.3 * len(names)))
    axis = figure.subplots()
    for offset, label, rivals in ((-0.2, "torch.compile", ("compile", "compile_max")), (0.2, "eager", ("eager",))):
        ratios = [fastest(cells, n, *rivals) / entry(cells, n, "ours") for n in names]
        axis.barh(
            [n + offset for n in range(len(names))], [0 if math.isnan(r) else r for r in ratios], 0.4, label=label
        )
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("times faster")
    axis.legend()
    return figure
