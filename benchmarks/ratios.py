"""What sweep.py measures, as ratios; without what it measures with."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

PASSES = ("forward", "both")


def geometric_mean(values: Collection[float]) -> float:
    """NaN of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def over_ours(rows: Sequence[dict[str, Any]], which: str) -> dict[str, float]:
    """torch.compile's time over ours, by name, of each row that has both in a pass."""
    times = {r["variant"]: r[which] for r in rows if r.get(which, {}).keys() >= {"ours", "torch.compile"}}
    return {name: t["torch.compile"] / t["ours"] for name, t in times.items()}
