"""Tiles, and what is known of them where one program of a kernel is written down.

A tile is a jax array with one dimension per axis that is wider than one index, in a fixed order:
rows, loop axes, head dimensions, features. An axis taken one index at a time leaves no dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from ..schedule.dtype import is_float, is_narrow_float
from ..schedule.expr import Axis, Const, Expr, Index, Op, Size, free_axes, ref_names
from ..schedule.inner import covering_tile
from ..schedule.integer import bounds
from .blocks import Blocks

JNP = {
    "f32": jnp.float32, "f64": jnp.float64, "bf16": jnp.bfloat16, "f16": jnp.float16, "f8e4m3": jnp.float8_e4m3fn,
    "f8e5m2": jnp.float8_e5m2, "i8": jnp.int8, "i16": jnp.int16, "i32": jnp.int32, "i64": jnp.int64, "u8": jnp.uint8,
    "bool": jnp.bool_,
}  # fmt: skip
# In whose place an axis stands that is a tile's first dimension, which a thread has to itself.
FIRST = Axis("%first", 1)
# Tiles along a loop's axis that LLVM may write out one by one.
FEW = 4


def stored_type(dtype: str) -> Any:
    """The jax type in which a tensor lies in memory: bytes, where others have none of that type."""
    return jnp.uint8 if dtype == "bool" or is_narrow_float(dtype) else JNP[dtype]


@dataclass(frozen=True)
class Tile:
    """An array over `axes`, one dimension each."""

    array: Array
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor a kernel reads or writes, as a flat reference.

    Attributes:
      ref: Pallas reference to a 1-D array.
      shape, strides: of the tensor, in elements.
      offset: element of `ref` at index 0.
      dtype: PyTorch's type (`stored_type` tells how it is stored).
    """

    ref: object
    shape: tuple[int | Size, ...]
    strides: tuple[int | Size, ...]
    offset: int
    dtype: str


def seen(n: int | Size) -> int:
    """A number as it is, or as it once was."""
    return n.hint if isinstance(n, Size) else n


@dataclass
class Scope:
    """Values known at one nesting depth.

    Attributes:
      starts: the first indices of the axes bound here.
      sides: widths of their tiles.
      refs: references that are bound here; None as long as they have no value.
      whole: axes whose current tile is known to lie inside of them.
      bare: what expressions are where `interior` holds, for masks let the tile through whole there.
      interior: a boolean, of which the program may know the value before it runs.
    """

    starts: dict[Axis, Array]
    sides: dict[Axis, int]
    refs: dict[str, Tile | None]
    whole: frozenset[Axis] = frozenset()
    bare: Mapping[Expr, Expr] = field(default_factory=dict)
    interior: Array | bool = False
    memo: dict[object, Tile] = field(default_factory=dict)

    def binds(self, e: Expr) -> bool:
        """Whether the value of `e` may differ from iteration to iteration of this scope."""
        return bool(free_axes(e) & self.starts.keys() or ref_names(e) & self.refs.keys())


