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
    """Operands as a GPU kernel may read them: some as contiguous copies (see kernels.triton.scattered).

    Which ones is found once for each layout that it meets.
    """

    def __init__(self, plan: KernelPlan):
        self.plan, self.names = plan, operand_names(plan)
        self._copied: dict[tuple[Any, ...], frozenset[str]] = {}

    def __call__(self, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Operands, in the order of the plan's, ready to be read.

        Raises: Unsupported where a copy would not help.
        """
        layout = tuple([(t.shape, t.stride()) for t in operands])
        copied = self._copied.get(layout)
        if copied is None:
            copied = self._copied[layout] = self._to_copy(operands)
        return self._with_copies(operands, copied) if copied else operands

    def _to_copy(self, operands: Sequence[torch.Tensor]) -> frozenset[str]:
        copied = scattered(self.plan, [spec_of(t) for t in operands])
        left = scattered(self.plan, [spec_of(t) for t in self._with_copies(operands, copied)])
        if left:
            why = f"{', '.join(sorted(left))} is read against its layout, which Triton miscompiles; make it contiguous"
            raise Unsupported(self.plan.name, why)
        return copied

    def _with_copies(self, operands: Sequence[torch.Tensor], copied: frozenset[str]) -> list[torch.Tensor]:
        return [t.contiguous() if n in copied else t for n, t in zip(self.names, operands, strict=True)]
