"""Prints the seconds of a rival's first call, or step of training, in this process.

python benchmarks/first_call.py CELL RIVAL
"""

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
from benchmarks.training import step  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell")
    parser.add_argument("rival")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(given.device)
    cell = cells(Sizes() if device.type == "cuda" else TINY)[given.cell]
    # The inputs start CUDA; imports and that are not the compiler's.
    problem = cell.make(device)
    with torch.no_grad():
        (problem.inputs[0] @ problem.inputs[1].mT).softmax(-1)
    if cell.kind == "compile":
        with torch.no_grad():
            call = RIVALS[given.rival](problem)
            seconds = first_call_s(call, device)
    else:
        made = step(problem, lambda p: p.inputs[0])  # every variant returns what is like q
        trained = RIVALS[given.rival](made.problem)
        seconds = first_call_s(lambda: made.gradients(trained(), False), device)
    print(seconds, flush=True)


if __name__ == "__main__":
    main()
