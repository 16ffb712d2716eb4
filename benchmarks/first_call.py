"""Prints the seconds of a rival's first call in this process: python benchmarks/first_call.py CELL RIVAL"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from benchmarks.cells import TINY, Sizes, cells  # noqa: E402
from benchmarks.measure import first_call_s  # noqa: E402
from benchmarks.rivals import RIVALS  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell")
    parser.add_argument("rival")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(given.device)
    # The inputs start CUDA; imports and that are not the compiler's.
    problem = cells(Sizes() if device.type == "cuda" else TINY)[given.cell].make(device)
    with torch.no_grad():
        (problem.inputs[0] @ problem.inputs[1].mT).softmax(-1)
        call = RIVALS[given.rival](problem)
        print(first_call_s(call, device), flush=True)


if __name__ == "__main__":
    main()
