"""Sums of products on tiles as matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from ..schedule.dtype import is_float
from ..schedule.expr import Axis, Expr, Load, free_axes, ref_names
from ..schedule.inner import PARTS, ROWS, Product, Sheared, multiplied_in, parts_of, within_sides
from .loads import load
from .native import uncertain
from .skew import skewed
from .tile import JNP, Context, Tile, transposed

# The least side of a tile that Triton takes to shared memory for a product without its sides being multiplied out.
SWIZZLED = 8
# Numbers of bfloat16, 8 bits each, that a number of TF32 is the sum of, and more.
FEW = 2
# Precisions of products that are as exact as float32.
EXACT = (lax.Precision.HIGHEST, lax.DotAlgorithmPreset.TF32_TF32_F32_X3)


@dataclass(frozen=True)
class Side:
    """One side of a matrix product.

    Attributes:
      factors: which it is the product of.
      axis: what the product sums over.
      dtype: in which it is multiplied.
      part: which of its parts this is; None if it is multiplied whole.
    """

    factors: tuple[Expr, ...]
    axis: Axis
    dtype: str
    part: int | None = None


def matmul(ctx: Context, p: Product, axis: Axis, dtype: str) -> Tile:
    """A sum of products as a matrix product of 2-D tiles."""
    of_range = ranged(ctx, p, dtype)
    sides = sides_of(of_range, axis, dtype)
    if "parts" in (s.dtype for s in sides):
        own, other = ([side_tile(ctx, part) for part in parts_of_side(ctx, s)] for s in sides)
        return _scaled(ctx, _by_parts(ctx, own, other, axis), p.scale)
    left, right = (side_tile(ctx, s) for s in sides)
    whole = _product(ctx, left, right, axis)
    for n, factors in enumerate((p.left, p.right)):
        if dtype in ("bf16", "f16") and _is_of_several(ctx, factors, axis):
            rest = _rounded_off(ctx, Side(factors, axis, dtype), (left, right)[n])
            more = _product(ctx, rest, right, axis) if n == 0 else _product(ctx, left, rest, axis)
            whole = Tile(whole.array + more.array, whole.axes)
    return _scaled(ctx, whole, of_range.scale)


def _by_parts(ctx: Context, left: Sequence[Tile], right: Sequence[Tile], axis: Axis) -> Tile:
    """A product of sums of numbers of 16 bits, which the matrix unit takes at twice the rate of those in TF32; products
    that are below the last bit of the whole are left out.
    """
    count = _count(ctx)
    pairs = [(m, n) for m in range(len(left)) for n in range(len(right)) if m + n < count]
    smallest_first = sorted(pairs, key=sum, reverse=True)
    *rest, whole = (_product(ctx, left[m], right[n], axis) for m, n in smallest_first)
    small = rest[0].array
    for t in rest[1:]:
        small = small + t.array
    # The first product knows what becomes of infinities, and of NaN; parts of them, or zeros beside them, make others.
    array = whole.array + jnp.where(jnp.abs(small) < jnp.inf, small, jnp.zeros_like(small))
    return Tile(array, whole.axes)


def _count(ctx: Context) -> int:
    """How many parts make what PyTorch multiplies float32 as."""
    return PARTS if ctx.precision in EXACT else FEW


def _parts(ctx: Context, t: Tile) -> list[Tile]:
    """The numbers of bfloat16 that float32 is the sum of, the largest first."""
    rest, parts = t.array, list[Tile]()
    for _ in range(_count(ctx)):
        part = lax.reduce_precision(rest, 8, 7) if ctx.interpret else rest.astype(jnp.bfloat16).astype(jnp.float32)
        rest = rest - part
        parts.append(Tile(part.astype(jnp.bfloat16), t.axes))
    return parts


def parts_of_side(ctx: Context, s: Side) -> tuple[Side, ...]:
    """A side by its parts, where it is multiplied so."""
    if s.dtype != "parts":
        return (s,)
    count = _count(ctx)
    if loaded := parts_of(s.factors[0]) if len(s.factors) == 1 else ():
        return tuple(Side((part,), s.axis, "bf16") for part in loaded[:count])
    return tuple(replace(s, part=n) for n in range(count))


def _is_of_several(ctx: Context, factors: Sequence[Expr], axis: Axis) -> bool:
    """Whether a side of a product of features is one itself, of rows (features that a row and a column have
    together) or of a layer's weights: another kernel has it on the other side, or on none, and its scores have to
    agree with the sums of rows that this one makes of them. So what is rounded off is multiplied as well."""
    alone = {a for a in (*ctx.order, *ctx.features) if ctx.side(a) == 1} | {axis}
    return axis not in ctx.order and sum(axis in free_axes(f) and not free_axes(f) <= alone for f in factors) > 1


def _rounded_off(ctx: Context, s: Side, rounded: Tile) -> Tile:
    """What the type of a product leaves of one of its sides, in that type."""
    exact = side_tile(ctx, replace(s, dtype=ctx.compute))
    rest = exact.array - ctx.spread(rounded, exact.axes).astype(exact.array.dtype)
    return Tile(rest.astype(rounded.array.dtype), exact.axes)


def sheared(ctx: Context, s: Sheared, axis: Axis, dtype: str) -> Tile:
    """A matrix product over the window of positions that the tile has, and each element's place in it."""
    kept, gone, back = _push_window(ctx, s)
    try:
        left, right, scale = _sides(ctx, s.product, axis, dtype)
        of_window = tuple(f for f in scale if s.position in ref_names(f))
        out = _scaled(ctx, _product(ctx, left, right, axis), of_window)
        scale = tuple(f for f in scale if f not in of_window)
    finally:
        ctx.pop()
    along = out.axes.index(s.window)
    axes = tuple(s.gone if a == s.window else a for a in out.axes)
    shape = (kept, gone) if along else (gone, kept)
    return _scaled(ctx, Tile(skewed(out.array, shape, along, s.sign, back, ctx.interpret), axes), scale)


