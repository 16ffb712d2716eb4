"""A process that runs functions of this package for another: a program that reads and writes pickles (`processes.py`).

In one process, threads that trace and compile wait for each other's turn at Python, and for the user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import sys
import types
from pathlib import Path

# Seconds without anything to do, after which it ends.
IDLE = 120


def main() -> None:
    """Answer a question after the other, until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what LLVM prints is no answer
    sys.path[:] = json.loads(sys.argv[1])
    os.environ["JAX_PLATFORMS"] = "cpu"  # it only writes kernels down here
    # The package without what its own module imports: PyTorch takes seconds, and nothing here needs it.
    package = types.ModuleType("fl_pallas")
    package.__path__ = [str(Path(__file__).parent.parent)]
    sys.modules[package.__name__] = package
    from fl_pallas.kernels import fit, processes  # noqa: F401  ahead of the first question

    processes.begin_answering()
    with contextlib.suppress(EOFError):
        while select.select([sys.stdin], [], [], IDLE)[0]:
            answers.write(processes.answered(pickle.load(sys.stdin.buffer)))
            answers.flush()


if __name__ == "__main__":
    main()
