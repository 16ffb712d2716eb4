"""Tiles that Hopper's copy engine (the tensor memory accelerator, TMA) brings from memory whole.

A load by addresses takes registers for them, and instructions of every thread; a block takes the coordinates of its
first element from one thread, and is 0 outside of the tensor by itself. Triton's op for it, `tt.descriptor_load`,
reads by a descriptor of the tensor (CUtensorMap), which the host makes for each launch. Pallas's Triton lowering has no
such load: kernels write one down as inline assembly that names it (`block_load`), and Triton's op takes its place in
the Triton IR (`with_blocks`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu
from jaxlib.mlir import ir

from ..schedule.expr import Axis, Expr, Index, Op, Size, free_axes
from ..schedule.integer import bounds, from_linear, is_inside, linear

# The first compute capability that has the engine.
ENGINE = 90
# What the engine asks for: most dimensions of a tensor, most elements of a block along one, divisor in bytes of
# addresses, strides and a block's first column (else it is "an illegal instruction"); the least contiguous piece in
# bytes that is worth it; and the divisor of addresses in shared memory, where the vectors of several iterations lie one
# behind the other.
DIMENSIONS, SIDE, DIVISOR, LEAST, SHARED = 5, 256, 16, 32, 128
BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_MARK = "fl_pallas block "
_WRAPPED = re.compile(r"!tt\.tensordesc<(?!tensor)([^<>]*)>")


@functools.cache
def has_descriptors() -> bool:
    """Whether descriptors are made here as the installed Triton does; its other versions have other forms of them."""
    return version("triton").startswith("3.6.")


@dataclass(frozen=True)
class Block:
    """What a descriptor tells of an operand.

    Attributes:
      operand: its position among a kernel's operands.
      dims: the tensor's dimensions that take part, the contiguous one last; several as one that they flatten to.
      box: sides of a block along them, in elements.
      dtype: of the elements.
    """

    operand: int
    dims: tuple[tuple[int, ...], ...]
    box: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Flat:
    """One dimension of a tensor as a load goes through it; or several, that lie as one.

    Attributes:
      dims: of the tensor.
      index: of the load.
      extent, stride: in elements.
    """

    dims: tuple[int, ...]
    index: Expr
    extent: int | Size
    stride: int | Size


def flattened(index: Sequence[Expr], shape: Sequence[int | Size], strides: Sequence[int | Size]) -> list[Flat]:
    """The dimensions of a tensor, those as one that a load's index goes through together: `x[d // 2, d % 2]`."""
    found: list[Flat] = []
    for d, (i, n, stride) in enumerate(zip(index, shape, strides, strict=True)):
        here = Flat((d,), i, n, stride)
        both = _flattened(found[-1], here) if found else None
        if both is not None:
            found.pop()
        found.append(here if both is None else both)
    return found


def _flattened(outer: Flat, inner: Flat) -> Flat | None:
    if not (isinstance(inner.index, Op) and inner.index.name == "mod"):
        return None
    if isinstance(outer.extent, Size) or isinstance(inner.extent, Size):
        return None
    if isinstance(outer.stride, Size) or isinstance(inner.stride, Size) or outer.stride != inner.extent * inner.stride:
        return None
    terms, constant = linear(outer.index)
    terms = {**{t: k * inner.extent for t, k in terms.items()}, inner.index: 1}
    whole = from_linear((terms, constant * inner.extent), "i64")
    if not isinstance(whole, Index):
        return None
    return Flat((*outer.dims, *inner.dims), whole, outer.extent * inner.extent, inner.stride)


@dataclass(frozen=True)
class BlockShape:
    """How a load's tile lies in a tensor.

    Attributes:
      dims: the tensor's dimensions that take part; the tile's run along the last of them.
      axes: of rows, if the tile has some, and of columns, which are contiguous in memory.
    """

    dims: tuple[int, ...]
    axes: tuple[Axis, ...]


