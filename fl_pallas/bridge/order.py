"""What a kernel is compiled for: layouts, alignments, a device; and how many of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .. import cache
from ..kernels.blocks import ENGINE
from ..kernels.chosen import as_chosen
from ..kernels.lower import ALIGNMENT, Lowered, lower
from ..kernels.sizes import Laid
from ..schedule.plan import KernelPlan, fingerprint
from .dlpack import float32_products, matmul_precision

if TYPE_CHECKING:
    from ..kernels.fit import Fitted

# A choice that will be timed is compiled in up to so many ways: of two forms, about guesses, with fewer registers.
WAYS = 4


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

    def lowered(self, plan: KernelPlan) -> Lowered:
        """Its Triton IR under the choices of `plan`; what will launch it is begun."""
        from ..kernels.launcher import launcher  # triton is not everywhere

        made = lowered(replace(self.kernel, plan=plan), self.aligned, self.capability)
        launcher(*made.arguments)
        return made

    def begin(self) -> None:
        """Start the processes that will compile it: they take a second, which passes while other work is done."""
        from ..kernels import processes  # triton is not everywhere
        from ..kernels.cubin import hashing

        processes.begin(WAYS * self.tune if self.tune > 1 else 1)
        hashing()

    def fitted(self) -> tuple[Fitted, ...]:
        """It compiled under the first of its choices that fit, as many as are timed.

        Raises: Unsupported if none does.
        """
        from ..kernels.fit import fitting  # triton is not everywhere
        from ..kernels.launcher import starting

        # These end while kernels are written down.
        self.begin()
        starting()
        return fitting(self.kernel.plan, self.lowered, self.capability, self.tune)


def order(kernel: Laid, aligned: tuple[int, ...], index: int, tune: int) -> Order:
    """A kernel to be compiled, of whose choices `tune` are timed where there are as many."""
    from ..kernels.compiler import settings  # triton is not everywhere

    # Nothing can be timed while a CUDA graph is recorded.
    tune = 1 if torch.cuda.is_current_stream_capturing() else max(1, min(tune, 1 + len(kernel.plan.others)))
    where = torch.cuda.get_device_name(index) if tune > 1 else capability(index)
    layout = (kernel.operands, kernel.outputs, aligned)
    with as_chosen():
        triton = settings()
    key = cache.key_of(fingerprint(kernel.plan), layout, float32_products(), where, tune, triton)
    return Order(kernel, aligned, index, tune, key)


def capability(index: int) -> int:
    """Compute capability of a device; 90 is sm_90."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def lowered(kernel: Laid, aligned: Sequence[int], capability: int) -> Lowered:
    """Triton IR of a kernel, for operands at multiples of `aligned` bytes."""
    engine = {n for n, a in enumerate(aligned) if a == ALIGNMENT} if capability >= ENGINE else frozenset()
    made = lower(kernel.plan, kernel.operands, matmul_precision(False), kernel.outputs, kernel.sizes, engine)
    # What PyTorch allocates, the array of sizes and the outputs, begins at multiples of more than that.
    first = [ALIGNMENT] if kernel.sizes else []
    return made.aligned([*first, *aligned, *[ALIGNMENT] * len(kernel.outputs)])


def alignment(pointer: int) -> int:
    """The largest power of two up to ALIGNMENT that divides an address."""
    return min(pointer & -pointer, ALIGNMENT) or ALIGNMENT
