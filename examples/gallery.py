"""The whole corpus, a line each: kernels, and what stayed in PyTorch.    python examples/gallery.py [name part ...]"""

from __future__ import annotations

import sys
import warnings

from common import console, finish, run_case, where

import fl_pallas as fl
from tests.programs import CORPUS


def main() -> None:
    parts = sys.argv[1:]
    cases = [case for case in CORPUS if not parts or any(part in case.name for part in parts)]
    if not cases:
        sys.exit(f"no program's name holds {' or '.join(parts)}")
    console.print(f"{len(cases)} programs on {where()}")
    runs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)  # the table has a column for it
        for case in cases:
            run = run_case(case)
            runs.append(run)
            console.print(f"{case.name:24} {run.kernels} kernels, error {run.worst.compiled:.1e} {run.verdict}")
            for fallback in run.explanation.fallbacks:
                console.print(f"    {fallback.what}: {fallback.why}", highlight=False)
    finish(runs, "The corpus")


if __name__ == "__main__":
    main()