def block_shape(
    index: Sequence[Expr],
    shape: Sequence[int | Size],
    strides: Sequence[int | Size],
    dtype: str,
    sides: Mapping[Axis, int],
    ragged: Set[Axis],
) -> BlockShape | None:
    """How the tile that a load reads is a block of its tensor; None if it is none that the engine brings.

    Args:
      index: of the load, an expression for each dimension.
      shape, strides: of the tensor, in elements.
      dtype: of its elements.
      sides: of the tile along its axes, one or two.
      ragged: the axes that the tile may reach beyond; the load gives 0 there.
    """
    if dtype not in BYTES or 0 in shape:
        return None
    along: dict[Axis, int] = {}
    single: list[int] = []
    for d, (i, n, stride) in enumerate(zip(index, shape, strides, strict=True)):
        terms, _ = linear(i)
        wide = [t for t in terms if free_axes(t) & sides.keys()]
        if not wide and (n == 1 or stride == 0) and is_inside(i, n):
            continue
        if not _is_coordinate(i) or not _is_step(stride, BYTES[dtype]):
            return None
        if not wide:
            single.append(d)
            continue
        t = wide[0]
        if len(wide) > 1 or not isinstance(t, Index) or terms[t] != 1 or t.axis in along:
            return None
        # Beyond the end of the axis, the engine gives 0 where that is beyond the end of the tensor.
        if t.axis in ragged and not (i == t and n == (t.axis.extent if t.axis.size is None else t.axis.size)):
            return None
        along[t.axis] = d
    if len(along) != len(sides):
        return None
    axes = tuple(sorted(along, key=lambda a: strides[along[a]] == 1))
    columns = axes[-1]
    dims = (*single, *(along[a] for a in axes))
    fits = max(sides.values()) <= SIDE and sides[columns] * BYTES[dtype] >= LEAST and len(dims) <= DIMENSIONS
    fits = fits and math.prod(sides.values()) * BYTES[dtype] % SHARED == 0
    # What divides how far the tiles lie off where they would by their axis alone.
    terms, constant = linear(index[along[columns]])
    aside = math.gcd(constant, *(k for t, k in terms.items() if columns not in free_axes(t)))
    fits = fits and aside * BYTES[dtype] % DIVISOR == 0
    return BlockShape(dims, axes) if fits and strides[along[columns]] == 1 else None


def _is_coordinate(i: Expr) -> bool:
    span = bounds(i)
    return span is not None and -(2**31) <= span[0] and span[1] < 2**31


def _is_step(stride: int | Size, size: int) -> bool:
    """Whether the engine goes along a dimension of elements of `size` bytes."""
    unit = stride.unit if isinstance(stride, Size) else stride
    return stride == 1 or unit > 0 and unit * size % DIVISOR == 0


@dataclass(frozen=True)
class Blocks:
    """The blocks of a kernel, as it is written down.

    Attributes:
      positions: of the operands, by name, that lie at addresses the engine takes.
      made: the blocks so far.
    """

    positions: Mapping[str, int]
    made: list[Block] = field(default_factory=list)

    def number(self, block: Block) -> int:
        """The number of a block; the same for one that is there already."""
        if block not in self.made:
            self.made.append(block)
        return self.made.index(block)


def block_load(block: int, coordinates: Sequence[Array | int], shape: tuple[int, ...], dtype: Any) -> Array:
    """The tile of the block `block` (its number in the kernel) whose first element has these int32 coordinates."""
    whole = [jnp.broadcast_to(jnp.asarray(c, jnp.int32), shape) for c in coordinates]
    result = jax.ShapeDtypeStruct(shape, dtype)
    name = f"{_MARK}{block}"
    (tile,) = plgpu.elementwise_inline_asm(name, args=whole, constraints="", pack=1, result_shape_dtypes=[result])
    return tile


