"""What the direct road hands to the GPU, seen without one."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas import realise
from fl_pallas.bridge import launch
from fl_pallas.bridge.launch import DirectKernel, unavailable
from fl_pallas.bridge.order import alignment
from fl_pallas.bridge.splice import RegionRunner
from fl_pallas.kernels import cubin, fit
from fl_pallas.kernels.chosen import CHOSEN
from fl_pallas.kernels.compiler import address
from fl_pallas.kernels.cubin import compile_kernel, kept_kernel
from fl_pallas.kernels.fit import fitting
from fl_pallas.kernels.launcher import starting
from fl_pallas.kernels.lower import Lowered
from fl_pallas.kernels.sizes import sizes_of
from fl_pallas.schedule.plan import KernelPlan
from tests.direct import compile_with

CPU = torch.device("cpu")


class Recorded(DirectKernel):
    """Stands on the CPU and launches nothing; it keeps what would have been loaded and launched."""

    made: list[Recorded] = []

    def __init__(self, plan: Any):
        super().__init__(plan)
        self.loads: list[Lowered] = []
        self.launches: list[tuple[Any, ...]] = []
        Recorded.made.append(self)

    def _place(self, operands: Sequence[Tensor]) -> torch.device:
        return CPU

    def _built(self, operands: Sequence[Tensor], index: int) -> Any:
        lowered = self.lowered(operands)
        self.loads.append(lowered)
        fixed = ("function", "metadata", None, None, None)
        return launch._Launch(lambda *a: self.launches.append(a), lowered.programs, fixed, None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    # TorchDynamo asks once in a process for the GPU's properties: before it is told that there is none.
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))
    starting().exception()  # Triton's driver keeps what it asks for the current device, for all that come later
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU.index)
    monkeypatch.setattr(launch, "_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_empty", lambda shape, strides, dtype: torch.empty(shape, dtype=dtype))
    return Recorded.made


@pytest.fixture
def hopper(recorded: list[Recorded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """`recorded`, where kernels are compiled for a Hopper and kept in an empty folder."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "none")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fl.config, "cache", str(tmp_path))
    return recorded


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, dim=-1) @ v


def qkv(seq: int = 200) -> list[Tensor]:
    return [torch.randn(1, 2, seq, 16, dtype=torch.bfloat16) for _ in range(3)]


def divisibility(lowered: Lowered) -> list[int]:
    return [int(n) for n in re.findall(r"tt\.divisibility = (\d+)", lowered.ttir)]


def test_launch(recorded: list[Recorded]) -> None:
    compiled = compile_with(Recorded, attention)
    inputs = qkv()
    out = compiled(*inputs)
    (kernel,) = recorded
    (call,) = kernel.launches
    grid, stream, fixed, pointers = call[:3], call[3], call[4:9], call[9:]
    assert grid == (kernel.loads[0].programs, 1, 1)
    assert stream == 7
    assert fixed == ("function", "metadata", None, None, None)
    assert sorted(pointers[:3]) == sorted(t.data_ptr() for t in inputs)
    assert pointers[3:] == (out.data_ptr(),)
    assert out.shape == inputs[0].shape and out.dtype == torch.bfloat16


