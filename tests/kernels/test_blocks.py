"""Tiles that a copy engine brings: which ones, where from, and what becomes of them in Triton IR. No GPU is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels import loads
from fl_pallas.kernels.blocks import Block, Blocks, BlockShape, block_shape, flattened
from fl_pallas.kernels.cubin import compile_ttir, simplified
from fl_pallas.kernels.fit import fitting
from fl_pallas.kernels.lower import Lowered
from fl_pallas.kernels.tile import Context
from fl_pallas.schedule.build import op
from fl_pallas.schedule.expr import Axis, Expr, Index, Load, Op, const, index, raw_op, size
from tests.kernels.test_cubins import kernels_made, kernels_of
from tests.oracle import check_gradients, run_and_check

ROW, COLUMN, HEAD = Axis("i", 100), Axis("d", 64), Axis("h", 4)
R, D, H = index(ROW), index(COLUMN), index(HEAD)
SIDES = {ROW: 64, COLUMN: 64}
PLUS = raw_op("add", (R, const(1, "i64")), "i64")
TWICE = raw_op("mul", (R, const(2, "i64")), "i64")
PAIRS = op("floordiv", D, const(2, "i64"), dtype="i64"), op("mod", D, const(2, "i64"), dtype="i64")
FOURS = op("floordiv", D, const(4, "i64"), dtype="i64"), op("mod", D, const(4, "i64"), dtype="i64")
EIGHT, SEVEN = (raw_op("add", (D, const(n, "i64")), "i64") for n in (8, 7))
SHIFTED = raw_op("add", (D, H), "i64")
PLAIN = ((H, R, D), (4, 100, 64), (6400, 64, 1))
WHOLE = BlockShape((0, 1, 2), (ROW, COLUMN))


@pytest.mark.parametrize(
    "idx, shape, strides, found",
    [
        pytest.param(*PLAIN, WHOLE, id="contiguous"),
        pytest.param((H, R, D), (4, 100, 64), (64, 256, 1), WHOLE, id="heads inside of rows"),
        pytest.param((H, D, R), (4, 64, 100), (8192, 128, 1), BlockShape((0, 1, 2), (COLUMN, ROW)), id="transposed"),
        pytest.param((H, R, D), (4, 100, 64), (0, 64, 1), BlockShape((1, 2), (ROW, COLUMN)), id="expanded"),
        pytest.param((const(0, "i64"), R, D), (1, 100, 64), (3, 64, 1), BlockShape((1, 2), (ROW, COLUMN)), id="of one"),
        pytest.param((H, R, D), (4, 100, 64), (6404, 64, 1), None, id="a stride of 12808 bytes"),
        pytest.param((H, R, D), (4, 100, 64), (6400, 128, 2), None, id="nothing contiguous"),
        pytest.param((H, R, D), (4, 120, 64), (7680, 64, 1), None, id="rows beyond the axis are in the tensor"),
        pytest.param((H, PLUS, D), (4, 101, 64), (6464, 64, 1), None, id="rows from the second on"),
        pytest.param((H, TWICE, D), (4, 200, 64), (12800, 64, 1), None, id="every other row"),
        pytest.param((R, R, D), (100, 100, 64), (6400, 64, 1), None, id="a diagonal"),
        pytest.param((H, R, EIGHT), (4, 100, 72), (7200, 72, 1), WHOLE, id="columns from the ninth on"),
        pytest.param((H, R, SEVEN), (4, 100, 72), (7200, 72, 1), None, id="columns from the eighth on"),
        pytest.param((H, R, SHIFTED), (4, 100, 72), (7200, 72, 1), None, id="columns that a head moves"),
        pytest.param((H, R, D), (4, 0, 64), (64, 64, 1), None, id="no rows"),
        pytest.param((R, H, H, H, H, D), (100, 4, 4, 4, 4, 64), (16384, 4096, 1024, 256, 64, 1), None, id="of six"),
    ],
)
def test_which(idx: tuple[Expr, ...], shape: tuple, strides: tuple, found: BlockShape | None) -> None:
    assert block_shape(idx, shape, strides, "bf16", SIDES, {ROW}) == found


@pytest.mark.parametrize(
    "idx, shape, strides, found",
    [
        pytest.param((R,), (100,), (1,), BlockShape((0,), (ROW,)), id="by itself"),
        pytest.param((H, R), (4, 100), (100, 1), BlockShape((0, 1), (ROW,)), id="of heads"),
        pytest.param((H, R), (4, 100), (102, 1), None, id="a stride of 408 bytes"),
        pytest.param((H, R), (4, 100), (1, 4), None, id="heads inside of rows"),
        pytest.param((H, R), (4, 120), (120, 1), None, id="rows beyond the axis are in the tensor"),
    ],
)
def test_which_vectors(idx: tuple[Expr, ...], shape: tuple, strides: tuple, found: BlockShape | None) -> None:
    assert block_shape(idx, shape, strides, "f32", {ROW: 64}, {ROW}) == found
    # The second of two would lie at no address that the engine takes.
    assert block_shape(idx, shape, strides, "f32", {ROW: 16}, {ROW}) is None


@pytest.mark.parametrize(
    "idx, shape, strides, dims",
    [
        pytest.param((H, R, *PAIRS), (4, 100, 32, 2), (6400, 64, 2, 1), [(0,), (1,), (2, 3)], id="pairs"),
        pytest.param((H, R, *PAIRS), (4, 100, 32, 2), (6400, 64, 1, 32), [(0,), (1,), (2,), (3,)], id="halves"),
        pytest.param((H, R, *PAIRS), (4, 100, 32, 3), (9600, 96, 3, 1), [(0,), (1,), (2,), (3,)], id="of triples"),
        pytest.param((*FOURS, R), (16, 4, 100), (400, 100, 1), [(0, 1), (2,)], id="fours"),
    ],
)
def test_which_lie_as_one(idx: tuple[Expr, ...], shape: tuple, strides: tuple, dims: list) -> None:
    found = flattened(idx, shape, strides)
    assert [f.dims for f in found] == dims
    assert all(isinstance(f.index, Index) for f in found) == (len(dims) < len(shape))


def test_which_sizes_given_at_launch() -> None:
    length, stride, odd = size(0, 1, 100), size(1, 8, 800), size(2, 1, 800)
    rows = Axis("i", 100, length)
    idx, sides = (H, index(rows), D), {rows: 64, COLUMN: 64}
    assert block_shape(idx, (4, length, 64), (stride, 64, 1), "bf16", sides, {rows}) is not None
    assert block_shape(idx, (4, length, 64), (odd, 64, 1), "bf16", sides, {rows}) is None
    assert block_shape(idx, (4, 100, 64), (stride, 64, 1), "bf16", sides, {rows}) is None


def test_which_types_and_sides() -> None:
    idx, shape, strides = PLAIN
    assert block_shape(idx, shape, strides, "i32", SIDES, set()) is None
    assert block_shape(idx, shape, strides, "bf16", {ROW: 512, COLUMN: 64}, set()) is None
    assert block_shape(idx, shape, strides, "bf16", {ROW: 64, COLUMN: 8}, set()) is None
    assert isinstance(PLUS, Op) and block_shape((H, PLUS, D), (4, 101, 64), strides, "bf16", SIDES, set()) is not None


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Interpreted kernels gather what descriptors would be asked for."""
    used: list[Block] = []
    running: list[Context] = []
    begin, look = Context.__init__, loads._block

    def started(self: Context, operands: dict, *rest: object) -> None:
        begin(self, operands, *rest)
        self.blocks = Blocks({name: n for n, name in enumerate(operands)})

    def looked(ctx: Context, e: Load, axes: tuple[Axis, ...]) -> Array | None:
        running[:] = [ctx]
        return look(ctx, e, axes)

    def gathered(number: int, first: list[Array], sides: tuple[int, ...], dtype: object) -> Array:
        (ctx,) = running
        block = ctx.blocks.made[number]
        used.append(block)
        operand = [*ctx.operands.values()][block.operand]
        assert block.box[-len(sides) :] == sides and math.prod(block.box) == math.prod(sides)
        offset, inside = jnp.zeros(sides, jnp.int64), jnp.ones(sides, bool)
        for k, (dims, at) in enumerate(zip(block.dims, first, strict=True), start=len(sides) - len(block.dims)):
            along = lax.broadcasted_iota(jnp.int32, sides, k) if k >= 0 else jnp.zeros(sides, jnp.int32)
            here = along + at
            inside &= (here >= 0) & (here < math.prod(ctx.number(operand.shape[d]) for d in dims))
            offset += here.astype(jnp.int64) * ctx.number(operand.strides[dims[-1]])
        offset = jnp.where(inside, offset, 0)
        return plgpu.load(operand.ref.at[offset], mask=inside, other=jnp.zeros((), dtype))

    monkeypatch.setattr(Context, "__init__", started)
    monkeypatch.setattr(loads, "_block", looked)
    monkeypatch.setattr(loads, "block_load", gathered)
    return used


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operands [B, S, H, D], transposed by the program, and a tail of the keys left out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k[:, :-3], v[:, :-3]))
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def transposed_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys come as [B, H, D, S]."""
    return torch.softmax(q @ k.mT.contiguous() - k.mT.square().sum(-2, True), -1) @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def biased_keys(q: Tensor, k: Tensor, v: Tensor, each: Tensor, shared: Tensor) -> Tensor:
    """A number for each key of a head, and one for each key of all."""
    return torch.softmax(q @ k.mT + each[..., None, :] + shared, -1) @ v


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Neighbours of queries and keys change places, [.., D / 2, 2], as a rotary embedding has them."""
    q, k = (torch.stack((x[..., 1::2], x[..., ::2]), -1) for x in (q, k))
    return F.scaled_dot_product_attention(q.flatten(-2), k.flatten(-2), v)


