"""One kernel for many sizes, run by Pallas's interpreter: it does what the kernel made for each size does."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fl_pallas.bridge import launch
from fl_pallas.bridge.dlpack import matmul_precision
from fl_pallas.kernels.fit import SPILL, fitting
from fl_pallas.kernels.lower import Lowered, lower
from fl_pallas.kernels.sizes import Laid, Mismatch, generalise, laid, opened, programs_of, sizes_of
from fl_pallas.kernels.tile import seen
from fl_pallas.kernels.triton import TensorSpec, contiguous, pallas_function
from fl_pallas.schedule.expr import reductions
from fl_pallas.schedule.passes import long_lists, visits
from fl_pallas.schedule.plan import KernelPlan, operand_names
from tests.masked import Mask, attention
from tests.plan_evaluate import captured
from tests.programs import BY_NAME

CASES = (
    "vanilla causal_where sliding_window padding_lengths softcap document_causal alibi gqa_repeat dense_bias "
    "with_entropy retention max_times two_softmax_mixture gqa_grouped"
).split()


@functools.cache
def kernels(name: str, seq: int, dtype: torch.dtype = torch.float32) -> list[Laid]:
    """The kernels of a case at this length, its operands freshly allocated."""
    case = BY_NAME[name]
    return kernels_of(case.target(dtype, "cpu"), case.make_inputs(seq, dtype, "cpu"))


def kernels_of(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[Laid]:
    """The kernels of a function for inputs of these lengths."""
    torch.compiler.reset()  # or a graph of several lengths is captured
    made = captured(fn, inputs).made
    plans = made.kernels[0]
    known = {v.name: (v.shape, v.dtype) for v in made.program.values}
    known |= {s.name: (s.shape, s.dtype) for p in plans for s in p.stores}
    return [laid(p, tuple(contiguous(*known[n]) for n in operand_names(p))) for p in plans]


def kernel(name: str, seq: int, dtype: torch.dtype = torch.float32) -> Laid:
    """The first of them."""
    return kernels(name, seq, dtype)[0]


@functools.cache
def general(name: str) -> Laid:
    return generalise(kernel(name, 128), kernel(name, 300))


def data(specs: tuple[TensorSpec, ...]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    out = []
    for s in specs:
        n = math.prod(map(seen, s.shape))
        whole = not jnp.issubdtype(s.stored, jnp.floating)
        out.append(jnp.asarray(random.integers(0, 2, n) if whole else random.standard_normal(n), s.stored))
    return out


def alone(own: Laid) -> list[np.ndarray]:
    """The outputs of a kernel on random operands, flat."""
    with jax.enable_x64(True):
        function = pallas_function(own.plan, own.operands, matmul_precision(True), True)
        return [np.asarray(x) for x in function(*data(own.operands))]


def by(many: Laid, own: Laid) -> list[np.ndarray]:
    """The same by `many`, whose arrays are as long as its hints: no shorter."""
    with jax.enable_x64(True):
        sizes = jnp.asarray(sizes_of(many, own), jnp.int32)
        function = pallas_function(
            many.plan, many.operands, matmul_precision(True), True, many.outputs, many.sizes, programs_of(many, own)
        )
        padded = [jnp.pad(x, (0, max(0, s.span - x.size))) for x, s in zip(data(own.operands), many.operands)]
        found = [np.asarray(x) for x in function(sizes, *padded)]
    return [x[: math.prod(map(seen, s.shape))] for x, s in zip(found, own.outputs)]


@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name: str) -> None:
    many = general(name)
    assert many.sizes
    for seq in (300, 76):
        own = kernel(name, seq)
        for got, want in zip(by(many, own), alone(own), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_three_lengths_need_one_kernel() -> None:
    lengths, bf16 = (128, 300, 129, 517, 2000), torch.bfloat16
    many = generalise(*(kernel("causal_where", n, bf16) for n in lengths[:2]))
    assert tuple(sizes_of(many, kernel("causal_where", n, bf16))[0] for n in lengths) == lengths


def test_reductions_of_one_extent_over_what_differs() -> None:
    """Of 1024 tokens, that is: 16 granules, and 16 features."""
    first, other = ([k for k in kernels("document_causal", n) if not k.plan.minor][0] for n in (1024, 1500))
    many = generalise(first, other)
    for own in (first, other):
        for got, want in zip(by(many, own), alone(own), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_minor_kernel_serves_all_lengths_from_the_start() -> None:
    """The summaries of a document mask, whose bounds another kernel reads."""
    first = kernel("document_causal", 1500)
    assert first.plan.minor
    many = opened(first)
    for seq in (1500, 1031):
        own = kernel("document_causal", seq)
        for got, want in zip(by(many, own), alone(own), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("lengths", [(1500, 1033, 1800, 1280), (1024, 1033, 1800, 1280)])
def test_three_kernels_for_documents_of_any_length(lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that summarises, one for the first length, one for all others; of 1024 tokens as many granules as features,
    and as many as a tile of those has."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_given", lambda found, many, own, index: (found, sizes_of(many, own))[0])
    family, built = launch.Family(), []

    def build(made: Laid) -> Any:
        built.append(made.plan.name)
        return launch._Launch(lambda *_: None, 1, (), None), made.plan.choices

    for seq in lengths:
        for own in kernels("document_causal", seq):
            family.launch((), own, build, 0)
    assert sorted(built) == ["r0_k0", "r0_k0", "r0_k0_tiles"]


SINKS: Mask = lambda i, j: (j <= i) & ((j < 4) | (i - j < 70))  # noqa: E731
ENDS: Mask = lambda i, j: ((i // 16 - j // 16).abs() <= 1) | (j < 16) | (i < 16)  # noqa: E731


@pytest.mark.parametrize("mask", [SINKS, ENDS])
def test_one_kernel_for_lists_of_any_length(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kernel, those that make lists too: one for all lengths, or one for the first and one for all others."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_given", lambda found, many, own, index: (found, sizes_of(many, own))[0])
    monkeypatch.setattr(visits, "LAUNCH", 0)
    monkeypatch.setattr(long_lists, "LAUNCH", 0)
    monkeypatch.setattr(long_lists, "_resident", lambda plan, target: 8)
    family, built = launch.Family(), Counter[str]()
    every = []

    def build(made: Laid) -> Any:
        built[made.plan.name] += 1
        return launch._Launch(lambda *_: None, 1, (), None), made.plan.choices

    for seq in (1504, 1032, 1800, 1288, 2000):
        every = kernels_of(attention(mask), [torch.randn(1, 1, seq, 16) for _ in range(3)])
        for own in every:
            family.launch((), own, build, 0)
    assert built["r0_k0_v0_kinds"] and set(built) == {own.plan.name for own in every}
    assert max(built.values()) <= 2 and all(built[own.plan.name] == 1 for own in every if own.plan.minor)


def test_lists_of_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that make lists do the same for lengths that they were not made for."""
    monkeypatch.setattr(visits, "LAUNCH", 0)
    first, other = (kernels_of(attention(SINKS), [torch.randn(1, 1, n, 16) for _ in range(3)]) for n in (1504, 1032))
    for made, own in zip(first, other, strict=True):
        if own.plan.minor:
            for got, want in zip(by(opened(made), own), alone(own), strict=True):
                np.testing.assert_array_equal(got, want, err_msg=own.plan.name)


