"""Expressions on tiles: what one program of a kernel computes, as jax operations.

A tile is a jax array with one dimension per axis that is wider than one index, in a fixed order:
rows, loop axes, head dimensions, features. An axis taken one index at a time leaves no dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..errors import ScheduleError, Unsupported
from ..schedule.build import op, select, substitute
from ..schedule.dtype import is_float, itemsize
from ..schedule.expr import (
    Axis,
    Const,
    Expr,
    Index,
    Load,
    Op,
    Reduce,
    Ref,
    Size,
    children,
    const,
    free_axes,
    index,
    loads,
    outer_loads,
    raw_reduce,
    reductions,
    ref,
    ref_names,
)
from ..schedule.inner import (
    ROWS,
    Product,
    Sheared,
    as_product,
    as_sheared,
    as_shifted,
    as_vector_product,
    covering_tile,
    is_matrix_product,
    is_sequential,
    power_of_two,
    within_sides,
)
from ..schedule.integer import bounds, from_linear, is_inside, linear
from ..schedule.laws import non_negative
from ..schedule.magnitude import magnitude
from ..schedule.scan import BACK, BLOCK, RUNNING, WHOLE, scanned_axis
from .blocks import Block, Blocks, block_load, block_shape, flattened
from .native import direct, extreme, gather, quotient
from .pointwise import POINTWISE, log1p
from .running import running_sums
from .turn import turned

JNP = {
    "f32": jnp.float32, "f64": jnp.float64, "bf16": jnp.bfloat16, "f16": jnp.float16, "i8": jnp.int8,
    "i16": jnp.int16, "i32": jnp.int32, "i64": jnp.int64, "u8": jnp.uint8, "bool": jnp.bool_,
}  # fmt: skip
IDENTITY = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf, "any": False, "all": True}
# Longer sums that are taken one index at a time are loops: unrolled, all their operands would be loaded at once.
UNROLL = 4
# Sums inside of sums are loops from so many matrix products of a kernel on: they would be copies of copies.
MOST_PRODUCTS = 64
CHUNK = 64
# Where tiles are so small that these elements are those of many indices, or all, sums take as many at once: the loads
# of one index after another wait for memory each time. They are the first dimension, which a thread has to itself.
AT_ONCE, MANY, FIRST = 16384, 64, Axis("%first", 1)
# The least side of a tile that Triton takes to shared memory for a product without its sides being multiplied out.
SWIZZLED = 8


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
      dtype: PyTorch's type (bool is stored as u8).
    """

    ref: object
    shape: tuple[int | Size, ...]
    strides: tuple[int | Size, ...]
    offset: int
    dtype: str


def seen(n: int | Size) -> int:
    """A number as it is, or as it once was."""
    return n.hint if isinstance(n, Size) else n


@dataclass(frozen=True)
class Side:
    """One side of a matrix product.

    Attributes:
      factors: which it is the product of.
      axis: what the product sums over.
      dtype: of the sum.
    """

    factors: tuple[Expr, ...]
    axis: Axis
    dtype: str


@dataclass
class Scope:
    """Values known at one nesting depth.

    Attributes:
      starts: the first indices of the axes bound here.
      sides: widths of their tiles.
      refs: references that have a value here.
      whole: axes whose current tile is known to lie inside of them.
      bare: what expressions are where `interior` holds, for masks let the tile through whole there.
      interior: a boolean, of which the program may know the value before it runs.
    """

    starts: dict[Axis, Array]
    sides: dict[Axis, int]
    refs: dict[str, Tile]
    whole: frozenset[Axis] = frozenset()
    bare: Mapping[Expr, Expr] = field(default_factory=dict)
    interior: Array | bool = False
    memo: dict[object, Tile] = field(default_factory=dict)

    def binds(self, e: Expr) -> bool:
        """Whether the value of `e` may differ from iteration to iteration of this scope."""
        return bool(free_axes(e) & self.starts.keys() or ref_names(e) & self.refs.keys())


