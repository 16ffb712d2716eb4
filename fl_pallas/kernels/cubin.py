"""Triton IR to machine code, by the `triton` package; works without a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, ptx_get_version
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager, triton_key

from ..errors import Unsupported
from .compiler import VERSION, settings
from .compiler import compiled as compiled_here
from .listing import listing, told
from .lower import Lowered
from .processes import Ended, answer

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
      kernel: triton's own CompiledKernel.
    """

    binary: bytes
    capability: int
    registers: int
    stack: int
    shared: int
    asm: dict[str, str]
    kernel: Any = field(default=None, repr=False)


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


@functools.cache
def hashing() -> Future[str]:
    """Triton's hash of its own files, which it looks kernels up by: 0.3 s, begun here, in another process.

    A thread would read them a megabyte at a time, and wait for its turn at Python after each.
    """
    return ThreadPoolExecutor(1).submit(_hash)


def _hash() -> str:
    try:
        return answer({})["key"]
    except (OSError, Ended):
        return triton_key()


# A thread does not live on in a forked process.
os.register_at_fork(after_in_child=hashing.cache_clear)


def compile_kernel(lowered: Lowered, capability: int) -> Any:
    """Compile Triton IR to triton's own CompiledKernel (launchable where there is a GPU), in another process.

    Raises: Unsupported, with the compiler's words.
    """
    options = {"num_warps": lowered.warps, "num_stages": lowered.stages, "enable_fp_fusion": True}
    if lowered.registers:
        options["maxnreg"] = lowered.registers
    if lowered.newest:
        # Kernels of the one ptxas and of the other are told apart by it, in Triton's cache too.
        major, minor = newest_ptx()
        options["ptx_version"] = 10 * major + minor
    with _file(lowered) as path:
        asked = {"path": path, "capability": capability, "options": options}
        asked |= {"settings": settings(), "newest": lowered.newest}
        kept = _elsewhere({**asked, "key": hashing().result(), "cache": str(knobs.cache.dir)}, lowered.name)
        if kept is not None and (kernel := kept_kernel(kept)) is not None:
            return kernel
        if lowered.newest:
            raise _refusal(lowered.name, capability, "the user's own kernels would be assembled by another ptxas")
        try:
            return compiled_here(path, capability, options)
        except Exception as e:  # LLVM, ptxas and MLIR each have their own
            raise _refusal(lowered.name, capability, e) from e


def _elsewhere(asked: dict[str, Any], name: str) -> dict[str, str] | None:
    """Where Triton's cache keeps a kernel, once a process has compiled it; None if none can be started, or was under
    other settings.

    Raises: Unsupported.
    """
    try:
        found = answer(asked)
    except OSError:
        return None
    except Ended as e:
        raise _refusal(name, asked["capability"], "its process ends") from e
    if "error" in found:
        raise _refusal(name, asked["capability"], found["error"])
    return found or None


def _refusal(name: str, capability: int, why: object) -> Unsupported:
    return Unsupported(name, f"Triton cannot compile it for sm_{capability}: {why}")


def kept_kernel(address: dict[str, str]) -> Any | None:
    """The CompiledKernel that Triton's cache keeps there; None if it is gone.

    `triton.compile` would find it too, once it has hashed Triton's own files, which the version of `fl_pallas.cache`
    stands for here.
    """
    group = get_cache_manager(address["hash"]).get_group(address["name"])
    if not group or address["name"] not in group or not any(name.endswith(".cubin") for name in group):
        return None
    with contextlib.suppress(OSError):
        os.utime(group[address["name"]])  # what was used last is removed last
    return CompiledKernel(None, group, address["hash"])


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
    return Cubin(binary, capability, registers, stack, kernel.metadata.shared, texts, kernel)


