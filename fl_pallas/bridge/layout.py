"""How tensors lie in memory, and which of them a GPU kernel must be given a copy of."""

from __future__ import annotations

from collections.abc import Sequence

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


def to_copy(plan: KernelPlan, operands: Sequence[torch.Tensor]) -> frozenset[str]:
    """Names of the operands that a GPU kernel gets contiguous copies of (see kernels.triton.scattered).

    Raises: Unsupported where a copy would not help.
    """
    copied = scattered(plan, [spec_of(t) for t in operands])
    named = zip(operand_names(plan), operands, strict=True)
    left = scattered(plan, [spec_of(t.contiguous() if n in copied else t) for n, t in named])
    if left:
        why = f"{', '.join(sorted(left))} is read against its layout, which Triton miscompiles; make it contiguous"
        raise Unsupported(plan.name, why)
    return copied