class Evaluator:
    """Evaluates expressions inside one program of a kernel.

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

    # --- scopes ---------------------------------------------------------------------------------

    def push(self, starts: dict[Axis, Array], sides: dict[Axis, int]) -> Scope:
        self.scopes.append(Scope(starts, sides, {}))
        return self.scopes[-1]

    def pop(self) -> None:
        self.scopes.pop()

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

    def hoist(self, exprs: Iterable[Expr], loop: Scope) -> None:
        """Evaluate what `exprs` share with the world outside of `loop`, before it starts."""
        done: set[Expr] = set()

        def visit(e: Expr) -> None:
            if e in done or isinstance(e, (Const, Index)):
                return
            done.add(e)
            if not loop.binds(e):
                if isinstance(e, Load):
                    self._raw(e)
                elif not _inside_reduction(e, loop):
                    self.eval(e)
                return
            for c in children(e):
                visit(c)

        for e in exprs:
            visit(e)

    # --- evaluation -----------------------------------------------------------------------------

    def eval(self, e: Expr) -> Tile:
        """`e` over its wide free axes."""
        return self._memo(e, e, lambda: self._masked(e))

    def _masked(self, e: Expr) -> Tile:
        """`e`, its masks left out where the tile needs none."""
        scope = next((s for s in reversed(self.scopes) if e in s.bare), None)
        if scope is None or scope.interior is False:
            return self._eval(e)
        bare = self.eval(scope.bare[e])
        axes = self.sorted_axes(free_axes(e))
        if scope.interior is True:
            return Tile(self.spread(bare, axes), axes)
        if len(axes) < 2:
            return self._eval(e)
        for n in outer_loads(e):
            if len(self.wide(free_axes(n))) < 2:
                self._raw(n)  # in a branch it would not be loaded ahead

        def masked() -> Array:
            self.push({}, {})
            tile = self._eval(e)
            self.pop()
            return self.spread(tile, axes).astype(bare.array.dtype)

        return Tile(lax.cond(scope.interior, lambda: self.spread(bare, axes), masked), axes)

    def _memo(self, key: object, e: Expr, make: Callable[[], Tile]) -> Tile:
        for s in reversed(self.scopes):
            if key in s.memo:
                return s.memo[key]
            if s.binds(e):
                break
        tile = make()
        self.scopes[-1].memo[key] = tile
        return tile

    def _eval(self, e: Expr) -> Tile:
        if isinstance(e, Const):
            # A mask's number, scaled, may be beyond float32: infinite, as in PyTorch.
            with np.errstate(over="ignore"):
                return Tile(jnp.asarray(e.value, self._type(e)), ())
        if isinstance(e, Size):
            return Tile(jnp.asarray(self.number(e), jnp.int32), ())
        if isinstance(e, Index):
            return self._index(e.axis)
        if isinstance(e, Ref):
            return self._ref(e.name)
        if isinstance(e, Load):
            raw = self._raw(e)
            return Tile(self._widened(raw.array, e.dtype), raw.axes)
        if isinstance(e, Reduce):
            return self._reduce(e)
        return self._op(e)

    def _ref(self, name: str) -> Tile:
        for s in reversed(self.scopes):
            if name in s.refs:
                return s.refs[name]
        raise ScheduleError(f"reference {name} has no value here")

    def _type(self, e: Expr) -> Any:
        if is_float(e.dtype):
            return JNP[self.compute]
        if e.dtype == "bool":
            return jnp.bool_
        span = bounds(e)
        return jnp.int32 if span is not None and -(2**31) <= span[0] and span[1] < 2**31 else jnp.int64

    def _widened(self, x: Array, dtype: str) -> Array:
        if is_float(dtype):
            return x.astype(JNP[self.compute])
        if dtype == "bool":
            return x != 0
        return x.astype(jnp.int64 if dtype == "i64" else jnp.int32)

    def _index(self, axis: Axis) -> Tile:
        start = self.start(axis)
        side = self.side(axis)
        if side == 1:
            return Tile(jnp.int32(0) if start is None else start, ())
        along = lax.iota(jnp.int32, side)
        return Tile(along if start is None else along + start, (axis,))

    def _op(self, e: Op) -> Tile:
        if e.name in RUNNING:
            return self._running(e)
        args = [self.eval(a) for a in e.args]
        axes = self.sorted_axes({a for t in args for a in t.axes})
        arrays = [self.spread(t, axes) for t in args]
        if e.name == "cast":
            return Tile(arrays[0].astype(self._type(e)), axes)
        first = 1 if e.name == "select" else 0
        kind = jnp.result_type(*(a.dtype for a in arrays[first:]))
        if not is_float(e.dtype) and e.dtype != "bool" and e.name != "select":
            kind = jnp.promote_types(kind, self._type(e))
        arrays[first:] = [a.astype(kind) for a in arrays[first:]]
        if e.name == "tanh" and e.dtype == "bf16" and axes and not self.interpret:
            # One instruction, and four times as accurate as the bfloat16 that PyTorch would round to. Of a number
            # alone JAX would make a tensor, which goes with no other number.
            return Tile(plgpu.approx_tanh(arrays[0]), axes)
        if e.name in ("floordiv", "mod") and axes and not self.interpret and _is_narrow(e.args[0]):
            arrays[0] = arrays[0] + never().astype(arrays[0].dtype)
        if e.name == "div" and self.compute == "f32" and (inverse := _inverse(e.args[1])) is not None:
            return Tile(arrays[0] * jnp.float32(inverse), axes)
        if e.name == "quotient" and self.compute == "f32" and axes and not self.interpret:
            return Tile(quotient(*jnp.broadcast_arrays(*arrays)), axes)
        if e.name in ("sin", "cos") and self.compute == "f32" and len(axes) > 1:
            return Tile(turned(e.name, arrays[0], magnitude(e.args[0])), axes)
        if e.name == "log1p" and self.compute == "f32" and not self.interpret and non_negative(e.args[0], frozenset()):
            return Tile(log1p(arrays[0], magnitude(e.args[0]), e.dtype == "bf16"), axes)
        if e.name == "rounded" and self.interpret:
            # XLA takes the cast and its inverse for nothing.
            return Tile(lax.reduce_precision(arrays[0], 8, 7), axes)
        if e.name in ("max", "min"):
            return Tile(self.combined(e.name, *arrays), axes)
        made = POINTWISE[e.name](*arrays)
        return Tile(self._rounded_alone(made) if e.name == "mul" and is_float(e.dtype) else made, axes)

    def _rounded_alone(self, product: Array) -> Array:
        """A product that LLVM, on a CPU, does not make one instruction of with the sum that it goes into.

        There XLA computes a score anew for whatever reads it: where it is compared with the maximum of all (its place,
        the gradient of that) it would be rounded once in one of the two and twice in the other, and equal nothing.
        """
        if self.nothing is None:
            return product
        kind = jnp.int64 if product.dtype == jnp.float64 else jnp.int32
        bits = lax.bitcast_convert_type(product, kind) + self.nothing.astype(kind)
        return lax.bitcast_convert_type(bits, product.dtype)

    def _running(self, e: Op) -> Tile:
        """What comes before the tile, or after it, and what the tile itself has up to each of its indices."""
        body, place, before, count = e.args
        axis = scanned_axis(e)
        back, whole = e.name in BACK, e.name in WHOLE
        axes = self.sorted_axes(free_axes(body) | free_axes(before) | {axis})
        start, side = self.start(axis), self.side(axis)
        if side < min(BLOCK, axis.extent):
            raise Unsupported("a running sum", "its blocks are wider than tiles")
        at = axes.index(axis)
        inside = op("lt", place, count, dtype="bool")
        x = self.spread(self.eval(select(inside, body, const(0.0, body.dtype))), axes)
        within = self.within(axis)
        if within is not None:
            x = jnp.where(self.spread(within, axes), x, jnp.zeros_like(x))
        sums = running_sums(x, at, back, whole, itemsize(e.dtype) == 2, self.interpret, self.blocks is not None)
        first = jnp.int32(0) if start is None else start
        last = jnp.minimum(first + jnp.int32(side - 1), self.extent32(axis) - jnp.int32(1))
        self.push({axis: last if back else first}, {axis: 1})
        try:
            outer = self.eval(before)
            others = tuple(a for a in axes if a != axis)
            outer = Tile(self.spread(outer, others), others)
        finally:
            self.pop()
        return Tile(sums + self.spread(outer, axes), axes)

    def combined(self, kind: str, a: Array, b: Array) -> Array:
        """Partial reductions put together: two tiles of one shape."""
        native = self.blocks is not None and not self.interpret
        if native and kind in ("max", "min") and a.ndim and a.dtype == jnp.float32:
            return extreme(kind, a, b)
        return COMBINE[kind](a, b)

    def spread(self, t: Tile, axes: tuple[Axis, ...]) -> Array:
        """`t` broadcast to the dimensions `axes` (a superset of its own)."""
        shape = tuple(self.side(a) for a in axes)
        if t.axes == axes and t.array.shape == shape:
            return t.array
        return lax.broadcast_in_dim(t.array, shape, tuple(axes.index(a) for a in t.axes))

    # --- memory ---------------------------------------------------------------------------------

    def _raw(self, e: Load) -> Tile:
        """A load in its stored type, 0 outside of the tensor and of the axes' extents."""
        return self._memo(("raw", e), e, lambda: self._load(e))

    def _load(self, e: Load) -> Tile:
        operand = self.operands[e.source]
        axes = self.sorted_axes(free_axes(e))
        if (block := self._block(e, axes)) is not None:
            return Tile(block, axes)
        offset, inside = self.address(operand, e.index, axes)
        reference = operand.ref.at[offset]  # type: ignore[attr-defined]
        zero = None if inside is None else jnp.zeros((), JNP["u8" if operand.dtype == "bool" else operand.dtype])
        loaded = plgpu.load(reference, mask=inside, other=zero)
        return Tile(direct(loaded) if self._is_scattered(operand, e.index) else loaded, axes)

    def _is_scattered(self, operand: Operand, idx: tuple[Expr, ...]) -> bool:
        """Whether elements of a tile have places of their own, of a table: no neighbours along an axis lie side by
        side, but those that all diagonals share."""
        if self.blocks is None or self.interpret or itemsize(operand.dtype) not in (2, 4):
            return False
        terms, _ = self._place(operand, idx)
        wide = {t: frozenset(a for a in free_axes(t) if self.side(a) > 1) for t in terms}
        beside = {*(wide[t] for t in terms if len(wide[t]) == 1 and abs(terms[t]) == 1)}
        return len(beside) > 1 or not beside and any(len(own) > 1 for own in wide.values())

    def _place(self, operand: Operand, idx: tuple[Expr, ...]) -> tuple[dict[Expr, int], int]:
        """The linear form of a flat offset, but for axes of strides that are told at run time."""
        terms: dict[Expr, int] = {}
        constant = operand.offset
        for i, stride in zip(idx, operand.strides, strict=True):
            if not isinstance(stride, Size):
                parts, c = linear(i)
                constant += c * stride
                for term, k in parts.items():
                    terms[term] = terms.get(term, 0) + k * stride
        # Rejoined, so that an axis cut by a view and put together by strides is seen to be contiguous.
        return linear(from_linear(({t: k for t, k in terms.items() if k}, constant), "i64"))

    def _block(self, e: Load, axes: tuple[Axis, ...]) -> Array | None:
        """A tile that the copy engine brings, of rows by features, or along a loop; None where it cannot."""
        operand = self.operands[e.source]
        if self.blocks is None or e.source not in self.blocks.positions or operand.offset:
            return None
        if len(axes) == 2 and all(a in self.order for a in axes):
            return None  # tiles of rows by keys go to registers: through shared memory they take longer
        vector = len(axes) == 1 and operand.dtype == "f32" and any(axes[0] in s.starts for s in self.scopes[1:])
        if len(axes) != 2 and not vector:
            return None
        sides = {a: self.side(a) for a in axes}
        ragged = {a for a in axes if self.within(a) is not None}
        flat = flattened(e.index, operand.shape, operand.strides)
        index, extents, strides = zip(*((f.index, f.extent, f.stride) for f in flat), strict=True)
        shape = block_shape(index, extents, strides, operand.dtype, sides, ragged)
        if shape is None:
            return None
        extent = tuple(sides[a] for a in shape.axes)
        box = (*(1 for _ in shape.dims[: -len(extent)]), *extent)
        dims = tuple(flat[d].dims for d in shape.dims)
        number = self.blocks.number(Block(self.blocks.positions[e.source], dims, box, operand.dtype))
        first = [self._first(index[d]) for d in shape.dims]
        tile = block_load(number, first, extent, JNP[operand.dtype])
        return self._transposed(Tile(tile, shape.axes), axes).array

    def _first(self, i: Expr) -> Array:
        """The first of the indices that an index expression takes over the current tile."""
        terms, constant = linear(i)
        at = jnp.int32(constant)
        for t, k in terms.items():
            first = self.start(t.axis) if isinstance(t, Index) else self.eval(t).array
            at = at if first is None else at + first.astype(jnp.int32) * jnp.int32(k)
        return at

    def address(self, operand: Operand, idx: tuple[Expr, ...], axes: tuple[Axis, ...]) -> tuple[Array, Array | None]:
        """Flat offsets over `axes`, and where they are inside of the tensor (None: everywhere)."""
        ends = zip(map(seen, operand.shape), map(seen, operand.strides), strict=True)
        kind = jnp.int64 if operand.offset + sum(max(0, (n - 1) * s) for n, s in ends) >= 2**31 else jnp.int32
        checks: list[Tile] = [m for a in axes if (m := self.within(a)) is not None]
        given: list[tuple[Tile, int | Array]] = []
        for i, n, stride in zip(idx, operand.shape, operand.strides, strict=True):
            if not is_inside(i, n):
                tile = self.eval(i)
                low, high = jnp.zeros_like(tile.array), jnp.full_like(tile.array, self.number(n))
                # Triton's load is as wide as it knows a mask to be alike, which it knows of one term rightly.
                at_least, below = (lax.ge, lax.lt) if len(linear(i)[0]) == 1 else (POINTWISE["ge"], POINTWISE["lt"])
                checks.append(Tile(at_least(tile.array, low) & below(tile.array, high), tile.axes))
            if isinstance(stride, Size):
                given.append((self.eval(i), self.number(stride)))
        terms, constant = self._place(operand, idx)
        offset: Array = jnp.asarray(constant, kind)
        # Scalars first, so that a program's base address is computed once.
        tiles = [*given, *((self.eval(t), k) for t, k in terms.items())]
        for tile, k in sorted(tiles, key=lambda p: len(p[0].axes)):
            step = tile.array.astype(kind) * jnp.asarray(k, kind)
            offset = offset + step if not tile.axes else self._added(offset, Tile(step, tile.axes), axes)
        shape = tuple(self.side(a) for a in axes)
        if offset.shape != shape:
            offset = jnp.broadcast_to(offset, shape)
        inside: Array | None = None
        for check in checks:
            spread = self.spread(check, axes)
            inside = spread if inside is None else inside & spread
        return offset, inside

    def _added(self, offset: Array, step: Tile, axes: tuple[Axis, ...]) -> Array:
        shape = tuple(self.side(a) for a in axes)
        whole = offset if offset.shape == shape else jnp.broadcast_to(offset, shape)
        return whole + self.spread(step, axes)

    def within(self, axis: Axis) -> Tile | None:
        """Which indices of the current tile lie inside of the axis; None if all do."""
        side = self.side(axis)
        fits = side == 1 if axis.size is not None else axis.extent % side == 0
        if fits or any(axis in s.whole for s in self.scopes):
            return None
        here = self._index(axis)
        return Tile(here.array < self.extent(axis), here.axes)

    # --- reductions -----------------------------------------------------------------------------

    def _reduce(self, r: Reduce) -> Tile:
        if not any(r.axis in s.sides for s in self.scopes):
            return self._reduced(r)
        # Inside of a sum over an axis of the same name and extent, of which one index is taken at a time.
        self.push({r.axis: jnp.int32(0)}, {r.axis: covering_tile(r.axis)})
        try:
            return self._reduced(r)
        finally:
            self.pop()

    def _reduced(self, r: Reduce) -> Tile:
        wide = self.wide(free_axes(r.body) | {r.axis})
        if is_sequential(r, wide) or not self._gathers() and as_sheared(r.body, r.axis, wide) is not None:
            return self._sequential(r)
        found = self.reduce_tile(r.kind, r.body, r.axis, r.dtype)
        return Tile(found.array != 0, found.axes) if r.kind in ("any", "all") else found

    def _gathers(self) -> bool:
        """Whether elements of a tile can be picked by an index."""
        return self.interpret or self.blocks is not None

    def reduce_tile(self, kind: str, body: Expr, axis: Axis, dtype: str, keep_nan: bool = True) -> Tile:
        """The reduction of `body` over the current tile of `axis`; any and all give 0 or 1 as int32.

        keep_nan: whether max and min must give NaN where they meet one, as PyTorch's do; the Triton
        lowering's do not by themselves.
        """
        if kind == "sum" and is_float(body.dtype):
            wide = self.wide(free_axes(body))
            product = as_product(body, axis, wide)
            if product is not None:
                return self.matmul(product, axis, dtype)
            sheared = as_sheared(body, axis, wide) if self._gathers() else None
            if sheared is not None:
                return self.sheared(sheared, axis, dtype)
            shifted = as_shifted(body, axis, wide)
            if shifted is not None:
                return self.shifted(shifted, axis, dtype) if self._gathers() else self._by_index(body, axis, dtype)
            product = as_vector_product(body, axis, wide)
            if product is not None and dtype in ("bf16", "f16") and self._is_worth_a_matrix(product, axis):
                return self.vector_matmul(product, axis, dtype)
        axes = self.sorted_axes(free_axes(body) | {axis})
        x = self.spread(self.eval(body), axes)
        if kind in ("any", "all"):
            x = x.astype(jnp.int32)
        inside = self.within(axis)
        if inside is not None:
            identity = jnp.full(x.shape, identity_of(kind, x.dtype))
            x = jnp.where(self.spread(inside, axes), x, identity)
        at = axes.index(axis) if axis in axes else None
        rest = tuple(a for a in axes if a != axis)
        if at is None:
            return Tile(x, rest)
        out = REDUCE[kind](x, at)
        if keep_nan and kind in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
            found = jnp.max((x != x).astype(jnp.int32), axis=at) > 0
            out = jnp.where(found, jnp.full_like(out, jnp.nan), out)
        return Tile(out, rest)

    def steady_sides(self, exprs: Iterable[Expr]) -> list[Side]:
        """The sides of matrix products in `exprs` that are computed, and are the same wherever this scope is."""
        here = self.scopes[-1]
        found: dict[Side, None] = {}
        for r in dict.fromkeys(n for e in exprs for n in reductions(e)):
            p = self._matrix_product(r)
            for factors in (p.left, p.right) if p is not None else ():
                raw = len(factors) == 1 and isinstance(factors[0], Load) and factors[0].dtype == r.dtype
                if not raw and not any(map(here.binds, factors)):
                    found[Side(factors, r.axis, r.dtype)] = None
        return [*found]

    def _matrix_product(self, r: Reduce) -> Product | None:
        """What `_reduce` makes a matrix product of, if it does."""
        wide = self.wide(free_axes(r.body) | {r.axis})
        if r.kind != "sum" or not is_float(r.body.dtype) or is_sequential(r, wide):
            return None
        p = as_product(r.body, r.axis, wide)
        if p is None and self._gathers():
            sheared = as_sheared(r.body, r.axis, wide)
            p = None if sheared is None else sheared.product
        return p if p is None else self._ranged(p, r.dtype)

    def matmul(self, p: Product, axis: Axis, dtype: str) -> Tile:
        """A sum of products as a matrix product of 2-D tiles."""
        left, right, scale = self._sides(p, axis, dtype)
        whole = self._product(left, right, axis)
        for n, factors in enumerate((p.left, p.right)):
            if dtype in ("bf16", "f16") and self._is_of_several(factors, axis):
                rest = self._rounded_off(Side(factors, axis, dtype), (left, right)[n])
                more = self._product(rest, right, axis) if n == 0 else self._product(left, rest, axis)
                whole = Tile(whole.array + more.array, whole.axes)
        return self._scaled(whole, scale)

    def _is_of_several(self, factors: Sequence[Expr], axis: Axis) -> bool:
        """Whether a side of a product of features is one itself, of rows (features that a row and a column have
        together) or of a layer's weights: another kernel has it on the other side, or on none, and its scores have to
        agree with the sums of rows that this one makes of them. So what is rounded off is multiplied as well."""
        alone = {a for a in (*self.order, *self.features) if self.side(a) == 1} | {axis}
        return axis not in self.order and sum(axis in free_axes(f) and not free_axes(f) <= alone for f in factors) > 1

    def _rounded_off(self, s: Side, rounded: Tile) -> Tile:
        """What the type of a product leaves of one of its sides, in that type."""
        exact = self.side_tile(replace(s, dtype=self.compute))
        rest = exact.array - self.spread(rounded, exact.axes).astype(exact.array.dtype)
        return Tile(rest.astype(rounded.array.dtype), exact.axes)

    def sheared(self, s: Sheared, axis: Axis, dtype: str) -> Tile:
        """A matrix product over the window of positions that the tile has, and each element's place in it."""
        kept, gone, back = self._push_window(s)
        try:
            left, right, scale = self._sides(s.product, axis, dtype)
            of_window = tuple(f for f in scale if s.position in ref_names(f))
            out = self._scaled(self._product(left, right, axis), of_window)
            scale = tuple(f for f in scale if f not in of_window)
        finally:
            self.pop()
        along = out.axes.index(s.window)
        axes = tuple(s.gone if a == s.window else a for a in out.axes)
        shape = (kept, gone) if along else (gone, kept)
        here, other = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (along, 1 - along))
        at = here + jnp.int32(s.sign) * other + jnp.int32(back)
        return self._scaled(Tile(gather(out.array, at, along, self.interpret), axes), scale)

    def shifted(self, s: Sheared, axis: Axis, dtype: str) -> Tile:
        """The other way round: each element takes its place in the window, and the product is over that."""
        weights = self.side_tile(Side(s.product.left, axis, dtype))
        kept, gone, back = self._push_window(s)
        try:
            along = weights.axes.index(s.gone)
            width = self.side(s.window)
            shape = (kept, width) if along else (width, kept)
            here, other = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (along, 1 - along))
            at = here - jnp.int32(s.sign) * other - jnp.int32(back) + self._unsteady(axis)
            inside = (at >= 0) & (at < jnp.int32(gone))
            placed = gather(weights.array, at & jnp.int32(gone - 1), along, self.interpret)
            placed = jnp.where(inside, placed, jnp.zeros_like(placed))
            axes = tuple(s.window if a == s.gone else a for a in weights.axes)
            return self._product(Tile(placed, axes), self.side_tile(Side(s.product.right, axis, dtype)), s.window)
        finally:
            self.pop()

    def _unsteady(self, axis: Axis) -> Array:
        """0, of which compilers have to believe that it changes along a loop: what has it for a term is not held in
        registers from before the loop, which take more than it does to make it again."""
        start = self.start(axis)
        return jnp.int32(0) if start is None else lax.shift_right_logical(start, jnp.int32(30))

    def _push_window(self, s: Sheared) -> tuple[int, int, int]:
        """Bind the window of positions that the tile has; the tile's sides, and how far the first position lies before
        that of the tile's first element."""
        kept, gone = self.side(s.kept), self.side(s.gone)
        back = kept - 1 if s.sign < 0 else 0
        low = jnp.int32(-back)
        for a, sign in ((s.gone, 1), (s.kept, s.sign)):
            start = self.start(a)
            low = low if start is None else low + start * jnp.int32(sign)
        width = s.width(kept, gone)
        self.places[s.window] = s.gone
        scope = self.push({}, {s.window: width})
        scope.refs[s.position] = Tile(lax.iota(jnp.int32, width) + low, (s.window,))
        return kept, gone, back

    def _by_index(self, body: Expr, axis: Axis, dtype: str) -> Tile:
        """The sum of `body` over the current tile of `axis`, one index at a time."""
        start, each = self.start(axis), Axis("%each", self.side(axis))
        scope = self.push({}, {})
        try:
            scope.refs["%start"] = Tile(jnp.int32(0) if start is None else start, ())
            place = op("add", ref("%start", (), "i64"), index(each), dtype="i64")
            inside = op("lt", place, const(axis.extent, "i64") if axis.size is None else axis.size, dtype="bool")
            one = select(inside, substitute(body, {axis: place}), const(0.0, body.dtype))
            each_sum = raw_reduce("sum", each, one, dtype)
            assert isinstance(each_sum, Reduce)
            return self._sequential(each_sum)
        finally:
            self.pop()

    def _product(self, left: Tile, right: Tile, axis: Axis) -> Tile:
        """left · right, summed over `axis`."""
        self.products += 1
        rows = tuple(a for a in left.axes if a != axis)
        columns = tuple(a for a in right.axes if a != axis)
        if self.sorted_axes((*rows, *columns)) == (*columns, *rows):
            # The other way round it needs no transposition, which goes through shared memory.
            left, right, rows, columns = right, left, columns, rows
        contract = right.axes.index(axis) if len(right.axes) == 2 else 0
        a = self._matrix(left, (*rows, axis), len(rows))
        b = self._matrix(right, right.axes if len(right.axes) == 2 else (axis, *columns), 1)
        if self.interpret and a.dtype == jnp.bfloat16:
            # Some of XLA's products on a CPU know no bfloat16. Those of the same numbers in float32 are the same; XLA
            # would take a cast there and back for nothing.
            a, b = (lax.reduce_precision(x.astype(JNP[self.compute]), 8, 7) for x in (a, b))
        out = lax.dot_general(
            a,
            b,
            (((1,), (contract,)), ((), ())),
            precision=self.precision if a.dtype == jnp.float32 else None,
            preferred_element_type=JNP[self.compute],
        )
        if self.zero is not None and axis not in self.order:
            # From registers that are written now: of those of a product that begins with nothing, ptxas believes that
            # they are held since the kernel began.
            out = out + self.zero.astype(out.dtype)
        shape = tuple(self.side(x) for x in (*rows, *columns))
        axes = self.sorted_axes((*rows, *columns))
        return self._transposed(Tile(out.reshape(shape) if out.shape != shape else out, (*rows, *columns)), axes)

    def _scaled(self, tile: Tile, scale: tuple[Expr, ...]) -> Tile:
        for f in scale:
            t = self.eval(f)
            union = self.sorted_axes({*tile.axes, *t.axes})
            tile = Tile(self.spread(tile, union) * self.spread(t, union), union)
        return tile

    def _is_worth_a_matrix(self, p: Product, axis: Axis) -> bool:
        """Whether the matrix of a vector product is large enough for the matrix unit, and lies in memory in its type:
        numbers that are computed keep their float32.
        """
        columns = self.wide(a for f in p.right for a in free_axes(f)) - {axis}
        loaded = len(p.right) == 1 and isinstance(p.right[0], Load)
        return loaded and self.side(axis) >= ROWS and math.prod(map(self.side, columns)) >= ROWS

    def vector_matmul(self, p: Product, axis: Axis, dtype: str) -> Tile:
        """A vector times a matrix as a matrix product of equal rows.

        The arithmetic is wasted, but costs less than loading the matrix; and what feeds a matrix product is
        loaded ahead of its use, asynchronously.
        """
        vector, matrix, scale = self._sides(p, axis, dtype)
        rows = Axis("%rows", ROWS)
        self.push({}, {rows: ROWS})
        try:
            spread = Tile(lax.broadcast_in_dim(vector.array, (ROWS, self.side(axis)), (1,)), (rows, axis))
            out = self._product(spread, matrix, axis)
            first = self.spread(Tile(lax.iota(jnp.int32, ROWS) == 0, (rows,)), out.axes)
            one = jnp.sum(jnp.where(first, out.array, jnp.zeros_like(out.array)), axis=out.axes.index(rows))
        finally:
            self.pop()
        return self._scaled(Tile(one, tuple(a for a in out.axes if a != rows)), scale)

    def _sides(self, p: Product, axis: Axis, dtype: str) -> tuple[Tile, Tile, tuple[Expr, ...]]:
        """Both sides of a matrix product, and what the product is multiplied by."""
        p = self._ranged(p, dtype)
        left, right = (Side(factors, axis, dtype) for factors in (p.left, p.right))
        return self.side_tile(left), self.side_tile(right), p.scale

    def _ranged(self, p: Product, dtype: str) -> Product:
        """A product whose sides stay in the range of their type."""
        if dtype != "f16":
            return p
        return within_sides(p, self.wide(a for f in (*p.left, *p.right, *p.scale) for a in free_axes(f)))

    def side_tile(self, s: Side) -> Tile:
        """One side of a matrix product, 0 beyond the end of the axis, in the type it is multiplied in."""
        given = next((scope.memo[s] for scope in reversed(self.scopes) if s in scope.memo), None)
        if given is not None:
            return given
        side, axis, dtype = s.factors, s.axis, s.dtype
        narrow = JNP[dtype] if dtype in ("bf16", "f16") else JNP[self.compute]
        if len(side) == 1 and isinstance(side[0], Load) and is_float(side[0].dtype):
            raw = self._raw(side[0])
            return Tile(raw.array.astype(narrow), raw.axes)
        tiles = [self.eval(f) for f in side]
        axes = self.sorted_axes({a for t in tiles for a in t.axes})
        x = self.spread(tiles[0], axes)
        for t in tiles[1:]:
            x = x * self.spread(t, axes)
        inside = self.within(axis)
        if inside is not None:
            x = jnp.where(self.spread(inside, axes), x, jnp.zeros_like(x))
        return Tile(x.astype(narrow), axes)

    def _matrix(self, t: Tile, axes: tuple[Axis, ...], split: int) -> Array:
        x = self._transposed(t, axes).array
        sides = [self.side(a) for a in axes]
        shape = (math.prod(sides[:split]), math.prod(sides[split:]))
        if x.shape == shape:
            return x
        if x.dtype.itemsize == 2 and min(sides) < SWIZZLED:
            # Triton would take the tile to shared memory as it is, and fails ("Illegal shared layout"); it does not
            # look through a change of type.
            bits = lax.bitcast_convert_type(x, jnp.int16).reshape(shape)
            return lax.bitcast_convert_type(bits, x.dtype)
        return x.reshape(shape)

    def _transposed(self, t: Tile, axes: tuple[Axis, ...]) -> Tile:
        if t.axes == axes:
            return t
        return Tile(lax.transpose(t.array, tuple(t.axes.index(a) for a in axes)), axes)

    def _sequential(self, r: Reduce) -> Tile:
        """One index (or one chunk: for a long matrix product, and where tiles are small) of the axis at a time."""
        wide = self.wide(free_axes(r.body) | {r.axis})
        whole = is_matrix_product if self._gathers() else as_product
        product = r.kind == "sum" and bool(whole(r.body, r.axis, wide))
        axes = self.sorted_axes(free_axes(r))
        shape = tuple(self.side(a) for a in axes)
        side = CHUNK if product else 1
        places = self.places
        if not product and r.kind == "sum" and is_float(r.body.dtype) and not reductions(r.body):
            most, extent = AT_ONCE // math.prod(shape), power_of_two(r.axis.extent)
            side = min(most, extent) if most >= min(MANY, extent) else 1
            self.places = {**places, r.axis: FIRST}  # elsewhere in the kernel it may be any dimension
        steps = -(-r.axis.extent // side)
        held = jnp.int32 if r.kind in ("any", "all") else self._type(r)
        total = jnp.full(shape, identity_of(r.kind, held))
        probe = self.push({r.axis: jnp.int32(0)}, {r.axis: side})
        self.pop()
        self.hoist([r.body], probe)

        def step(n: Array | int, total: Array) -> Array:
            self.push({r.axis: jnp.asarray(n, jnp.int32) * side}, {r.axis: side})
            if side == 1:
                t = self.eval(r.body)
                x = self.spread(t, axes).astype(held)
            else:
                x = self.spread(self.reduce_tile(r.kind, r.body, r.axis, r.dtype), axes).astype(held)
            self.pop()
            return self.combined(r.kind, total, x)

        if steps <= UNROLL and (self.unrolled == 1 or self.products < MOST_PRODUCTS):
            self.unrolled *= steps
            for n in range(steps):
                total = step(n, total)
            self.unrolled //= steps
        else:
            total = lax.fori_loop(0, steps, step, total)
        self.places = places
        return Tile(total != 0 if r.kind in ("any", "all") else total, axes)


def _inverse(e: Expr) -> float | None:
    """1 / e for a floating constant whose inverse is a normal float32: a division takes half a dozen instructions."""
    if isinstance(e, Const) and is_float(e.dtype) and 2**-100 < abs(e.value) < 2**100:
        return 1 / e.value
    return None


def _is_narrow(e: Expr) -> bool:
    """Whether LLVM would divide these numbers as pairs of 16 bits."""
    span = bounds(e)
    return span is not None and -(2**15) <= span[0] and span[1] < 2**16


def never() -> Array:
    """0, of which LLVM has to believe that it may be 2 ** 20.

    ptxas (12.8 to 13.0) loses the constant of some sums of 16-bit pairs, which LLVM makes where it divides narrow
    numbers (`is_miscompiled` in cubin.py knows such code).
    """
    return lax.shift_left(lax.shift_right_logical(pl.program_id(0), jnp.int32(30)), jnp.int32(20))


def _inside_reduction(e: Expr, loop: Scope) -> bool:
    """Integer address arithmetic is left where it is used."""
    return isinstance(e, Op) and not is_float(e.dtype) and not loads(e)


def identity_of(kind: str, dtype: Any) -> Array:
    """The identity of a reduction in a jax type."""
    value = IDENTITY[kind]
    if isinstance(value, float) and math.isinf(value) and not jnp.issubdtype(dtype, jnp.floating):
        info = jnp.iinfo(dtype)
        value = info.min if value < 0 else info.max
    return jnp.asarray(value, dtype)


COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": lax.add,
    "prod": lax.mul,
    "max": POINTWISE["max"],
    "min": POINTWISE["min"],
    "any": lax.max,
    "all": lax.min,
}
REDUCE: dict[str, Callable[[Array, int], Array]] = {
    "sum": lambda x, at: jnp.sum(x, axis=at),
    "prod": lambda x, at: jnp.prod(x, axis=at),
    "max": lambda x, at: jnp.max(x, axis=at),
    "min": lambda x, at: jnp.min(x, axis=at),
    "any": lambda x, at: jnp.max(x, axis=at),
    "all": lambda x, at: jnp.min(x, axis=at),
}
