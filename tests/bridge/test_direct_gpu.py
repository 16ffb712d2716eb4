"""The direct road on a GPU: right results, PyTorch's stream and memory, CUDA graphs."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.bridge.launch import DirectKernel, Family, unavailable
from fl_pallas.schedule.passes import visits
from tests.direct import compile_with
from tests.masked import attention
from tests.oracle import run_and_check
from tests.programs import BY_NAME, Case

pytestmark = pytest.mark.gpu

CASES = (
    "vanilla", "causal_where", "sdpa_gqa", "offset_slices", "packed_qkv", "head_dim_24", "sdpa_bool_mask", "dense_bias",
    "document_causal", "padding_lengths", "chunked", "differential_paper", "evoformer_row", "max_plus", "ipa",
)  # fmt: skip


def direct(case: Case, dtype: torch.dtype):
    target = case.target(dtype, "cuda")
    return target, compile_with(DirectKernel, target)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


def qkv(seq: int = 512, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, 4, seq, d, device="cuda", dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seq", [257, 1024])
@pytest.mark.parametrize("name", CASES)
def test_right(name: str, seq: int, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    target, compiled = direct(case, dtype)
    inputs = case.make_inputs(seq, dtype, "cuda")
    before = [t.clone() for t in inputs]
    with torch.no_grad():
        run_and_check(target, compiled, inputs, name=name)
    for t, b in zip(inputs, before, strict=True):
        assert torch.equal(t, b), "an input was written to"


LAYOUTS = {
    "across": lambda t: t.mT.contiguous().mT,
    "interleaved": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seq", [17, 100, 257, 1024])
@pytest.mark.parametrize("d", [16, 24, 32, 64, 80, 128])
def test_operands_that_are_not_contiguous_along_the_head_dimension(d: int, seq: int, layout: str) -> None:
    """Each of three, then all; which ptxas of CUDA 12.8 miscompiles for some sizes."""
    for which in ("0", "1", "2", "012"):
        inputs = [LAYOUTS[layout](t) if str(n) in which else t for n, t in enumerate(qkv(seq, d))]
        with torch.no_grad():
            run_and_check(softmax_attention, compile_with(DirectKernel, softmax_attention), inputs)


def test_a_kernel_waits_for_its_stream() -> None:
    """Operands made late on a side stream are there when the kernel reads them; nothing synchronises."""
    compiled = compile_with(DirectKernel, softmax_attention)
    q, k, v = qkv()
    compiled(q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = [torch.zeros_like(t) for t in (q, k, v)]
        torch.cuda._sleep(200_000_000)
        for t, source in zip(late, (q, k, v), strict=True):
            t.copy_(source)
        out = compiled(*late)
        assert not side.query(), "the launch waited for the GPU"
    side.synchronize()
    torch.testing.assert_close(out, softmax_attention(q, k, v), rtol=2e-2, atol=2e-2)


def test_cuda_graph() -> None:
    compiled = compile_with(DirectKernel, softmax_attention)
    q, k, v = qkv()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compiled(q, k, v)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(q, k, v)
    for _ in range(2):
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, softmax_attention(q, k, v), rtol=2e-2, atol=2e-2)


def test_cuda_graph_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of what a mask leaves are not made again by a graph, and outlive the function that it was recorded of."""
    monkeypatch.setattr(visits, "LAUNCH", 0)
    fn = attention(lambda i, j: (j <= i) & ((j < 4) | (i - j < 70)))
    compiled = fl.compile(fn)
    q, k, v = qkv(1024)
    assert any(loop.visits for kernel in fl.explain(fn, q, k, v).kernels for loop in kernel.loops)
    with torch.no_grad():
        for _ in range(2):
            compiled(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(q, k, v)
    del compiled
    torch.compiler.reset()
    gc.collect()
    rest = [torch.full((2**18,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]
    for t in (q, k, v):
        t.copy_(torch.randn_like(t))
    graph.replay()
    torch.testing.assert_close(out, fn(q, k, v), rtol=2e-2, atol=2e-2)
    del rest


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_operands_at_odd_addresses(shift: int) -> None:
    """The same kernel object serves aligned tensors and views that are not."""
    compiled = compile_with(DirectKernel, softmax_attention)
    q, k, v = qkv()
    for n in (0, shift, 0):
        moved = []
        for t in (q, k, v):
            room = torch.empty(t.numel() + n, device="cuda", dtype=t.dtype)
            moved.append(room[n:].view(t.shape).copy_(t))
        torch.testing.assert_close(compiled(*moved), softmax_attention(q, k, v), rtol=2e-2, atol=2e-2)


LENGTHS = (512, 1024, 300, 301, 64, 2000, 777, 129, 1000, 513)


@pytest.mark.parametrize(
    "name", ["vanilla", "causal_where", "sliding_window", "padding_lengths", "softcap", "document_causal"]
)
def test_many_lengths(name: str) -> None:
    """A kernel for the first length, and at most two more that are given theirs."""
    case = BY_NAME[name]
    family = Family()
    for seq in LENGTHS:
        inputs = case.make_inputs(seq, torch.bfloat16, "cuda")
        torch.compiler.reset()
        with torch.no_grad():
            run_and_check(case.fn, compile_with(lambda p: DirectKernel(p, family=family), case.fn), inputs, name=name)
    # Above 1024, masks on data have a kernel that looks at them.
    assert len(family.members) <= (3 if name != "document_causal" else 6)


def test_many_lengths_tuned(tmp_path: Path) -> None:
    """Threads load kernels of different arguments at once, more than once: each is launched by its own launcher."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(fl.config, "cache", str(tmp_path))
        compiled = fl.compile(softmax_attention, tune=6)
        for seq in (500, 600, 300, 1200, 257):
            run_and_check(softmax_attention, compiled, qkv(seq), name="vanilla")


def test_a_function_keeps_its_family() -> None:
    """What fl.compile built for one length serves the next, through TorchDynamo's recompilations."""
    compiled = fl.compile(softmax_attention)
    kept: list[Family] = []
    original = Family.launch

    def spy(self: Family, *args):
        kept.append(self)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Family, "launch", spy)
        for seq in (500, 600, 700, 800, 801):
            run_and_check(softmax_attention, compiled, qkv(seq), name="vanilla")
    assert len(set(map(id, kept))) == 1 and len(kept[0].members) <= 3


def test_tuning_and_the_cache(tmp_path: Path) -> None:
    """Tuned choices are right, are kept, and a second kernel takes what the first one left."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(fl.config, "cache", str(tmp_path))
        run_and_check(softmax_attention, fl.compile(softmax_attention, tune=4), qkv(), name="vanilla")
        assert fl.cache.info().entries == 1
        torch.compiler.reset()
        patch.setattr("fl_pallas.kernels.fit.fitting", None)
        patch.setattr("fl_pallas.kernels.cubin.compile_kernel", None)
        run_and_check(softmax_attention, fl.compile(softmax_attention, tune=4), qkv(), name="vanilla")
        assert fl.cache.info().entries == 1


def test_every_result_is_new() -> None:
    compiled = compile_with(DirectKernel, softmax_attention)
    q, k, v = qkv()
    first = compiled(q, k, v)
    kept = first.clone()
    second = compiled(k, q, v)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device() -> None:
    compiled = compile_with(DirectKernel, softmax_attention)
    q, k, v = qkv()
    expected = compiled(q, k, v)
    out = compiled(*(t.to("cuda:1") for t in (q, k, v)))
    assert out.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), expected.cpu())


def test_available() -> None:
    assert unavailable(torch.device("cuda")) is None


SCRIPT = """
import torch, jax
from tests.bridge.test_direct_gpu import compile_with, DirectKernel, qkv, softmax_attention
from fl_pallas.kernels.lower import _is_running
compile_with(DirectKernel, softmax_attention)(*qkv())
torch.cuda.synchronize()
assert not _is_running() and jax.config.jax_platforms is None
print(jax.default_backend())
"""


def test_jax_stays_off_the_gpu() -> None:
    """A process that takes this road alone never starts JAX's GPU backend, and may still do so itself."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if importlib.util.find_spec("jax_plugins"):
        assert done.stdout.split()[-1] == "gpu"