@pytest.mark.parametrize(
    "fn, shapes, blocks",
    [
        pytest.param(causal, [(2, 4, 50, 32), (2, 2, 50, 32), (2, 2, 50, 32)], 2, id="groups of heads"),
        pytest.param(causal, [(1, 2, 64, 80), (1, 2, 64, 80), (1, 2, 64, 80)], 3, id="80 features"),
        pytest.param(by_positions, [(2, 40, 2, 32), (2, 51, 2, 32), (2, 51, 2, 32)], 1, id="positions first"),
        pytest.param(interleaved, [(1, 2, 64, 32)] * 3, 3, id="pairs"),
        pytest.param(transposed_keys, [(1, 2, 40, 32)] * 3, 2, id="transposed keys"),
        pytest.param(biased_keys, [*[(1, 2, 40, 32)] * 3, (1, 2, 40), (40,)], 5, id="biased keys"),
    ],
)
def test_same_tiles(fn: Callable, shapes: list[tuple[int, ...]], blocks: int, emulated: list[Block]) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    run_and_check(fn, fl.compile(fn), inputs)
    assert len({b.operand for b in emulated}) >= blocks, emulated


def test_same_tiles_backward(emulated: list[Block]) -> None:
    """Rows' sums and gradients are vectors along the loop of the kernel whose rows are keys."""
    inputs = [torch.randn(shape) for shape in (*[(1, 2, 40, 32)] * 3, (1, 2, 40), (40,))]
    check_gradients(biased_keys, fl.compile(biased_keys), inputs)
    assert sum(math.prod(b.box) == max(b.box) for b in {*emulated}) >= 4


