"""What a kernel is compiled for: layouts, alignments, a device; and how many of its choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import cache
from ..kernels.lower import ALIGNMENT
from ..kernels.lowering import Lowering
from ..kernels.sizes import Laid
from ..schedule.plan import fingerprint
from .dlpack import float32_products, matmul_precision

if TYPE_CHECKING:
    from ..kernels.fit import Fitted


@dataclass(frozen=True)
class Order:
    """A kernel to be compiled.

    Attributes:
      kernel: what it computes, and how its tensors lie.
      aligned: the powers of two that divide its operands' addresses.
      index: of the device.
      tune: how many of its choices are timed.
      key: what the cache on disk keeps it by.
    """

    kernel: Laid
    aligned: tuple[int, ...]
    index: int
    tune: int
    key: str

    @property
    def capability(self) -> int:
        return capability(self.index)

    def fitted(self) -> tuple[Fitted, ...]:
        """It compiled under the first of its choices that fit, as many as are timed.

        Raises: Unsupported if none does.
        """
        from ..kernels.fit import fitting  # triton is not everywhere
        from ..kernels.launcher import launcher, starting

        starting()  # ends while kernels are compiled
        lower = Lowering(self.kernel, self.aligned, self.capability, matmul_precision(False))
        return fitting(self.kernel.plan, lower, self.capability, self.tune, launcher)


def order(kernel: Laid, aligned: tuple[int, ...], index: int, tune: int) -> Order:
    """A kernel to be compiled, of whose choices `tune` are timed where there are as many."""
    from ..kernels.compiler import settings  # triton is not everywhere

    # Nothing can be timed while a CUDA graph is recorded.
    tune = 1 if torch.cuda.is_current_stream_capturing() else max(1, min(tune, 1 + len(kernel.plan.others)))
    where = torch.cuda.get_device_name(index) if tune > 1 else capability(index)
    layout = (kernel.operands, kernel.outputs, aligned)
    key = cache.key_of(fingerprint(kernel.plan), layout, float32_products(), where, tune, settings())
    return Order(kernel, aligned, index, tune, key)


def capability(index: int) -> int:
    """Compute capability of a device; 90 is sm_90."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def alignment(pointer: int) -> int:
    """The largest power of two up to ALIGNMENT that divides an address."""
    return min(pointer & -pointer, ALIGNMENT) or ALIGNMENT