def with_blocks(module: Any, blocks: Sequence[Block]) -> str:
    """The text of a module of Triton IR whose entry takes a descriptor for each block besides, and reads by it.

    Args:
      module: jaxlib's, of one function.
      blocks: of the kernel, by number.
    """
    if blocks:
        with module.context, ir.Location.unknown():
            _replaced(module, blocks)
    # JAX's Triton writes the type of a descriptor in another way than Triton 3.6 does.
    return _WRAPPED.sub(r"!tt.tensordesc<tensor<\1>>", str(module))


def _replaced(module: Any, blocks: Sequence[Block]) -> None:
    (entry,) = (op.operation for op in module.body if op.operation.name == "tt.func")
    descriptors = _arguments(entry, blocks)
    marks = [op for op in operations(entry) if op.name == "tt.elementwise_inline_asm"]
    raised: dict[Any, list[Any]] = {}
    for op in marks:
        text = ir.StringAttr(op.attributes["asm_string"]).value
        if text.startswith(_MARK):
            descriptor = descriptors[int(text.removeprefix(_MARK))]
            (tile,) = op.results
            with ir.InsertionPoint(op):
                at = [_scalar(x) for x in op.operands]
                made = ir.Operation.create("tt.descriptor_load", [tile.type], [descriptor, *at])
            tile.replace_all_uses_with(made.results[0])
            op.erase()
            # A vector goes to registers as it is waited for: as late as it can.
            if ir.RankedTensorType(made.result.type).rank > 1:
                _raise(made, raised)


def _raise(load: Any, raised: dict[Any, list[Any]]) -> None:
    """Move a load in a loop, and the numbers it takes, to the beginning of an iteration, behind those that are there:
    Triton waits for all of them at once then, and not for each before its use.

    Args:
      raised: what has been moved, by block.
    """
    block = load.block
    if block.owner.name != "scf.for":
        return
    needed, stack = [], [load]
    while stack:
        op = stack.pop()
        needed.append(op)
        makers = [x.owner.operation for x in op.operands if not isinstance(x.owner, ir.Block)]
        own = [m for m in makers if m.block == block and m not in (*needed, *stack)]
        if not all(m.name.startswith("arith.") for m in own):
            return
        stack += own
    first, done = block.operations[0].operation, raised.setdefault(block, [])
    for op in sorted(needed, key=functools.cmp_to_key(lambda a, b: -1 if a.is_before_in_block(b) else 1)):
        if op in done:
            continue
        if done:
            op.move_after(done[-1])
        elif op != first:
            op.move_before(first)
        done.append(op)


def _arguments(entry: Any, blocks: Sequence[Block]) -> list[Any]:
    """A new last argument of a function for each block: a descriptor."""
    types = [ir.Type.parse(f"!tt.tensordesc<{'x'.join(map(str, b.box))}x{b.dtype}>") for b in blocks]
    kind: Any = ir.TypeAttr(entry.attributes["function_type"]).value
    entry.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get([*kind.inputs, *types], kind.results))
    told: Any = entry.attributes["arg_attrs"]
    entry.attributes["arg_attrs"] = ir.ArrayAttr.get([*told, *(ir.DictAttr.get({}) for _ in blocks)])
    return [entry.regions[0].blocks[0].add_argument(t, ir.Location.unknown()) for t in types]


def _scalar(x: Any) -> Any:
    """The number that all elements of a tensor are."""
    made = x.owner
    if made.name == "tt.splat":
        return made.operands[0]
    assert made.name == "arith.constant", made.name
    value: Any = ir.DenseElementsAttr(made.attributes["value"]).get_splat_value()
    return ir.Operation.create("arith.constant", [value.type], attributes={"value": value}).results[0]


def operations(parent: Any) -> list[Any]:
    """An operation and all inside of it.

    A loop over a block makes a view of each, of its dialect's Python module, and looks in vain for Triton's every time.
    """
    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    parent.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found
