"""The direct road: kernels compiled by Triton, launched on PyTorch's current stream and memory.

JAX only writes the Triton IR down; its runtime is not involved, and its GPU backend is never started.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.dtypes import torch_dtype
from ..errors import Unsupported
from ..kernels.lower import ALIGNMENT, Lowered, lower
from ..kernels.triton import grid_size, operand_names
from ..schedule.plan import KernelPlan
from .dlpack import matmul_precision
from .layout import spec_of, to_copy

# Compiled versions of one kernel (shapes, strides, types, alignments, devices) kept at a time.
MAX_VERSIONS = 64
OLDEST = (8, 0)


def unavailable(device: torch.device) -> str | None:
    """Why kernels cannot take the direct road to this device; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the direct road is for NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return "the direct road needs the package triton"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST:
        return f"sm_{major}{minor} is older than sm_{OLDEST[0]}{OLDEST[1]}"
    return None


@dataclass(frozen=True)
class _Launch:
    """One compiled version of a kernel, loaded on a device.

    Attributes:
      run: triton's launcher: (grid, stream, function, metadata, hooks, pointers) → None.
      fixed: its arguments between stream and pointers.
      kernel: keeps the loaded code alive; None for a kernel of no programs.
    """

    run: Callable[..., None]
    fixed: tuple[Any, ...]
    kernel: Any


class DirectKernel:
    """A KernelPlan that runs on CUDA tensors, without JAX's runtime.

    Args:
      plan: what to compute.
      device: where to run a kernel that has no operands.
    """

    def __init__(self, plan: KernelPlan, device: torch.device | None = None):
        self.plan, self.names = plan, operand_names(plan)
        self._device = device
        self._programs = grid_size(plan)
        self._outputs = [(tuple(a.extent for a in s.axes), torch_dtype(s.dtype)) for s in plan.stores]
        self._versions: dict[tuple[Any, ...], _Launch] = {}
        self._copied: dict[tuple[Any, ...], frozenset[str]] = {}
        self._lock = threading.Lock()

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the tensors named by `names`; returns the plan's stores, each a new tensor.

        Raises: Unsupported if the kernel cannot be compiled for, or does not fit on, the device.
        """
        device = self._place(operands)
        index: int = device.index  # type: ignore[assignment]
        if any(t.device != device for t in operands):
            # PyTorch lets a CPU tensor of no dimensions take part in computations on a GPU.
            operands = [t.to(device) for t in operands]
        operands = [t.resolve_neg() for t in operands]
        layout = tuple([(t.shape, t.stride()) for t in operands])
        copied = self._copied.get(layout)
        if copied is None:
            copied = self._copied[layout] = to_copy(self.plan, operands)
        if copied:
            operands = [t.contiguous() if n in copied else t for n, t in zip(self.names, operands, strict=True)]
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._outputs]
        if not self._programs:
            return results
        pointers = [t.data_ptr() for t in operands]
        key = (
            index,
            torch.get_float32_matmul_precision(),
            *[(t.shape, t.stride(), t.dtype, p % ALIGNMENT) for t, p in zip(operands, pointers, strict=True)],
        )
        version = self._versions.get(key)
        if version is None:
            version = self._prepare(key, operands, pointers, index)
        pointers += [t.data_ptr() for t in results]
        if torch.cuda.current_device() == index:
            version.run(self._programs, 1, 1, _stream(index), *version.fixed, *pointers)
        else:
            with torch.cuda.device(index):
                version.run(self._programs, 1, 1, _stream(index), *version.fixed, *pointers)
        return results

    def lowered(self, operands: Sequence[torch.Tensor]) -> Lowered:
        """The kernel's Triton IR for operands with these shapes, strides, types and addresses. Needs no GPU.

        Raises: Unsupported.
        """
        made = lower(self.plan, [spec_of(t) for t in operands], matmul_precision(False))
        ours = [alignment(t.data_ptr()) for t in operands]
        return made.aligned([*ours, *[ALIGNMENT] * len(self._outputs)])

    def _place(self, operands: Sequence[torch.Tensor]) -> torch.device:
        device = next((t.device for t in operands if t.is_cuda), self._device)
        if device is None or device.type != "cuda":
            raise Unsupported(self.plan.name, "the direct road needs tensors on an NVIDIA GPU")
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

    def _prepare(
        self, key: tuple[Any, ...], operands: Sequence[torch.Tensor], pointers: Sequence[int], index: int
    ) -> _Launch:
        with self._lock:
            found = self._versions.get(key)
            if found is not None:
                return found
            version = self._load(self.lowered(operands), index)
            while len(self._versions) >= MAX_VERSIONS:
                del self._versions[next(iter(self._versions))]
            self._versions[key] = version
            return version

    def _load(self, lowered: Lowered, index: int) -> _Launch:
        """Compile for the device `index` and load there."""
        from ..kernels.cubin import compile_kernel

        major, minor = torch.cuda.get_device_capability(index)
        kernel = compile_kernel(lowered, 10 * major + minor)
        if kernel.metadata.global_scratch_size or kernel.metadata.profile_scratch_size:
            raise Unsupported(lowered.name, "Triton wants scratch memory for it")
        with torch.cuda.device(index):
            try:
                run = kernel.run  # loads the code, and builds triton's launcher for this signature
            except Exception as e:  # out of shared memory, no C compiler, a driver too old, ...
                raise Unsupported(lowered.name, f"cannot be loaded on {torch.cuda.get_device_name(index)}: {e}") from e
        # launch_metadata, launch_enter_hook, launch_exit_hook: profilers that hook into triton are not served.
        return _Launch(run, (kernel.function, kernel.packed_metadata, None, None, None), kernel)


def alignment(pointer: int) -> int:
    """The largest power of two up to ALIGNMENT that divides an address."""
    return min(pointer & -pointer, ALIGNMENT) or ALIGNMENT


def _public_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The private one makes no Stream object; triton and torch.compile launch with it too. CPU builds lack it.
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