def test_one_version_per_alignment(recorded: list[Recorded]) -> None:
    compiled = compile_with(Recorded, attention)
    q, k, v = qkv()
    room = torch.empty(v.numel() + 16, dtype=v.dtype)
    for shift in (0, 0, 1, 4, 8, 1):
        start = shift + (-room.data_ptr() // 2) % 8
        compiled(q, k, room[start : start + v.numel()].view(v.shape))
    (kernel,) = recorded
    assert len(kernel.launches) == 6
    assert [min(divisibility(low)) for low in kernel.loads] == [16, 2, 8]


def test_strides_are_part_of_a_version(recorded: list[Recorded]) -> None:
    compiled = compile_with(Recorded, attention)
    q, k, v = qkv()
    compiled(q, k, v)
    (kernel,) = recorded
    spread = torch.empty(1, 2, 200, 32, dtype=torch.bfloat16)
    kernel([q, k, spread[..., :16]])
    assert len(kernel.loads) == 2
    assert kernel.loads[0].ttir != kernel.loads[1].ttir


def test_versions_are_bounded(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_VERSIONS", 2)
    compile_with(Recorded, attention)(*qkv())
    (kernel,) = recorded
    for seq in (200, 201, 202, 200):
        kernel(qkv(seq))
    assert len(kernel._versions) == 2
    assert len(kernel.loads) == 4


def test_nothing_to_do(recorded: list[Recorded]) -> None:
    """A grid of no programs is neither compiled nor launched."""
    compile_with(Recorded, attention)(*qkv())
    (kernel,) = recorded
    kernel._programs = 0
    kernel._versions.clear()
    kernel._latest = None
    count = len(kernel.launches)
    assert len(kernel(qkv())) == 1
    assert len(kernel.launches) == count


def test_alignment() -> None:
    assert [alignment(p) for p in (0, 1, 2, 6, 8, 16, 24, 4096)] == [16, 1, 2, 2, 8, 16, 8, 16]


def test_refusals() -> None:
    assert "NVIDIA" in (unavailable(torch.device("cpu")) or "")
    plan = fl.explain(attention, *qkv()).kernels[0]
    with pytest.raises(fl.Unsupported, match="needs tensors on an NVIDIA GPU"):
        DirectKernel(plan)([torch.zeros(1)] * 3)


SCRIPT = """
import jax, torch
from fl_pallas.kernels.lower import _is_running
from tests.bridge.test_launch import DirectKernel, attention, qkv
from tests.direct import compile_with

class Lowering(DirectKernel):
    def __call__(self, operands):
        for _ in range(2):
            self.lowered(operands)
        return [torch.empty(s, dtype=d) for s, _, d in self._outputs]

compile_with(Lowering, attention)(*qkv())
assert not _is_running(), "lowering left JAX's backends running"
assert jax.config.jax_platforms is None
jax.numpy.ones(3)
assert _is_running()
compile_with(Lowering, attention)(*qkv(100))
assert _is_running(), "lowering ended the user's own backends"
"""


@pytest.mark.long
def test_lowering_leaves_jax_alone() -> None:
    """JAX's backends, one of which would be the GPU's, do not start; and if they run, they stay."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


class Compiled(Recorded):
    """Compiles for a GPU of its own, and loads nothing."""

    def _built(self, operands: Sequence[Tensor], index: int) -> Any:
        return DirectKernel._built(self, operands, index)

    def _load(self, lowered: Lowered, kernel: Any, index: int) -> Any:
        self.loads.append(lowered)
        return launch._Launch(lambda *a: self.launches.append(a), lowered.programs, (), kernel)


def test_what_is_kept_is_not_compiled(hopper: list[Recorded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither lowered nor compiled; compiled again where its code is gone."""
    monkeypatch.setitem(CHOSEN, "TRITON_CACHE_DIR", None)
    counted: list[KernelPlan | Lowered] = []
    monkeypatch.setattr(fit, "fitting", lambda *a: counted.append(a[0]) or fitting(*a))
    monkeypatch.setattr(cubin, "compile_kernel", lambda *a: counted.append(a[0]) or compile_kernel(*a))
    inputs = qkv()

    def built() -> Any:
        compile_with(Compiled, attention)(*inputs)
        kernel = Recorded.made[-1]
        assert len(kernel.loads) == 1
        return kernel, kernel.family.members[0].launch.kernel

    first, code = built()
    assert len(counted) == 1
    again, kept = built()
    assert len(counted) == 1
    assert again.loads == first.loads and kept.asm == code.asm and kept.metadata == code.metadata
    (path,) = tmp_path.rglob("*.cubin")
    path.unlink()
    assert kept_kernel(address(code)) is None
    shutil.rmtree(path.parent)
    again, made = built()
    assert len(counted) == 2 and made.metadata == code.metadata
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    built()
    assert len(counted) > 2, "Triton's settings are part of the key"


def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Three kernels: what rows are divided by, the sums of columns, and the results."""
    p = torch.softmax(q @ k.mT, dim=-1)
    return p @ v, (p / p.sum(-2, keepdim=True)) @ v


def test_kernels_of_a_region_are_compiled_side_by_side(hopper: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first of them is launched, and each once."""
    happened: list[str] = []
    waiting = threading.Barrier(3)

    def fitted(plan: KernelPlan, *rest: Any) -> Any:
        waiting.wait(60)  # for the others
        happened.append("compiled")
        return fitting(plan, *rest)

    monkeypatch.setattr(fit, "fitting", fitted)
    loaded = Compiled._load
    monkeypatch.setattr(Compiled, "_load", lambda *a: happened.append("loaded") or loaded(*a))
    compile_with(Compiled, twice)(*qkv())
    assert len(hopper) == 3 and happened == ["compiled"] * 3 + ["loaded"] * 3
    assert not any(kernel.family.fitted for kernel in hopper), "what was compiled has been taken"


def two_layers(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return attention(torch.tanh(attention(q, k, v) @ w), k, v)


@pytest.mark.long
def test_kernels_of_both_passes_are_compiled_by_the_first_call(
    hopper: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all regions, for what the graphs know of what each will be given."""
    monkeypatch.setattr(realise, "_launcher", lambda plan, *_: Compiled(plan))
    compiled: list[str] = []
    monkeypatch.setattr(fit, "fitting", lambda plan, *rest: compiled.append(plan.name) or fitting(plan, *rest))
    q, k, v = (t.requires_grad_() for t in qkv())
    out = fl.compile(two_layers)(q, k, v, torch.randn(16, 16, dtype=torch.bfloat16))
    assert sum(bool(kernel.launches) for kernel in hopper) == 2
    assert len(compiled) == len(hopper) > 4
    out.sum().backward()
    assert len(compiled) == len(hopper) and all(kernel.launches for kernel in hopper)


@pytest.mark.long
def test_kernels_are_begun_once_both_passes_are_planned(
    hopper: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch compiles the rest meanwhile; the first call of a region waits for what was begun."""
    monkeypatch.setattr(realise, "_launcher", lambda plan, *_: Compiled(plan))
    begun, called, done = threading.Event(), threading.Event(), list[str]()

    def fitted(plan: KernelPlan, *rest: Any) -> Any:
        begun.set()
        assert called.wait(60)
        made = fitting(plan, *rest)
        done.append(plan.name)
        return made

    def first(runner: RegionRunner, tensors: Sequence[Tensor]) -> Any:
        assert begun.wait(60)
        called.set()
        return run_first(runner, tensors)

    run_first = RegionRunner._first
    monkeypatch.setattr(RegionRunner, "_first", first)
    monkeypatch.setattr(fit, "fitting", fitted)
    fl.compile(attention)(*(t.requires_grad_() for t in qkv())).sum().backward()
    assert len(done) == len(hopper) > 2


@pytest.mark.long
def test_short_loops_of_many_lengths_take_a_narrow_tile(
    hopper: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is level at the length that is met, what loses least at others."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(launch, "_given", lambda found, many, own, index: (found, sizes_of(many, own))[0])
    monkeypatch.setattr(launch, "fastest", lambda runs: 0)
    monkeypatch.setattr(launch, "level", lambda runs, within: [*range(len(runs))])
    family = launch.Family()

    def kernel(plan: KernelPlan) -> Compiled:
        made = Compiled(plan)
        made.family, made.tune = family, 6
        return made

    for seq in (200, 260):
        torch.compiler.reset()
        compile_with(kernel, attention)(*qkv(seq))
    first, general = (member.laid.plan for member in family.members)
    sides = [math.prod(n for _, n in c.tiles) for c in (first.choices, general.choices)]
    assert family.members[1].laid.sizes and sides[1] < sides[0]
