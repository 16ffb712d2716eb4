"""Every kernel of the corpus becomes machine code, and keeps its registers to itself. No GPU is needed."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.bridge.dlpack import DlpackKernel, matmul_precision
from fl_pallas.capture.dtypes import torch_dtype
from fl_pallas.kernels.cubin import compile_ttir
from fl_pallas.kernels.lower import Lowered, lower_contiguous
from fl_pallas.kernels.triton import operand_names
from tests.programs import BY_NAME, FUSED, Case

SEQ = 257
# Shared memory that one program may have, bytes.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
# Bytes of spilled registers that a thread may have; a few, outside of the loop, do no harm.
SPILL = 64
# Kernels known to spill more. A tile read with rows of odd length goes element by element, and each
# element's address takes two registers; 8 warps instead of 4 would do for all but the first two.
SPILLS = {
    "dense_bias": 1792,
    "evoformer_row": 1792,
    "relative_keys": 768,
    "sdpa_bool_mask": 256,
    "max_times": 192,
    "head_dim_80": 320,  # float32 on sm_80: a head dim of 80 takes tiles of 128
}


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own, so that compilation is really tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@functools.cache
def lowered(name: str, dtype: torch.dtype) -> tuple[Lowered, ...]:
    """The kernels of a case, as the CPU's scheduler makes them."""
    case = BY_NAME[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DlpackKernel, "__call__", _not_run)  # only the plans are wanted
        explanation = fl.explain(case.target(dtype, "cpu"), *case.make_inputs(SEQ, dtype, "cpu"))
    found = []
    for graph in explanation.graphs:
        if graph.schedule is None:
            continue
        tensors = {v.name: (v.shape, v.dtype) for v in graph.schedule.program.values}
        for plan in graph.kernels:
            tensors |= {s.name: (tuple(a.extent for a in s.axes), s.dtype) for s in plan.stores}
            operands = [tensors[n] for n in operand_names(plan)]
            found.append(lower_contiguous(plan, operands, matmul_precision(False)))
    return tuple(found)


def _not_run(kernel: DlpackKernel, operands: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros([a.extent for a in s.axes], dtype=torch_dtype(s.dtype)) for s in kernel.plan.stores]


def variant(case: Case) -> tuple[torch.dtype, int]:
    """Type and capability for a case: mostly bfloat16 on sm_90; some of each other kind, always the same ones."""
    draw = zlib.crc32(case.name.encode()) % 8
    return (torch.float32 if draw in (0, 1) else torch.bfloat16), (80 if draw in (1, 2) else 90)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in FUSED])
def test_compiles(case: Case) -> None:
    dtype, capability = variant(case)
    kernels = lowered(case.name, dtype)
    assert kernels or case.kernels is None
    for kernel in kernels:
        cubin = compile_ttir(kernel, capability)
        what = f"{case.name} {kernel.name} on sm_{capability}"
        assert cubin.binary.startswith(b"\x7fELF"), what
        assert cubin.shared <= SHARED[capability], f"{what}: {cubin.shared} bytes of shared memory"
        allowed = SPILLS.get(case.name, SPILL)
        spilled = cubin.stack  # by itself, or pytest prints the whole cubin
        assert spilled <= allowed, f"{what}: {cubin.registers} registers, {spilled} bytes spilled"


@pytest.mark.parametrize("capability, instruction", [(80, "mma.sync"), (90, "wgmma.mma_async")])
def test_uses_the_matrix_units(capability: int, instruction: str) -> None:
    (kernel,) = lowered("vanilla", torch.bfloat16)
    cubin = compile_ttir(kernel, capability)
    assert instruction in cubin.asm["ptx"]
    assert "cp.async.cg" in cubin.asm["ptx"], "no 16-byte asynchronous copies"


def test_alignment_reaches_the_loads() -> None:
    (kernel,) = lowered("vanilla", torch.bfloat16)
    odd = kernel.aligned([2, 2, 2, 16])
    assert odd.ttir != kernel.ttir
    assert "cp.async.cg" not in compile_ttir(odd, 90).asm["ptx"]


def test_refuses_what_does_not_compile() -> None:
    (kernel,) = lowered("vanilla", torch.bfloat16)
    broken = Lowered("module {", "broken", 1, 4, 2, (), ())
    with pytest.raises(fl.Unsupported, match="sm_90"):
        compile_ttir(broken, 90)
    assert os.environ["TRITON_CACHE_DIR"]
    assert kernel.programs > 0