def shifted(ctx: Context, s: Sheared, axis: Axis, dtype: str) -> Tile:
    """The other way round: each element takes its place in the window, and the product is over that."""
    weights = side_tile(ctx, Side(s.product.left, axis, dtype))
    kept, gone, back = _push_window(ctx, s)
    try:
        along, width = weights.axes.index(s.gone), ctx.side(s.window)
        shape = (kept, width) if along else (width, kept)
        # What lies before its row's first place, or behind its last one, is taken from behind the weights.
        behind = _with_zeros(weights.array, along, width)
        placed = skewed(behind, shape, along, -s.sign, -back, ctx.interpret, _unsteady(ctx, axis))
        axes = tuple(s.window if a == s.gone else a for a in weights.axes)
        return _product(ctx, Tile(placed, axes), side_tile(ctx, Side(s.product.right, axis, dtype)), s.window)
    finally:
        ctx.pop()


def _with_zeros(x: Array, axis: int, extent: int) -> Array:
    """`x` with zeros behind it along `axis`, twice as many elements until there are `extent` of them."""
    while x.shape[axis] < extent:
        both = jnp.stack([x, jnp.zeros_like(x)], axis=-1).transpose((2, 0, 1) if axis == 0 else (0, 2, 1))
        x = both.reshape((2 * x.shape[0], x.shape[1]) if axis == 0 else (x.shape[0], 2 * x.shape[1]))
    return x


def _unsteady(ctx: Context, axis: Axis) -> Array:
    """0, of which compilers have to believe that it changes along a loop: what has it for a term is not held in
    registers from before the loop, which take more than it does to make it again."""
    start = ctx.start(axis)
    return jnp.int32(0) if start is None else lax.shift_right_logical(start, jnp.int32(30))


def _push_window(ctx: Context, s: Sheared) -> tuple[int, int, int]:
    """Bind the window of positions that the tile has; the tile's sides, and how far the first position lies before
    that of the tile's first element."""
    kept, gone = ctx.side(s.kept), ctx.side(s.gone)
    back = kept - 1 if s.sign < 0 else 0
    low = jnp.int32(-back)
    for a, sign in ((s.gone, 1), (s.kept, s.sign)):
        start = ctx.start(a)
        low = low if start is None else low + start * jnp.int32(sign)
    width = s.width(kept, gone)
    ctx.places[s.window] = s.gone
    scope = ctx.push({}, {s.window: width})
    scope.refs[s.position] = Tile(lax.iota(jnp.int32, width) + low, (s.window,))
    return kept, gone, back


def is_worth_a_matrix(ctx: Context, p: Product, axis: Axis) -> bool:
    """Whether the matrix of a vector product is large enough for the matrix unit, and lies in memory in its type:
    numbers that are computed keep their float32.
    """
    columns = ctx.wide(a for f in p.right for a in free_axes(f)) - {axis}
    loaded = len(p.right) == 1 and isinstance(p.right[0], Load)
    return loaded and ctx.side(axis) >= ROWS and math.prod(ctx.shape(columns)) >= ROWS


def vector_matmul(ctx: Context, p: Product, axis: Axis, dtype: str) -> Tile:
    """A vector times a matrix as a matrix product of equal rows.

    The arithmetic is wasted, but costs less than loading the matrix; and what feeds a matrix product is
    loaded ahead of its use, asynchronously.
    """
    vector, matrix, scale = _sides(ctx, p, axis, dtype)
    rows = Axis("%rows", ROWS)
    ctx.push({}, {rows: ROWS})
    try:
        spread = Tile(lax.broadcast_in_dim(vector.array, (ROWS, ctx.side(axis)), (1,)), (rows, axis))
        out = _product(ctx, spread, matrix, axis)
        first = ctx.spread(Tile(lax.iota(jnp.int32, ROWS) == 0, (rows,)), out.axes)
        one = jnp.sum(jnp.where(first, out.array, jnp.zeros_like(out.array)), axis=out.axes.index(rows))
    finally:
        ctx.pop()
    return _scaled(ctx, Tile(one, tuple(a for a in out.axes if a != rows)), scale)