def check(cubin: Cubin, name: str) -> None:
    """Looks for what ptxas is known to get wrong.

    Args:
      name: of the kernel.

    Raises: Unsupported for code that would compute something else.
    """
    ptx = cubin.asm["ptx"]
    suspect = "s16x2" in ptx or "wgmma" in ptx and _version(ptx) < SOUND
    if (
        suspect
        and is_miscompiled(listing(cubin.binary, cubin.capability))
        or any(steady := steady_operands(ptx))
        and loses_operand(listing(cubin.binary, cubin.capability), steady)
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


# The upper half of a 64-bit sum, in uniform registers or in those of a thread, which takes the carry of the lower one;
# a register that becomes 0.
_UPPER = re.compile(r"IADD3\.X U?R\d+, (U?R\d+)(?:\.reuse)?, (-?0x[0-9a-f]+), U?RZ, U?P\d, !U?PT")
_ZERO = re.compile(r"\*/\s+(?:U?MOV (U?R\d+), U?RZ|IMAD\.MOV\.U32 (R\d+), RZ, RZ, RZ|CS2R\S* (R\d+), SRZ) ")
_WRITTEN = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+) (U?R)(\d+)")
# A sum of pairs of 16-bit numbers that has lost its constant.
_NOTHING_ADDED = re.compile(r"VIADD\.16x2 \S+ \S+ (?:(?:0x)?0|RZ) ;")


def is_miscompiled(sass: str) -> bool:
    """Whether the upper half of a descriptor is not what it should be, or a sum of 16-bit pairs adds nothing.

    A descriptor of a matrix in shared memory is an address, zero extended, and constants in the upper half. ptxas of
    CUDA 12.8, which Triton 3.6 brings, takes the address from a register that has something else, and the upper half
    from it or from its neighbour (where the matrix begins where that of another product did, or a pointer was in the
    registers before); that of 12.9 does not. The product then reads elsewhere, or outside of shared memory. The second
    is done by all of 12.8 to 13.0 where one of the pair is not used.
    """
    if _NOTHING_ADDED.search(sass):
        return True
    zero: set[str] = set()
    for line in sass.splitlines():
        if (upper := _UPPER.search(line)) and _is_of_descriptor(int(upper[2], 16)) and upper[1] not in zero:
            return True
        if written := _WRITTEN.search(line):
            changed = {f"{written[2]}{int(written[3]) + n}" for n in range(_width(written[1]))}
            zero = zero | changed if _ZERO.search(line) else zero - changed
    return False


def _is_of_descriptor(upper: int) -> bool:
    """Whether a constant is the upper half of a descriptor: how rows are interleaved in the first two bits, and how far
    apart eight of them are in the last 14."""
    return upper & 0xC0000000 != 0 and upper & 0x3FFF0000 == 0


# Of PTX: an instruction's results; a matrix instruction and its operand in registers; labels, jumps, ends.
_RESULTS = re.compile(r"\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)")
_BY_REGISTERS = re.compile(r"\s*wgmma\.mma_async\S*\s+\{[^}]*\}, \{([^}]*)\}")
_LABEL = re.compile(r"(\$L__BB\w+):")
_JUMP = re.compile(r"(@\S+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+)")
_END = re.compile(r"^\s*ret;")
# The same of machine code, by addresses; a copy of a register, or zeros; columns of a matrix instruction's result.
_RESULT = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+) (?:P\w, )?R(\d+)")
_TAKEN = re.compile(r"HGMMA\S* R\d+, R(\d+)")
_ADDRESS = re.compile(r"/\*([0-9a-f]{4,})\*/")
_BRANCH = re.compile(r"\*/\s+(@\S+ )?BRA\S* (?:U?P\w+, )?0x([0-9a-f]+)")
_EXIT = re.compile(r"\*/\s+EXIT")
_COPY = re.compile(r"\*/\s+(?:(?:MOV|IMAD\.MOV\.U32) R\d+, (?:RZ, RZ, )?R[\dZ]+|CS2R(?:\.32)? R\d+, SRZ)")
_COLUMNS = re.compile(r"HGMMA\.64x(\d+)x")


