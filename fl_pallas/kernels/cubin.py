"""Triton IR to machine code, by the `triton` package; works without a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, ptx_get_version
from triton.compiler import CompiledKernel

from ..errors import Unsupported
from .chosen import as_chosen
from .compiler import VERSION, address
from .compiler import compiled as compiled_here
from .listing import listing, told
from .lower import Lowered
from .machine_code import is_miscompiled, loses_constant, loses_operand, shared_operands, steady_operands
from .pipelined import overtakes
from .processes import Ended, Nowhere, elsewhere, newest_ptxas

WARP = 32
# The first PTX of a ptxas (12.9) without the errors in addresses that `is_miscompiled` tells of.
SOUND = (8, 8)


@dataclass(frozen=True)
class Cubin:
    """Machine code of a kernel, and what a program of it takes.

    Attributes:
      binary: the cubin.
      capability: compute capability it was compiled for; 90 is sm_90.
      registers: of a thread.
      stack: bytes of local memory of a thread; all of it spilled registers, for kernels have no arrays.
      shared: bytes of shared memory of a program.
      asm: the stages of the compilation by name: "ttir", "ttgir", "llir", "ptx".
      address: where Triton's cache keeps it (`kept_kernel`).
    """

    binary: bytes
    capability: int
    registers: int
    stack: int
    shared: int
    asm: dict[str, str]
    address: dict[str, Any] = field(default_factory=dict)


def simplified(lowered: Lowered, capability: int) -> Lowered:
    """The same kernel after the passes that Triton runs on Triton IR, and leaves out for IR that it is given.

    One of them lets a matrix product add to an accumulator in place: `a * c + dot(p, v)` needs no registers for
    the product.

    Raises: Unsupported, with the compiler's words.
    """
    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(GPUTarget("cuda", capability, WARP)).load_dialects(context)
    with _file(lowered) as path:
        try:
            module = ir.parse_mlir_module(path, context)
            module.context = context
            module = CUDABackend.make_ttir(module, {}, None, capability)
        except Exception as e:
            raise Unsupported(lowered.name, f"Triton cannot simplify it for sm_{capability}: {e}") from e
    return replace(lowered, ttir=module.str_nodebug())


def compile_kernel(lowered: Lowered, capability: int) -> Any:
    """Compile Triton IR to triton's own CompiledKernel (launchable where there is a GPU), in another process.

    Raises: Unsupported, with the compiler's words.
    """
    try:
        kernel = kept_kernel(elsewhere(_kept, lowered, capability))
    except Nowhere:
        kernel = None
    except Ended as e:
        raise _refusal(lowered.name, capability, "its process ends") from e
    return _compiled(lowered, capability) if kernel is None else kernel


def _kept(lowered: Lowered, capability: int) -> dict[str, Any]:
    return address(_compiled(lowered, capability))


def _compiled(lowered: Lowered, capability: int) -> Any:
    """`compile_kernel` in this process."""
    options = {"num_warps": lowered.warps, "num_stages": lowered.stages, "enable_fp_fusion": True}
    if lowered.registers:
        options["maxnreg"] = lowered.registers
    if lowered.newest:
        # Kernels of the one ptxas and of the other are told apart by it, in Triton's cache too.
        major, minor = newest_ptx()
        options["ptx_version"] = 10 * major + minor
    try:
        with as_chosen(), _file(lowered) as path, newest_ptxas() if lowered.newest else contextlib.nullcontext():
            return compiled_here(path, capability, options)
    except Exception as e:  # LLVM, ptxas and MLIR each have their own
        raise _refusal(lowered.name, capability, e) from e


def _refusal(name: str, capability: int, why: object) -> Unsupported:
    return Unsupported(name, f"Triton cannot compile it for sm_{capability}: {why}")


def kept_kernel(address: dict[str, Any]) -> Any | None:
    """The CompiledKernel that Triton's cache keeps there (`compiler.address`); None if it is gone.

    `triton.compile` would find it too, once it has hashed Triton's own files, which the version of `fl_pallas.cache`
    stands for here, and where Triton's cache is set to be where it was, which Inductor may need elsewhere meanwhile.
    """
    files: dict[str, str] = {name: path for name, path in address["files"].items() if os.path.exists(path)}
    about = [path for name, path in files.items() if name.endswith(".json")]
    if not about or not any(name.endswith(".cubin") for name in files):
        return None
    with contextlib.suppress(OSError):
        os.utime(about[0])  # what was used last is removed last
    return CompiledKernel(None, files, address["hash"])


@contextlib.contextmanager
def _file(lowered: Lowered) -> Iterator[str]:
    """The path of a file with a kernel's IR: Triton takes it from there alone, and its cache goes by the text, which
    says that it is not compiled as others' are."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{lowered.name}.ttir"
        path.write_text(f"// {VERSION}\n{lowered.ttir}")
        yield str(path)