@pytest.mark.long
def test_short_loops_have_a_choice_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel that serves long ones too."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "_given", lambda found, many, own, index: (found, sizes_of(many, own))[0])
    family, built = launch.Family(), []

    def build(made: Laid) -> Any:
        built.append(made)
        return launch._Launch(lambda *_: None, len(built), (), None), made.plan.choices

    def of(length: int) -> Laid:
        return kernel("vanilla", length, torch.bfloat16)

    taken = [family.launch((), of(n), build, 0).programs for n in (1500, 1800, 300, 2000, 500, 513)]
    assert taken == [1, 2, 3, 2, 3, 2] and built[1] is built[2]
    assert family.missing((), of(400)) is None


def test_an_axis_taken_whole_has_room_for_more_than_was_seen() -> None:
    """And no more than it may need, for each program looks at all of it."""
    many = generalise(*(kernels("document_causal", n)[1] for n in (1500, 1033)))
    bound = many.plan.loops[0].lower
    assert bound is not None
    (axis,) = {r.axis for r in reductions(bound)}
    assert axis.size is not None and axis.size.hint == 24 and axis.extent == 128


def test_what_differs_in_more_is_another_kernel() -> None:
    with pytest.raises(Mismatch):
        generalise(kernel("vanilla", 128), kernel("causal_where", 128))
    with pytest.raises(Mismatch):
        generalise(wide(128), wide(128, 32))
    with pytest.raises(Mismatch):
        sizes_of(general("vanilla"), kernel("head_dim_24", 128))


def test_the_same_kernel_needs_no_sizes() -> None:
    same = generalise(kernel("vanilla", 128), kernel("vanilla", 128))
    assert same.sizes == 0 and same.operands == kernel("vanilla", 128).operands


def test_units_let_loads_stay_wide() -> None:
    """Strides that are multiples of 16 are known to be: 16-byte asynchronous copies, as for one length."""
    a, b = (wide(n) for n in (512, 1000))
    many = generalise(a, b)

    def lowered(plan: KernelPlan) -> Lowered:
        return lower(plan, many.operands, matmul_precision(False), many.outputs, many.sizes)

    (made,) = fitting(many.plan, lowered, 90)
    assert "cp.async.cg" in made.cubin.asm["ptx"] and "wgmma.mma_async" in made.cubin.asm["ptx"]
    assert made.cubin.stack <= SPILL


def test_tiles_are_no_longer_than_short_sequences() -> None:
    """Tuning sees the lengths of one call; rows of a wide tile would be computed for nothing at others."""

    def rows(made: Laid) -> set[int]:
        side = {axis.name: axis for axis in made.plan.grid if axis.extent > 64}
        return {c.tile(axis) or 1 for c in (made.plan.choices, *made.plan.others) for axis in side.values()} - {1}

    assert max(rows(wide(1000))) > 64 >= max(rows(generalise(wide(512), wide(1000))))


def test_units_shut_lengths_out() -> None:
    assert sizes_of(generalise(wide(512, 24), wide(1000, 24)), wide(300, 24))
    with pytest.raises(Mismatch, match="unit"):
        sizes_of(generalise(wide(512, 24), wide(1000, 24)), wide(301, 24))
    assert sizes_of(generalise(wide(512, 24), wide(1000, 24), units=False), wide(301, 24))


def wide(seq: int, dim: int = 64) -> Laid:
    """Plain attention in bfloat16."""
    torch.compiler.reset()
    made = captured(BY_NAME["vanilla"].fn, [torch.zeros(1, 2, seq, dim, dtype=torch.bfloat16) for _ in range(3)]).made
    plan = made.kernels[0][0]
    return laid(plan, tuple(contiguous((1, 2, seq, dim), "bf16") for _ in operand_names(plan)))
