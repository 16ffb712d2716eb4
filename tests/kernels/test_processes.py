"""Kernels are compiled in processes of their own: as here, and whatever becomes of those."""

from __future__ import annotations

import copy
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from triton import knobs

from fl_pallas.bridge.dlpack import matmul_precision
from fl_pallas.errors import Unsupported
from fl_pallas.kernels import cubin, processes
from fl_pallas.kernels.chosen import as_chosen, environment
from fl_pallas.kernels.compiler import compiled
from fl_pallas.kernels.cubin import compile_kernel, kept_kernel
from fl_pallas.kernels.fit import fitting
from fl_pallas.kernels.listing import listing
from fl_pallas.kernels.lower import Lowered, lower
from fl_pallas.kernels.lowering import Lowering
from fl_pallas.schedule.plan import KernelPlan, expressions, fingerprint
from tests.kernels.test_sizes import kernel


@pytest.fixture
def lowered() -> Lowered:
    k = kernel("vanilla", 128)
    return lower(k.plan, k.operands, matmul_precision(False), k.outputs, k.sizes)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The kernels that this process compiled itself; nothing was compiled before, and no process runs."""
    found: list[str] = []
    monkeypatch.setattr(cubin, "compiled_here", lambda path, *a: found.append(path) or compiled(path, *a))
    processes._pool.end()
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield found
    processes._pool.end()


def test_as_here(lowered: Lowered, here: list[str], tmp_path: Path) -> None:
    """Several at once give the code that this process would."""
    warps = (2, 4, 8)
    with ThreadPoolExecutor() as threads:
        made = [*threads.map(lambda n: compile_kernel(replace(lowered, warps=n), 90), warps)]
    assert not here
    knobs.cache.dir = str(tmp_path / "another")
    for n, found in zip(warps, made, strict=True):
        with cubin._file(lowered) as path:
            own = compiled(path, 90, {"num_warps": n, "num_stages": lowered.stages, "enable_fp_fusion": True})
        # The path of the file it was made from is somewhere in it, and its hash among the metadata.
        assert listing(own.asm["cubin"], 90) == listing(found.asm["cubin"], 90)
        assert own.metadata._replace(hash="") == found.metadata._replace(hash="")


def test_a_plan_is_written_down_and_compiled_elsewhere(lowered: Lowered, here: list[str]) -> None:
    """All of it: this process looks up what it will load. What cannot be sent is done here, but for the compilers."""
    k = kernel("vanilla", 128)
    lower = Lowering(k, (16,) * len(k.operands), 90, matmul_precision(False))
    written: list[KernelPlan] = []

    def lower_here(plan: KernelPlan) -> Lowered:
        written.append(plan)
        return lower(plan)

    (made,), met = fitting(k.plan, lower, 90), list[tuple[int, ...]]()
    assert not written and not here and kept_kernel(made.cubin.address).asm["cubin"] == made.cubin.binary
    (own,) = fitting(k.plan, lower_here, 90, 1, lambda *arguments: met.append(arguments))
    assert written and not here and met == [own.lowered.arguments]
    assert own.lowered == made.lowered and listing(own.cubin.binary, 90) == listing(made.cubin.binary, 90)


def test_expressions_are_the_same_in_another_process() -> None:
    """They are told apart by identity: what is sent back is this process's own."""
    plan = kernel("vanilla", 128).plan
    sent = processes.elsewhere(copy.copy, plan)
    assert fingerprint(sent) == fingerprint(plan)
    assert all(a is b for a, b in zip(expressions(sent), expressions(plan), strict=True))


def test_its_words(lowered: Lowered, here: list[str]) -> None:
    with pytest.raises(Unsupported, match="num_warps must be"):
        compile_kernel(replace(lowered, warps=3), 90)
    assert compile_kernel(lowered, 90).asm["cubin"] and not here