def steady_operands(ptx: str) -> list[bool]:
    """Of each matrix instruction that takes an operand in registers: whether a loop comes to it again without writing
    them."""
    lines = ptx.splitlines()
    labels = {m[1]: n for n, line in enumerate(lines) if (m := _LABEL.match(line))}
    after = _successors(lines, _JUMP, _END, labels.__getitem__)
    writing: dict[str, set[int]] = {}
    for n, line in enumerate(lines):
        for register in re.findall(r"%\w+", m[1]) if (m := _RESULTS.match(line)) else ():
            writing.setdefault(register, set()).add(n)
    found = []
    for n, line in enumerate(lines):
        if m := _BY_REGISTERS.match(line):
            written = set().union(*(writing.get(r, ()) for r in re.findall(r"%\w+", m[1])))
            found.append(n in _reached(n, after, written))
    return found


def loses_operand(sass: str, steady: Sequence[bool]) -> bool:
    """Whether a matrix instruction takes registers that a loop should not write, and does.

    ptxas (12.8, 12.9) may not keep the registers of an operand that is the same in a whole loop: from the second
    iteration on it is whatever they were used for.

    Args:
      steady: `steady_operands` of the PTX, whose order of matrix instructions ptxas keeps.
    """
    lines = [(int(m[1], 16), line) for line in sass.splitlines() if (m := _ADDRESS.search(line))]
    places = {at: n for n, (at, _) in enumerate(lines)}
    after = _successors([line for _, line in lines], _BRANCH, _EXIT, lambda at: places[int(at, 16)])
    before: list[list[int]] = [[] for _ in lines]
    for n, following in enumerate(after):
        for m in following:
            before[m].append(n)
    products = [(n, int(m[1])) for n, (_, line) in enumerate(lines) if (m := _TAKEN.search(line))]
    if len(products) != len(steady):
        return True
    for (n, register), is_steady in zip(products, steady, strict=True):
        if is_steady:
            taken = {*range(register, register + 4)}
            writing = {k for k, (_, line) in enumerate(lines) if not taken.isdisjoint(_written(line))}
            last = _reached(n, before, writing, into=True) & writing
            if any(not _COPY.search(lines[k][1]) for k in last & _reached(n, after, set())):
                return True
    return False


def _successors(
    lines: Sequence[str], jump: re.Pattern[str], end: re.Pattern[str], place: Callable[[str], int]
) -> list[list[int]]:
    """The places that each line goes on to, by what a jump looks like (its condition, and where to) and an end."""
    after = []
    for n, line in enumerate(lines):
        found = jump.search(line)
        goes_on = n + 1 < len(lines) and not end.search(line) and (found is None or found[1])
        after.append([*([n + 1] if goes_on else []), *([place(found[2])] if found else [])])
    return after


def _reached(start: int, after: Sequence[Sequence[int]], without: Set[int], into: bool = False) -> set[int]:
    """Where one comes to from a place, itself if one comes back, not beyond some places; or `into` them either."""
    found: set[int] = set()
    waiting = [start]
    while waiting:
        for n in after[waiting.pop()]:
            if n not in found and (into or n not in without):
                found.add(n)
                if n not in without:
                    waiting.append(n)
    return found


def _written(line: str) -> range:
    """Numbers of the registers of a thread that an instruction writes."""
    m = _RESULT.search(line)
    if m is None:
        return range(0)
    columns = _COLUMNS.match(m[1])
    return range(int(m[2]), int(m[2]) + (int(columns[1]) // 2 if columns else _width(m[1])))


def _width(op: str) -> int:
    """How many registers an instruction writes, at most."""
    if "GMMA" in op:
        return 256
    if ".128" in op or "MMA" in op or "LDSM" in op:
        return 4
    return 2 if ".64" in op or ".WIDE" in op or op == "CS2R" else 1


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread of the kernel."""
    text = told([knobs.nvidia.cuobjdump.path, "--dump-resource-usage"], cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
