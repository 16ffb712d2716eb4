"""The corpus's cases with heads of 64 features: what a kernel's tiles of 16 do not show of machine code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .corpus.case import Case, Draw

SIDES: tuple[Mapping[int, int], ...] = (
    {2: 8, 4: 8, 16: 64, 32: 64, 8: 32},
    {2: 8, 4: 8, 16: 64, 32: 512, 8: 32},
    {2: 8, 16: 64, 32: 512},
    {2: 8, 16: 64, 32: 128},
    {2: 8, 16: 64},
    {16: 64, 32: 128},
    {16: 64},
)
"""Sides of a case's tensors (heads, features, widths of models), and what they become: the first a case takes."""


@dataclass(frozen=True)
class Wide(Draw):
    """Draws tensors of other sides than it is asked for."""

    sides: Mapping[int, int] = field(default_factory=dict)

    def _of(self, shape: tuple[int, ...]) -> list[int]:
        return [self.sides.get(n, n) for n in shape]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return super().normal(*self._of(shape), scale=scale)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return super().uniform(*self._of(shape), low=low, high=high)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return super().ints(low, high, *self._of(shape))

    def bools(self, *shape: int, p: float = 0.7) -> Tensor:
        return super().bools(*self._of(shape), p=p)


def wide_inputs(case: Case, seq: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...] | None:
    """Inputs of key length `seq` with heads of 64 features; None for a case that takes no others than its own."""
    if case.module:
        return None
    for sides in SIDES:
        gen = torch.Generator().manual_seed(0)
        try:
            given = case.inputs(Wide(seq, dtype, torch.device("cpu"), gen, sides))
            if all(len(set(t.shape) & {*sides.values()}) == 0 for t in given):
                return None
            case.fn(*(t.to("meta") for t in given))
        except Exception:  # whatever PyTorch says of shapes that do not fit
            continue
        return tuple(t.to(device) for t in given)
    return None