def test_what_inductor_says_of_triton_is_not_for_us(
    lowered: Lowered, here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it compiles, it puts PyTorch's ptxas into the environment, and its own folder of Triton's files."""
    own, folder = knobs.nvidia.ptxas.path, str(tmp_path)
    compile_kernel(lowered, 90)
    (tmp_path / "ptxas").symlink_to(own)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor"))
    assert knobs.nvidia.ptxas.path != own
    with as_chosen():
        assert knobs.nvidia.ptxas.path == own and knobs.cache.dir == folder
    compile_kernel(replace(lowered, warps=2), 90)
    processes._pool.end()
    compile_kernel(replace(lowered, warps=8), 90)
    assert not here and not (tmp_path / "inductor").exists()


def test_a_process_that_has_ended(lowered: Lowered, here: list[str]) -> None:
    """Another is asked."""
    (first,) = {processes.elsewhere(os.getpid) for _ in range(2)}
    os.kill(first, signal.SIGKILL)
    assert processes.elsewhere(os.getpid) != first
    assert compile_kernel(lowered, 90).asm["cubin"] and not here


def test_a_compiler_that_ends_its_process(
    lowered: Lowered, here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A choice that makes LLVM or MLIR abort is refused, and ends no process of the user's."""
    program = tmp_path / "aborts.py"
    program.write_text("import os; os.abort()")
    assert processes.elsewhere(os.getpid) != os.getpid()
    processes._pool.end()
    with monkeypatch.context() as patch:
        patch.setattr(processes.worker, "__file__", str(program))
        with pytest.raises(Unsupported, match="its process ends"):
            compile_kernel(lowered, 90)
    assert compile_kernel(lowered, 90).asm["cubin"] and not here


def test_other_settings(lowered: Lowered, here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user set since then, a process does not know."""
    processes.begin()
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert compile_kernel(lowered, 90).asm["cubin"] and len(here) == 1


def test_none_can_be_started(lowered: Lowered, here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError("no processes here")

    with monkeypatch.context() as patch:
        patch.setattr(processes._Pool, "_start", refused)
        processes.begin()
        with pytest.raises(processes.Nowhere):
            processes.elsewhere(os.getpid)
        assert processes.call(os.getpid) == os.getpid()
        assert compile_kernel(lowered, 90).asm["cubin"] and len(here) == 1


@pytest.mark.parametrize("program", ["import nothing_of_that_name", "raise SystemExit"])
def test_none_works(
    lowered: Lowered, here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    """Where Triton is imported otherwise than by `sys.path`, say: it is compiled here."""
    path = tmp_path / "fails.py"
    path.write_text(program)
    monkeypatch.setattr(processes, "_pool", processes._Pool())
    monkeypatch.setattr(processes.worker, "__file__", str(path))
    assert compile_kernel(lowered, 90).asm["cubin"] and len(here) == 1


def test_a_program_that_python_is_a_part_of_is_not_started(
    lowered: Lowered, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/an_application")
    monkeypatch.setattr(processes, "_pool", processes._Pool())
    assert compile_kernel(lowered, 90).asm["cubin"] and len(here) == 1


def test_threads_that_ask_at_once_are_answered_side_by_side() -> None:
    """By processes that one program forks; more wait."""
    count = processes.SIDE_BY_SIDE + 1
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(processes.elsewhere, subprocess.getoutput, "sleep 1; echo $PPID") for _ in range(count)]
    found = {a.result() for a in asked}
    assert len(found) == processes.SIDE_BY_SIDE and str(os.getpid()) not in found


def test_they_end_with_those_that_ask() -> None:
    """Those that are killed, too: the program that forks ends when its sockets do."""
    code = """
import os, signal
from fl_pallas.kernels import processes
print(processes.elsewhere(os.getppid), flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()) as asks:
        assert asks.stdin is not None and asks.stdout is not None
        program = os.pidfd_open(int(asks.stdout.readline()))
        asks.stdin.write("\n")
        asks.stdin.flush()
        assert asks.wait() == -signal.SIGKILL
    assert select.select([program], [], [])[0]  # it has ended
    os.close(program)
