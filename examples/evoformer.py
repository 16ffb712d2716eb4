"""AlphaFold's attentions: MSA rows and columns, triangles, invariant points.    python examples/evoformer.py"""

from __future__ import annotations

import torch
from common import DEVICE, console, finish, run_case, where

import fl_pallas as fl
from tests.corpus.science import evoformer_row
from tests.programs import BY_NAME

VARIANTS = ("evoformer_row", "evoformer_column", "triangle_starting", "triangle_ending", "ipa_scores", "ipa")


def main() -> None:
    console.print(f"on {where()}")
    fl.explain(evoformer_row, *BY_NAME["evoformer_row"].make_inputs(128, torch.float32, DEVICE)).show()
    finish([run_case(BY_NAME[name]) for name in VARIANTS], "AlphaFold's attentions")


if __name__ == "__main__":
    main()
