"""Descriptors of tensors, by which Hopper's copy engine finds blocks of them: made by the host, given to a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.blocks import Block

# Descriptors, for one kernel each, that are kept: of 128 bytes for each block.
KEPT = 128


class Descriptors:
    """Makes the descriptors of blocks for operands that lie as these do; some are kept: the layers of a model share a
    kernel, and find their memory at the same places again.

    Args:
      blocks: each with what Triton's metadata tells of it: "block_size", "swizzle", "elem_size", "elem_type".
      operands: of the kernel.
    """

    def __init__(self, blocks: Sequence[tuple[Block, dict[str, Any]]], operands: Sequence[torch.Tensor]):
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as host  # triton is not everywhere
        from triton.runtime import driver

        active: Any = driver.active
        self._fill = active.utils.fill_tma_descriptor
        self._fixed = []
        for block, meta in blocks:
            t = operands[block.operand]
            shape = [math.prod(t.shape[d] for d in dims) for dims in block.dims]
            strides = [t.stride(dims[-1]) for dims in block.dims]
            kind = (meta["swizzle"], meta["elem_size"], host[meta["elem_type"]])
            self._fixed.append((block.operand, (*kind, meta["block_size"], shape, strides, 0)))
        self._made: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def at(self, pointers: Sequence[int]) -> tuple[Any, ...]:
        """The descriptors for operands at these addresses (`pointers` may go on)."""
        where = tuple([pointers[operand] for operand, _ in self._fixed])
        made = self._made.get(where)
        if made is None:
            if len(self._made) >= KEPT:
                self._made.clear()
            made = tuple(self._fill(p, *fixed) for p, (_, fixed) in zip(where, self._fixed, strict=True))
            self._made[where] = made
        return made