def _sides(ctx: Context, p: Product, axis: Axis, dtype: str) -> tuple[Tile, Tile, tuple[Expr, ...]]:
    """Both sides of a matrix product, and what the product is multiplied by."""
    p = ranged(ctx, p, dtype)
    left, right = sides_of(p, axis, dtype)
    return side_tile(ctx, left), side_tile(ctx, right), p.scale


def sides_of(p: Product, axis: Axis, dtype: str) -> tuple[Side, Side]:
    """The sides of a product of type `dtype`, each in the type that it is multiplied in."""
    left, right = multiplied_in(p, dtype)
    return Side(p.left, axis, left), Side(p.right, axis, right)


def ranged(ctx: Context, p: Product, dtype: str) -> Product:
    """A product whose sides stay in the range of their type."""
    if dtype != "f16":
        return p
    return within_sides(p, ctx.wide(a for f in (*p.left, *p.right, *p.scale) for a in free_axes(f)))


def side_tile(ctx: Context, s: Side) -> Tile:
    """One side of a matrix product, 0 beyond the end of the axis, in the type it is multiplied in."""
    given = next((scope.memo[s] for scope in reversed(ctx.scopes) if s in scope.memo), None)
    if given is not None:
        return given
    if s.part is not None:
        return _parts(ctx, side_tile(ctx, replace(s, part=None)))[s.part]
    side, axis, dtype = s.factors, s.axis, s.dtype
    narrow = JNP[dtype] if dtype in ("bf16", "f16") else JNP[ctx.compute]
    if len(side) == 1 and isinstance(side[0], Load) and is_float(side[0].dtype):
        stored = load(ctx, side[0])
        return Tile(stored.array.astype(narrow), stored.axes)
    tiles = [ctx.eval(f) for f in side]
    axes = ctx.sorted_axes({a for t in tiles for a in t.axes})
    x = ctx.spread(tiles[0], axes)
    for t in tiles[1:]:
        x = x * ctx.spread(t, axes)
    inside = ctx.within(axis)
    if inside is not None:
        x = jnp.where(ctx.spread(inside, axes), x, jnp.zeros_like(x))
    masked = [a for a in axes if a in ctx.order or a == axis and inside is not None]
    if x.dtype == jnp.float32 and not ctx.interpret and any(map(ctx.is_known, masked)):
        x = uncertain(x)
    return Tile(x.astype(narrow), axes)


def _product(ctx: Context, left: Tile, right: Tile, axis: Axis) -> Tile:
    """left · right, summed over `axis`."""
    if left.array.dtype != right.array.dtype:
        own, other = ([t] if t.array.dtype == jnp.bfloat16 else _parts(ctx, t) for t in (left, right))
        return _by_parts(ctx, own, other, axis)
    ctx.products += 1
    rows = tuple(a for a in left.axes if a != axis)
    columns = tuple(a for a in right.axes if a != axis)
    if ctx.sorted_axes((*rows, *columns)) == (*columns, *rows):
        # The other way round it needs no transposition, which goes through shared memory.
        left, right, rows, columns = right, left, columns, rows
    contract = right.axes.index(axis) if len(right.axes) == 2 else 0
    a = _matrix(ctx, left, (*rows, axis), len(rows))
    b = _matrix(ctx, right, right.axes if len(right.axes) == 2 else (axis, *columns), 1)
    if ctx.interpret and a.dtype == jnp.bfloat16:
        # Some of XLA's products on a CPU know no bfloat16. Those of the same numbers in float32 are the same; XLA
        # would take a cast there and back for nothing.
        a, b = (lax.reduce_precision(x.astype(JNP[ctx.compute]), 8, 7) for x in (a, b))
    out = lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=ctx.precision if a.dtype == jnp.float32 else None,
        preferred_element_type=JNP[ctx.compute],
    )
    if ctx.zero is not None and axis not in ctx.order:
        # From registers that are written now: of those of a product that begins with nothing, ptxas believes that
        # they are held since the kernel began.
        out = out + ctx.zero.astype(out.dtype)
    shape = ctx.shape((*rows, *columns))
    axes = ctx.sorted_axes((*rows, *columns))
    return transposed(Tile(out.reshape(shape) if out.shape != shape else out, (*rows, *columns)), axes)


def _scaled(ctx: Context, tile: Tile, scale: tuple[Expr, ...]) -> Tile:
    for f in scale:
        t = ctx.eval(f)
        union = ctx.sorted_axes({*tile.axes, *t.axes})
        tile = Tile(ctx.spread(tile, union) * ctx.spread(t, union), union)
    return tile


def _matrix(ctx: Context, t: Tile, axes: tuple[Axis, ...], split: int) -> Array:
    x = transposed(t, axes).array
    sides = ctx.shape(axes)
    shape = (math.prod(sides[:split]), math.prod(sides[split:]))
    if x.shape == shape:
        return x
    if x.dtype.itemsize == 2 and min(sides) < SWIZZLED:
        # Triton would take the tile to shared memory as it is, and fails ("Illegal shared layout"); it does not
        # look through a change of type.
        bits = lax.bitcast_convert_type(x, jnp.int16).reshape(shape)
        return lax.bitcast_convert_type(bits, x.dtype)
    return x.reshape(shape)
