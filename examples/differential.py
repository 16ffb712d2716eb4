"""Differential attention: two softmaxes that share one V.    python examples/differential.py"""

from __future__ import annotations

import torch
from common import DEVICE, console, finish, run_case, where

import fl_pallas as fl
from tests.corpus.science import differential
from tests.programs import BY_NAME


def main() -> None:
    case = BY_NAME["differential"]
    inputs = case.make_inputs(256, torch.float32, DEVICE)
    console.print(f"on {where()}")
    fl.explain(differential, *inputs).show()
    finish([run_case(BY_NAME[name], 256) for name in ("differential", "differential_paper")], "Differential attention")


if __name__ == "__main__":
    main()
