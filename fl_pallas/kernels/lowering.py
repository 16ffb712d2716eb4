"""How a kernel is written down as Triton IR, but for its choices: what a process that compiles it is told."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule.plan import KernelPlan
from .blocks import ENGINE
from .lower import ALIGNMENT, Lowered, lower
from .sizes import Laid


@dataclass(frozen=True)
class Lowering:
    """A kernel's plan, under the choices it is called with → Triton IR.

    Attributes:
      kernel: how its tensors lie.
      aligned: the powers of two that divide its operands' addresses, bytes.
      capability: compute capability of the device; 90 is sm_90.
      precision: JAX's, of float32 matrix products.
    """

    kernel: Laid
    aligned: tuple[int, ...]
    capability: int
    precision: object

    def __call__(self, plan: KernelPlan) -> Lowered:
        """Raises: Unsupported."""
        kernel = self.kernel
        engine = {n for n, a in enumerate(self.aligned) if a == ALIGNMENT} if self.capability >= ENGINE else frozenset()
        made = lower(plan, kernel.operands, self.precision, kernel.outputs, kernel.sizes, engine)
        # What PyTorch allocates, the array of sizes and the outputs, begins at multiples of more than that.
        first = [ALIGNMENT] if kernel.sizes else []
        return made.aligned([*first, *self.aligned, *[ALIGNMENT] * len(kernel.outputs)])
