"""The DLPack road: the same memory on both sides, any strides, every type; nothing is written to or freed too early."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest
import torch

from fl_pallas.bridge.dlpack import ALIGNMENT, DlpackKernel, compiler_options, flat_view, to_jax, to_torch
from fl_pallas.capture.dtypes import short_dtype
from fl_pallas.schedule.expr import Axis, index, load
from fl_pallas.schedule.plan import Choices, KernelPlan, Store
from tests.oracle import check
from tests.plan_evaluate import captured
from tests.programs import BY_NAME

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
)  # fmt: skip


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 50).to(dtype) if dtype != torch.bool else torch.rand(shape) < 0.5


def shown(t: torch.Tensor) -> torch.Tensor:
    """`t` as its spec says it lies in its flat view."""
    flat, spec = flat_view(t)
    flat = flat.view(torch.bool) if t.dtype == torch.bool else flat
    return torch.as_strided(flat, spec.shape, spec.strides, flat.storage_offset() + spec.offset)


VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "sliced": lambda x: x[1:, 2:7, 3:],
    "stepped": lambda x: x[:, ::3, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1),
    "broadcast scalar": lambda x: x[1, 2, 3].expand(4, 5),
    "one element": lambda x: x[2, 3, 4],
    "last": lambda x: x[-1:, -1:, -1:],
    "permuted slice": lambda x: x[1:, 1:].permute(2, 0, 1),
    "overlapping windows": lambda x: x.flatten().unfold(0, 5, 2),
    "odd offset": lambda x: x.flatten()[13:],
    "diagonal": lambda x: x[0, :8, :8].diagonal(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_flat_view_is_no_copy(view: str, dtype: torch.dtype) -> None:
    x = sample(dtype, 4, 9, 11)
    t = VIEWS[view](x)
    flat, spec = flat_view(t)
    assert flat.dim() == 1 and flat.is_contiguous()
    assert flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert flat.data_ptr() % ALIGNMENT == 0
    assert flat.data_ptr() + spec.offset * t.element_size() == t.data_ptr()
    assert len(flat) == spec.span
    end = flat.storage_offset() + len(flat)
    assert end * t.element_size() <= x.untyped_storage().nbytes(), "the view ends outside of the storage"
    assert (spec.shape, spec.strides, spec.dtype) == (tuple(t.shape), t.stride(), short_dtype(dtype))
    assert torch.equal(shown(t), t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_jax_and_back_is_no_copy(dtype: torch.dtype) -> None:
    x = sample(dtype, 6, 10)
    flat, spec = flat_view(x)
    there = to_jax(flat)
    assert there.unsafe_buffer_pointer() == flat.data_ptr() == x.data_ptr()
    assert there.shape == (60,)
    back = to_torch(there, x.shape, spec.dtype)
    assert back.data_ptr() == x.data_ptr()
    assert back.dtype == x.dtype and back.shape == x.shape
    assert torch.equal(back, x)


def test_views_reach_jax_without_a_copy() -> None:
    x = torch.randn(5, 7, 33)
    t = x[1:, 2:, 3:].transpose(0, 1)
    flat, spec = flat_view(t)
    there = to_jax(flat)
    assert there.unsafe_buffer_pointer() == flat.data_ptr()
    strided = np.lib.stride_tricks.as_strided(
        np.asarray(there)[spec.offset :], spec.shape, [4 * s for s in spec.strides]
    )
    np.testing.assert_array_equal(strided, t.numpy())


@pytest.mark.parametrize("shift", [4, 12, 60])
def test_unaligned_storage_is_copied_right(shift: int) -> None:
    """Memory that JAX would not take as it is: the one copy, and the caller's memory stays as it was."""
    buffer = bytearray(np.arange(200, dtype=np.float32).tobytes())
    base = torch.frombuffer(buffer, dtype=torch.float32)
    start = next(k for k in range(16) if (base.data_ptr() + 4 * k) % ALIGNMENT == shift)
    x = torch.frombuffer(buffer, dtype=torch.float32, offset=4 * start, count=48).view(6, 8)
    assert x.data_ptr() % ALIGNMENT == shift
    for t in (x, x.T, x[1:, 2:]):
        flat, spec = flat_view(t)
        assert flat.data_ptr() % ALIGNMENT == 0
        assert spec.shape == tuple(t.shape)
        assert torch.equal(shown(t), t)
        assert to_jax(flat).unsafe_buffer_pointer() == flat.data_ptr()


def test_a_parameter_is_taken_without_its_graph() -> None:
    p = torch.nn.Parameter(torch.randn(4, 4))
    flat, _ = flat_view(p)
    assert not flat.requires_grad and flat.data_ptr() == p.data_ptr()