def compile_ttir(lowered: Lowered, capability: int) -> Cubin:
    """Compile Triton IR to a cubin and read what it needs.

    Raises: Unsupported, with the compiler's words, or for code that would compute something else.
    """
    cubin = compiled(lowered, capability)
    check(cubin, lowered.name)
    return cubin


def compiled(lowered: Lowered, capability: int) -> Cubin:
    """`compile_ttir` without a look at the machine code, which takes half as long again (`check`).

    Raises: Unsupported, with the compiler's words.
    """
    kernel = compile_kernel(lowered, capability)
    binary, texts = kernel.asm["cubin"], {name: text for name, text in kernel.asm.items() if isinstance(text, str)}
    registers, stack = resources(binary)
    return Cubin(binary, capability, registers, stack, kernel.metadata.shared, texts, address(kernel))


def check(cubin: Cubin, name: str) -> None:
    """Looks for what Triton's pipeliner and ptxas are known to get wrong.

    Args:
      name: of the kernel.

    Raises: Unsupported for code that would compute something else.
    """
    if overtakes(cubin.asm["ttgir"]):
        raise Unsupported(name, f"Triton would have a loop overtake its products for sm_{cubin.capability}")
    ptx = cubin.asm["ptx"]
    suspect = "s16x2" in ptx or "wgmma" in ptx and _version(ptx) < SOUND
    steady, shared = steady_operands(ptx), shared_operands(ptx)
    if (
        suspect
        and is_miscompiled(listing(cubin.binary, cubin.capability))
        or any(steady)
        and loses_operand(listing(cubin.binary, cubin.capability), steady)
        or shared.count(None) < len(shared)
        and loses_constant(listing(cubin.binary, cubin.capability), shared)
    ):
        raise Unsupported(name, f"ptxas would have it compute something else for sm_{cubin.capability}")


def _version(ptx: str) -> tuple[int, ...]:
    """The version of PTX, which Triton takes from that of its ptxas."""
    found = re.search(r"\.version (\d+)\.(\d+)", ptx)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@functools.cache
def newest_ptx() -> tuple[int, int]:
    """The version of PTX that the newest ptxas takes, which Triton has for later GPUs; (0, 0) if it has none."""
    try:
        return divmod(ptx_get_version(knobs.nvidia.ptxas_blackwell.version), 10)
    except (AttributeError, RuntimeError):
        return 0, 0


def is_serial(cubin: Cubin) -> bool:
    """Whether ptxas lets each asynchronous matrix instruction end before the next begins.

    It does so, with a warning that Triton keeps to itself, to kernels of several loops whose products add in place.
    """
    products = cubin.asm["ttgir"].count("warp_group_dot ")
    return products > 0 and listing(cubin.binary, cubin.capability).count("WARPGROUP.ARRIVE") > products


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread of the kernel."""
    text = told([knobs.nvidia.cuobjdump.path, "--dump-resource-usage"], cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
