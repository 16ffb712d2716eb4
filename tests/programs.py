"""The corpus: attention in plain PyTorch, shared by the tests, the examples and the benchmarks."""

from __future__ import annotations

from .corpus import (
    basic,
    fallbacks,
    further,
    masks,
    models,
    normalisers,
    outputs,
    places,
    research,
    scans,
    science,
    scores,
)
from .corpus.case import Case, Draw

__all__ = ["BY_NAME", "CORPUS", "FALLBACKS", "FUSED", "Case", "Draw"]

FUSED: tuple[Case, ...] = (
    *basic.CASES,
    *masks.CASES,
    *scores.CASES,
    *normalisers.CASES,
    *outputs.CASES,
    *science.CASES,
    *further.CASES,
    *research.CASES,
    *models.CASES,
    *places.CASES,
    *scans.CASES,
)
FALLBACKS: tuple[Case, ...] = fallbacks.CASES
CORPUS: tuple[Case, ...] = (*FUSED, *FALLBACKS)
BY_NAME: dict[str, Case] = {case.name: case for case in CORPUS}
assert len(BY_NAME) == len(CORPUS), "two cases of one name"