class Context(ABC):
    """One program of a kernel: its scopes, and how tiles lie in them.

    Args:
      operands: by name.
      order: grid and loop axes, in the order of a tile's dimensions; features go last.
      features: parallel axes taken whole.
      compute: the floating type of the region.
      precision: jax precision of float32 matrix products.
      interpret: whether Pallas's interpreter runs it, which has no GPU instructions.
      sizes: what was given at launch, in units.
      blocks: where the tiles that the copy engine brings are told; None where the Triton IR stays as Pallas makes it.
    """

    def __init__(
        self,
        operands: dict[str, Operand],
        order: tuple[Axis, ...],
        features: tuple[Axis, ...],
        compute: str,
        precision: Any,
        interpret: bool,
        sizes: Sequence[Array] = (),
        blocks: Blocks | None = None,
    ):
        self.sizes, self.blocks = sizes, blocks
        self.operands, self.order, self.features = operands, order, features
        self.compute, self.precision, self.interpret = compute, precision, interpret
        self.scopes: list[Scope] = []
        # Axes in whose place others stand, in a tile's dimensions.
        self.places: dict[Axis, Axis] = {}
        # 0 by the program's number, of which XLA knows nothing on a CPU; None elsewhere.
        self.nothing: Array | None = None
        # 0, of which compilers know nothing, where products are to begin with it; None elsewhere.
        self.zero: Array | None = None
        # Copies that are being made of what is inside of sums, and matrix products that have been made.
        self.unrolled, self.products = 1, 0

    @abstractmethod
    def eval(self, e: Expr) -> Tile:
        """`e` over its wide free axes."""

    # --- scopes ---------------------------------------------------------------------------------

    def push(self, starts: dict[Axis, Array], sides: dict[Axis, int]) -> Scope:
        self.scopes.append(Scope(starts, sides, {}))
        return self.scopes[-1]

    def pop(self) -> None:
        self.scopes.pop()

    # --- axes -----------------------------------------------------------------------------------

    def side(self, axis: Axis) -> int:
        """Width of the current tile along `axis`."""
        if axis.extent == 1:
            return 1
        for s in reversed(self.scopes):
            if axis in s.sides:
                return s.sides[axis]
        return covering_tile(axis)

    def start(self, axis: Axis) -> Array | None:
        for s in reversed(self.scopes):
            if axis in s.starts:
                return s.starts[axis]
        return None

    def has_whole(self, axis: Axis) -> bool:
        """Whether programs have tiles along an axis, and each has all of it."""
        return any(axis in s.sides for s in self.scopes) and self.start(axis) is None

    def shape(self, axes: Iterable[Axis]) -> tuple[int, ...]:
        """Widths of the current tiles along `axes`."""
        return tuple(map(self.side, axes))

    def number(self, n: int | Size) -> int | Array:
        """A number, as a value of this launch where it is one."""
        return self.sizes[n.number] * jnp.int32(n.unit) if isinstance(n, Size) else n

    def extent(self, axis: Axis) -> int | Array:
        return self.number(axis.extent if axis.size is None else axis.size)

    def extent32(self, axis: Axis) -> Array:
        """The extent of an axis, an int32."""
        return jnp.asarray(self.extent(axis), jnp.int32)

    def tiles(self, axis: Axis, side: int) -> Array:
        """Number of tiles along an axis, the last of them perhaps not whole."""
        if axis.size is None:
            return jnp.int32(-(-axis.extent // side))
        return lax.div(self.extent32(axis) + jnp.int32(side - 1), jnp.int32(side))

    def wide(self, axes: Iterable[Axis]) -> frozenset[Axis]:
        return frozenset(a for a in axes if self.side(a) > 1)

    def sorted_axes(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """The wide ones of `axes`, in the order of a tile's dimensions."""

        def key(a: Axis) -> tuple[int, int, str]:
            a = self.places.get(a, a)
            if a == FIRST:
                return -1, 0, ""
            if a in self.features:
                return 2, self.features.index(a), ""
            return (0, self.order.index(a), "") if a in self.order else (1, 0, a.name)

        return tuple(sorted(self.wide(axes), key=key))

    # --- tiles ----------------------------------------------------------------------------------

    def spread(self, t: Tile, axes: tuple[Axis, ...]) -> Array:
        """`t` broadcast to the dimensions `axes` (a superset of its own)."""
        shape = self.shape(axes)
        if t.axes == axes and t.array.shape == shape:
            return t.array
        return lax.broadcast_in_dim(t.array, shape, tuple(axes.index(a) for a in t.axes))

    def indices(self, axis: Axis) -> Tile:
        """The indices of the current tile along `axis`."""
        start = self.start(axis)
        side = self.side(axis)
        if side == 1:
            return Tile(jnp.int32(0) if start is None else start, ())
        along = lax.iota(jnp.int32, side)
        return Tile(along if start is None else along + start, (axis,))

    def is_known(self, axis: Axis) -> bool:
        """Whether compilers may find out the indices of the current tile along `axis`."""
        by_program = axis in self.scopes[0].starts
        is_written_out = axis.size is None and axis.extent <= FEW * self.side(axis) and not by_program
        return self.side(axis) > 1 and (is_written_out or not isinstance(self.start(axis), Tracer))

    def group(self, e: Expr) -> tuple[Axis, Array, int] | None:
        """Of a quotient or remainder of indices by a number, where all of the current tile has the same quotient: the
        axis, the tile's first index along it, and the number."""
        if not isinstance(e, Op) or e.name not in ("floordiv", "mod"):
            return None
        i, n = e.args
        if not isinstance(i, Index) or not isinstance(n, Const):
            return None
        start, side, number = self.start(i.axis), self.side(i.axis), int(n.value)
        return (i.axis, start, number) if start is not None and side > 1 and number % side == 0 else None

    def within(self, axis: Axis) -> Tile | None:
        """Which indices of the current tile lie inside of the axis; None if all do."""
        side = self.side(axis)
        fits = side == 1 if axis.size is not None else axis.extent % side == 0
        if fits or any(axis in s.whole for s in self.scopes):
            return None
        here = self.indices(axis)
        return Tile(here.array < self.extent(axis), here.axes)

    def memoised(self, key: object, e: Expr, make: Callable[[], Tile]) -> Tile:
        """What `key` stands for, made once where `e` has the same value."""
        for s in reversed(self.scopes):
            if key in s.memo:
                return s.memo[key]
            if s.binds(e):
                break
        tile = make()
        self.scopes[-1].memo[key] = tile
        return tile

    def type_of(self, e: Expr) -> Any:
        """The jax type of the tile of `e`."""
        if is_float(e.dtype) or is_narrow_float(e.dtype):
            return JNP[self.compute]
        if e.dtype == "bool":
            return jnp.bool_
        span = bounds(e)
        return jnp.int32 if span is not None and -(2**31) <= span[0] and span[1] < 2**31 else jnp.int64

    def gathers(self) -> bool:
        """Whether elements of a tile can be picked by an index."""
        return self.interpret or self.blocks is not None


def transposed(t: Tile, axes: tuple[Axis, ...]) -> Tile:
    """`t`, its dimensions in the order of `axes`."""
    if t.axes == axes:
        return t
    return Tile(lax.transpose(t.array, tuple(t.axes.index(a) for a in axes)), axes)
