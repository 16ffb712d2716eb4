"""Machine code as text, by the disassembler that the `triton` package brings.

It takes 0.2 s to start and 0.02 s for a kernel: the kernels that wait for it at the same time are given to it at once,
and it runs several times side by side where there are processors for it.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from triton import knobs

# Bytes of an instruction, since Volta.
INSTRUCTION = 16
# Runs side by side; kernels are compiled meanwhile.
RUNS = max(1, (os.cpu_count() or 1) // 4)
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/", re.MULTILINE)


class _Disassembler:
    """Lists kernels of one architecture, all that wait in one run: a thread that finds room for another sees to it.

    Args:
      architecture: as nvdisasm calls it, "SM90".
    """

    def __init__(self, architecture: str):
        self.architecture = architecture
        self._lock = threading.Lock()
        self._waiting: list[tuple[bytes, Future[str]]] = []
        self._running = 0

    def listed(self, code: bytes) -> str:
        """The text of instructions.

        Raises: subprocess.CalledProcessError for what are none of this architecture.
        """
        own: Future[str] = Future()
        with self._lock:
            self._waiting.append((code, own))
            runs = self._running < RUNS
            self._running += runs
        while runs and (batch := self._batch()):
            self._list(batch)
        return own.result()

    def _batch(self) -> list[tuple[bytes, Future[str]]]:
        with self._lock:
            batch, self._waiting = self._waiting, []
            self._running -= not batch
            return batch

    def _list(self, batch: Sequence[tuple[bytes, Future[str]]]) -> None:
        try:
            text = self._run(b"".join(code for code, _ in batch))
        except Exception as error:
            for _, waiting in batch:
                waiting.set_exception(error)
            return
        # Where each instruction's line begins; a kernel's first line is that of its first instruction.
        lines = {int(m[1], 16): m.start() for m in _ADDRESS.finditer(text)}
        at = 0
        for code, waiting in batch:
            end = at + len(code)
            waiting.set_result(text[lines[at] : lines.get(end, len(text))])
            at = end

    def _run(self, code: bytes) -> str:
        command = [knobs.nvidia.nvdisasm.path, "--no-dataflow", "--binary", self.architecture]
        return told(command, code)


@functools.cache
def _disassembler(architecture: str) -> _Disassembler:
    return _Disassembler(architecture)


# Who waits does not live on in a forked process.
os.register_at_fork(after_in_child=_disassembler.cache_clear)


@functools.lru_cache(maxsize=16)
def listing(cubin: bytes, capability: int) -> str:
    """The instructions of a kernel, a line each, with their addresses; jumps go to such.

    Args:
      cubin: of one function. Kept, for the same code is looked at more than once.
      capability: compute capability it was compiled for; 90 is sm_90.
    """
    try:
        return _disassembler(f"SM{capability}").listed(_instructions(cubin))
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