def test_same_tiles_for_other_sizes(emulated: list[Block]) -> None:
    compiled = fl.compile(causal)
    for seq in (40, 56, 72, 33):
        run_and_check(causal, compiled, [torch.randn(1, 2, seq, 32) for _ in range(3)])
    assert emulated


def test_in_triton_ir() -> None:
    """Each load is Triton's own op, by a descriptor that the entry takes, and is loaded ahead of its use."""
    ((plan, lower),) = kernels_of("vanilla", torch.bfloat16)
    made = lower(plan)
    assert [b.operand for b in made.blocks] == [0, 1, 2] and "fl_pallas " not in made.ttir
    assert made.ttir.count("tt.descriptor_load") >= 3
    assert Lowered.from_json(made.to_json()) == made
    cubin = compile_ttir(simplified(made, 90), 90)
    assert "cp.async.bulk.tensor" in cubin.asm["ptx"] and "cp.async.cg" not in cubin.asm["ptx"]
    assert "async_tma_copy_global_to_local" in cubin.asm["ttgir"]


def test_matrices_of_an_iteration_are_waited_for_together() -> None:
    """And vectors as late as they can, for they go to registers then."""
    inputs = [torch.empty(1, 2, 256, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    _, queries, keys = kernels_made(by_hand, inputs)
    for (plan, lower), waits in ((queries, 1), (keys, 3)):
        ttgir = compile_ttir(simplified(lower(plan), 90), 90).asm["ttgir"]
        loop = ttgir[ttgir.rindex("scf.for") :]
        loop = loop[: loop.index("scf.yield")]
        assert loop.count("async_tma_copy_global_to_local") == (2 if waits == 1 else 4), ttgir
        assert loop.count("ttng.wait_barrier") == waits


@pytest.mark.long
def test_in_other_ways() -> None:
    """Tuning compares choices with the same about guesses, the first by addresses too, and more of a short loop."""
    attention = F.scaled_dot_product_attention
    ((plan, lower),) = kernels_made(attention, [torch.empty(2, 8, 256, 64, dtype=torch.bfloat16)] * 3)
    tuned = fitting(plan, lower, 90, 2)
    first = [replace(c, guesses=False) for c in (plan.choices, *plan.others[:2])]
    assert tuned[0].choices == first[0] and tuned[0].lowered.blocks
    assert {replace(f.choices, blocks=True) for f in tuned if not f.choices.blocks} == {*first}
    assert not any("tt.descriptor_load" in f.lowered.ttir for f in tuned if not f.choices.blocks)

    ((plan, lower),) = kernels_made(attention, [torch.empty(2, 8, 2048, 64, dtype=torch.bfloat16)] * 3)
    tuned = fitting(plan, lower, 90, 2)
    about = {f.choices for f in tuned if f.choices.guesses}
    assert about == {replace(f.choices, guesses=True) for f in tuned if f.choices.blocks} and len(about) == 2
    assert [f.choices for f in tuned if not f.choices.blocks] == [replace(tuned[0].choices, blocks=False)]
    one = fitting(plan, lower, 90)[0]
    assert one.choices.guesses
