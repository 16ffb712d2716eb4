"""How tensors lie in memory."""

from __future__ import annotations

import torch

from ..capture.dtypes import short_dtype
from ..errors import Unsupported
from ..kernels.triton import TensorSpec


def spec_of(t: torch.Tensor) -> TensorSpec:
    """How a tensor lies from its own first element on.

    Raises: Unsupported for an element type that kernels do not read.
    """
    dtype = short_dtype(t.dtype)
    if dtype is None:
        raise Unsupported(str(t.dtype), "no kernel reads it")
    return TensorSpec(tuple(t.shape), tuple(t.stride()), 0, dtype)
