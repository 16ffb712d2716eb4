"""Every variant of the corpus with heads of 64 features, against torch.compile and eager PyTorch: finds what is slow.

Run: PYTHONPATH=. python benchmarks/corpus.py       (writes benchmarks/results/corpus.json; --help tells more)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.sweep import main
from tests.programs import BY_NAME, FUSED
from tests.wide import wide_inputs

RESULTS = Path(__file__).parent / "results" / "corpus.json"


def make(name: str, seq: int, device: torch.device) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A case in bfloat16, and its inputs, widened where it takes any."""
    case = BY_NAME[name]
    inputs = wide_inputs(case, seq, torch.bfloat16, device) or case.make_inputs(seq, torch.bfloat16, device)
    return case.target(torch.bfloat16, device), inputs


if __name__ == "__main__":
    main(make, [case.name for case in FUSED], RESULTS, __doc__)