def test_a_result_keeps_its_memory_alive() -> None:
    x = torch.randn(1000)
    kept = x.clone()
    there = to_jax(flat_view(x)[0])
    back = to_torch(there, (10, 100), "f32")
    del x, there
    gc.collect()
    [torch.full((1000,), float("nan")) for _ in range(50)]
    assert torch.equal(back.flatten(), kept)


# --- kernels ------------------------------------------------------------------------------------


def kernel(dtype: torch.dtype = torch.float32) -> tuple[DlpackKernel, tuple[torch.Tensor, ...]]:
    case = BY_NAME["with_lse"]
    inputs = case.make_inputs(40, dtype, "cpu")
    made = captured(case.fn, inputs)
    ((plan,),) = made.made.kernels
    run = DlpackKernel(plan, interpret=True)
    return run, tuple(made.tensors[name] for name in run.names)


def test_inputs_stay_and_outputs_are_fresh() -> None:
    run, inputs = kernel()
    before = [x.clone() for x in inputs]
    versions = [x._version for x in inputs]
    first, again = run(inputs), run(inputs)
    assert all(torch.equal(x, kept) for x, kept in zip(inputs, before, strict=True))
    assert [x._version for x in inputs] == versions
    owners = [t.untyped_storage().data_ptr() for t in (*inputs, *first, *again)]
    assert len(set(owners)) == len(owners), "outputs share memory"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_outputs_can_be_written_to() -> None:
    run, inputs = kernel()
    first = run(inputs)
    kept = [x.clone() for x in first]
    for x in first:
        x.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(run(inputs), kept, strict=True))


def test_results_outlive_inputs() -> None:
    run, inputs = kernel()
    results = run(inputs)
    kept = [x.clone() for x in results]
    del inputs
    gc.collect()
    [torch.full((1, 2, 40, 32), float("nan")) for _ in range(50)]
    assert all(torch.equal(a, b) for a, b in zip(results, kept, strict=True))


def test_temporaries_may_die_while_the_kernel_runs() -> None:
    """Operands that only the call holds: the result must not depend on when they are freed."""
    run, inputs = kernel()
    want = run(inputs)
    for _ in range(5):
        got = run([x.clone() for x in inputs])
        gc.collect()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_strides_change_nothing() -> None:
    run, inputs = kernel()
    want = run(inputs)
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in inputs]
    padded = [torch.nn.functional.pad(x, (3, 2, 1, 0))[:, :, 1:, 3:-2] for x in inputs]
    for operands in (strided, padded):
        assert not any(x.is_contiguous() for x in operands)
        got = run(operands)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_outputs_have_the_users_types(dtype: torch.dtype) -> None:
    run, inputs = kernel(dtype)
    case = BY_NAME["with_lse"]
    check(case.fn, case.make_inputs(40, dtype, "cpu"), tuple(run(inputs)))


def test_the_interpreter_stores_nothing_beside_its_tile() -> None:
    """Two tiles that reach past the end of their axes: a row's masked-out places are the next row's elements."""
    rows, cols = Axis("x0", 17), Axis("x1", 17)
    store = Store("out", (rows, cols), "f32", load("x", (index(rows), index(cols)), "f32"))
    plan = KernelPlan("k", (rows, cols), (), (), (store,), "f32", Choices(((rows, 32), (cols, 32))))
    x = torch.randn(17, 17)
    (out,) = DlpackKernel(plan, True)([x])
    assert torch.equal(out, x)


def test_xla_leaves_small_kernels_as_they_are() -> None:
    """A first call on a CPU took three times as long, and a hundred programs all of a process's memory maps."""

    def copied(rows: int) -> KernelPlan:
        axes = Axis("x0", rows), Axis("x1", 64)
        store = Store("out", axes, "f32", load("x", tuple(map(index, axes)), "f32"))
        return KernelPlan("k", axes, (), (), (store,), "f32", Choices(tuple((a, 64) for a in axes)))

    small, large = (compiler_options(copied(n)) for n in (2**20, 2**20 + 1))
    assert small.pop("xla_backend_optimization_level") == 0 and small == large


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_and_the_current_one_stays() -> None:
    run, inputs = kernel()
    on_gpu = DlpackKernel(run.plan, interpret=False)
    want = run(inputs)
    for current, own in ((0, 1), (0, 0), (1, 0)):
        with torch.cuda.device(current):
            got = on_gpu([x.to(f"cuda:{own}") for x in inputs])
            assert torch.cuda.current_device() == current
        assert {x.device for x in got} == {torch.device("cuda", own)}
        for x, kept in zip(got, want, strict=True):
            torch.testing.assert_close(x.cpu(), kept, rtol=1e-4, atol=1e-4)
