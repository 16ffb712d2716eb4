"""How tensors lie in memory, and which of them a GPU kernel must be given a copy of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..capture.dtypes import short_dtype
from ..errors import Unsupported
from ..kernels.triton import TensorSpec, operand_names, scattered
from ..schedule.plan import KernelPlan


def spec_of(t: torch.Tensor) -> TensorSpec:
    """How a tensor lies from its own first element on.

    Raises: Unsupported for an element type that kernels do not read.
    """
    dtype = short_dtype(t.dtype)
    if dtype is None:
        raise Unsupported(str(t.dtype), "no kernel reads it")
    return TensorSpec(tuple(t.shape), tuple(t.stride()), 0, dtype)


class Readable:
    """Operands as a GPU kernel may read them: some as copies laid out for it (see kernels.triton.scattered).

    Which ones is found once for each layout that it meets.
    """

    def __init__(self, plan: KernelPlan):
        self.plan, self.names = plan, operand_names(plan)
        self._copied: dict[tuple[Any, ...], dict[str, int]] = {}

    def __call__(self, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Operands, in the order of the plan's, ready to be read.

        Raises: Unsupported where a copy would not help.
        """
        layout = tuple([(t.shape, t.stride()) for t in operands])
        copied = self._copied.get(layout)
        if copied is None:
            copied = self._copied[layout] = self._to_copy(operands)
        return self._with_copies(operands, copied) if copied else operands

    def _to_copy(self, operands: Sequence[torch.Tensor]) -> dict[str, int]:
        copied = scattered(self.plan, [spec_of(t) for t in operands])
        left = scattered(self.plan, [spec_of(t) for t in self._with_copies(operands, copied)])
        if left:
            why = f"{', '.join(sorted(left))} is read along two dimensions at once, which Triton miscompiles"
            raise Unsupported(self.plan.name, why)
        return copied

    def _with_copies(self, operands: Sequence[torch.Tensor], copied: dict[str, int]) -> list[torch.Tensor]:
        return [_laid_out(t, copied[n]) if n in copied else t for n, t in zip(self.names, operands, strict=True)]


def _laid_out(t: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy whose elements along `dim` are neighbours in memory."""
    return t.movedim(dim, -1).contiguous().movedim(-1, dim)
