"""Draws traffic.svg: memory traffic of variants, fused and as PyTorch would, as fl.explain estimates both.

python docs/figures/traffic.py
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # the corpus lives in tests/

import matplotlib  # noqa: E402
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from fl_pallas.schedule.cost import Cost, fused_costs, unfused_cost  # noqa: E402
from tests.plan_evaluate import captured  # noqa: E402
from tests.programs import BY_NAME, Case  # noqa: E402

VARIANTS = (
    "vanilla causal_where gqa_repeat alibi t5_bias softcap sliding_window document_causal rope sigmoid sink "
    "with_entropy differential retention max_plus ipa"
).split()
LENGTH = 2048
BLUE, GREY = "#2a6f97", "#b8bec4"


def costs(case: Case) -> tuple[Cost, Cost]:
    """Of all regions of a program: fused, and each of their operations by itself."""
    made = captured(case.target(torch.bfloat16, "cpu"), case.make_inputs(LENGTH, torch.bfloat16, "cpu")).made
    return (
        sum(fused_costs(made), Cost(0, 0)),
        sum((unfused_cost(made.program, region) for region in made.regions), Cost(0, 0)),
    )


def draw(found: dict[str, tuple[Cost, Cost]]) -> Figure:
    """A row a variant: a bar for each of the two, and how many times less."""
    figure = Figure(figsize=(7.5, 1 + 0.27 * len(found)))
    axis = figure.subplots()
    for row, (fused, unfused) in enumerate(found.values()):
        axis.barh(row, unfused.bytes / 2**20, 0.7, color=GREY, label="" if row else "operation by operation")
        axis.barh(row, fused.bytes / 2**20, 0.7, color=BLUE, label="" if row else "fused")
        axis.text(unfused.bytes / 2**20 * 1.1, row, f"{unfused.bytes / fused.bytes:.0f}×", va="center", fontsize=8)
    axis.set_yticks(range(len(found)), [name.replace("_", " ") for name in found])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(right=2 * max(unfused.bytes for _, unfused in found.values()) / 2**20)
    axis.set_xlabel(f"MiB through device memory at {LENGTH} positions, estimated (bfloat16)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.08), ncols=2, frameon=False)
    return figure


def main() -> None:
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fl_pallas", "svg.fonttype": "none"})
    found = {name: costs(BY_NAME[name]) for name in VARIANTS}
    for name, (fused, unfused) in found.items():
        print(f"{name:20} {fused.bytes / 2**20:8.2f} MiB fused, {unfused.bytes / 2**20:9.1f} unfused")
    draw(found).savefig(HERE / "traffic.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
