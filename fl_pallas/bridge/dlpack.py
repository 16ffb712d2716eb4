"""The DLPack road: PyTorch tensors to JAX and back without a copy, kernels run by JAX's runtime."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version

import torch

from ..config import share_gpu_memory
from ..schedule.plan import KernelPlan, operand_names

share_gpu_memory()

import jax  # noqa: E402  (its memory setting is read at import)
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from ..capture.dtypes import short_dtype, torch_dtype  # noqa: E402
from ..kernels.triton import TensorSpec, pallas_function  # noqa: E402
from .plain import plain  # noqa: E402

if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
    # On CPUs a thread of JAX's gives tensors back to PyTorch when a kernel has ended, for which it wants Python's lock:
    # where Python has ended meanwhile, the process dies of it. Kernels that run in the caller's thread have no such.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

# JAX takes CPU memory as it is only at this alignment; bytes.
ALIGNMENT = 64
# Elements that the programs and loops of a kernel go over, up to which XLA does not optimise it for a CPU: that would
# take longer than tens of calls do.
SMALL = 2**26
# What XLA makes for a CPU is in one piece, for each maps memory, of which a process has 65530 maps; jaxlib 0.11 has no
# longer the way of fusing that takes half of the time.
ONE_PIECE = {"xla_cpu_parallel_codegen_split_count": 1} | (
    {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}
)


def float32_products() -> str:
    """How PyTorch multiplies matrices of float32: "highest", "high" or "medium".

    PyTorch refuses to say, in these words, where it was set by `torch.backends.cuda.matmul.fp32_precision`.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def matmul_precision(interpret: bool) -> object:
    """JAX's name for PyTorch's float32 matmul precision.

    "highest" is three TF32 products, as accurate as float32; "high" and "medium" are one.
    """
    if interpret:
        return lax.Precision.HIGHEST
    if float32_products() == "highest":
        return lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return lax.DotAlgorithmPreset.TF32_TF32_F32


def flat_view(t: torch.Tensor) -> tuple[torch.Tensor, TensorSpec]:
    """The memory `t` spans as a 1-D tensor, and where `t` lies in it. No copy, whatever the strides.

    The flat view starts at the last aligned element before `t`. A CPU tensor whose storage is not
    aligned is copied.
    """
    t = plain(t.detach())
    dtype = short_dtype(t.dtype) or ""
    size = t.element_size()
    unit = ALIGNMENT // size
    offset = int(t.storage_offset()) % unit
    if (t.data_ptr() - offset * size) % ALIGNMENT and t.device.type == "cpu":
        t = t.contiguous().clone()
        offset = 0
    spec = TensorSpec(tuple(t.shape), tuple(t.stride()), offset, dtype)
    flat = torch.as_strided(t, (spec.span,), (1,), t.storage_offset() - offset)
    return (flat.view(torch.uint8) if spec.stored is jnp.uint8 else flat), spec


def to_jax(t: torch.Tensor) -> jax.Array:
    """A 1-D tensor as a jax array on the same memory; work queued on PyTorch's current stream comes first."""
    return jax.dlpack.from_dlpack(t)


def to_torch(x: jax.Array, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A 1-D jax array as a tensor on the same memory, ready for PyTorch's current stream."""
    if next(iter(x.devices())).platform == "cpu":
        x.block_until_ready()
    out = torch.from_dlpack(x)
    return out.view(torch_dtype(dtype)).view(tuple(shape))


def _current(device: torch.device | None) -> AbstractContextManager[object]:
    """`device` as PyTorch's current one, from which alone it lends tensors; then the former again, although JAX leaves
    the one on which it last did something.
    """
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()


def compiler_options(plan: KernelPlan) -> dict[str, int | bool]:
    """What XLA is told of a kernel that it compiles for a CPU."""
    work = math.prod(a.extent for a in plan.grid) * max(1, sum(loop.axis.extent for loop in plan.loops))
    return ONE_PIECE | ({"xla_backend_optimization_level": 0} if work <= SMALL else {})


class DlpackKernel:
    """A KernelPlan that runs on tensors through JAX."""

    def __init__(self, plan: KernelPlan, interpret: bool):
        self.plan, self.interpret = plan, interpret
        self.names = operand_names(plan)
        self._compiled = functools.lru_cache(maxsize=64)(self._compile)

    def _compile(self, specs: tuple[TensorSpec, ...], precision: object, on_cpu: bool):
        options = compiler_options(self.plan) if on_cpu else None
        return jax.jit(pallas_function(self.plan, specs, precision, self.interpret), compiler_options=options)

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the tensors named by `names`; returns the plan's stores, each a new tensor."""
        device = next((t.device for t in operands if t.dim()), None)
        # PyTorch lets a CPU tensor of no dimensions take part in computations on a GPU.
        operands = [t if device is None or t.device == device else t.to(device) for t in operands]
        with _current(device), jax.enable_x64(True):
            views = [flat_view(t) for t in operands]
            on_cpu = device is None or device.type == "cpu"
            run = self._compiled(tuple(spec for _, spec in views), matmul_precision(self.interpret), on_cpu)
            results = run(*(to_jax(flat) for flat, _ in views))
            return [to_torch(x, s.shape, s.dtype) for x, s in zip(results, self.plan.stores, strict=True)]
