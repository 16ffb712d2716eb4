"""Plain numbers of a device, for the choices pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A GPU as the scheduler sees it.

    Attributes:
      name: for messages.
      registers: 32-bit registers of one thread that a kernel may use.
      shared_bytes: shared memory of one program, bytes.
      processors: streaming multiprocessors.
      memory: of the device, bytes.
    """

    name: str
    registers: int = 255
    shared_bytes: int = 227 * 1024
    processors: int = 132
    memory: int = 80 * 10**9

    @property
    def room(self) -> int:
        """Bytes that a value may take which kernels store because computing it again would take too long."""
        return self.memory // 32


HOPPER = Target("sm_90")
AMPERE = Target("sm_80", shared_bytes=163 * 1024, processors=108)
# Consumer chips of the same generations have less shared memory (CUDA C++ Programming Guide, compute capabilities).
_SHARED = {86: 99 * 1024, 89: 99 * 1024, 120: 99 * 1024}


def target_of(capability: int) -> Target:
    """The target of a compute capability; 90 is sm_90."""
    known = HOPPER if capability >= 90 else AMPERE
    return Target(
        f"sm_{capability}", known.registers, _SHARED.get(capability, known.shared_bytes), known.processors, known.memory
    )
