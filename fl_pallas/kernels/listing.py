"""Machine code as text, by the disassemblers that the `triton` package brings."""

from __future__ import annotations

import functools
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from triton import knobs


@functools.lru_cache(maxsize=16)
def listing(cubin: bytes, capability: int) -> str:
    """The instructions of a kernel, a line each, with their addresses; jumps go to such.

    Args:
      cubin: of one function. Kept, for the same code is looked at more than once.
      capability: compute capability it was compiled for; 90 is sm_90.
    """
    try:
        command = [knobs.nvidia.nvdisasm.path, "--no-dataflow", "--binary", f"SM{capability}"]
        return told(command, _instructions(cubin))
    except (subprocess.CalledProcessError, ValueError):  # of an architecture that nvdisasm knows in a file alone
        return told([knobs.nvidia.cuobjdump.path, "--dump-sass"], cubin)


def told(command: Sequence[str], given: bytes) -> str:
    """What a program prints about a file that has these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(given)
        return subprocess.run([*command, str(path)], check=True, capture_output=True, text=True).stdout


def _instructions(cubin: bytes) -> bytes:
    """The section of an ELF file that has the instructions.

    Raises: ValueError if it has none, or several.
    """
    (table,), (count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * n) for n in range(count)]
    start = sections[names][4]
    (found,) = (s for s in sections if cubin.startswith(b".text.", start + s[0]))
    return cubin[found[4] : found[4] + found[5]]
