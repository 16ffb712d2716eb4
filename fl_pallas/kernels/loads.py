"""Loads of a program: addresses, masks, and tiles that the copy engine brings."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

from ..schedule.build import substitute
from ..schedule.dtype import itemsize
from ..schedule.expr import Axis, Const, Expr, Index, Load, Op, Size, free_axes, index, walk
from ..schedule.integer import from_linear, is_inside, linear
from .blocks import Block, block_load, block_shape, flattened
from .native import direct
from .pointwise import POINTWISE
from .tile import JNP, Context, Operand, Tile, seen, stored_type, transposed


def load(ctx: Context, e: Load) -> Tile:
    """A load in its stored type, 0 outside of the tensor and of the axes' extents."""
    return ctx.memoised(("raw", e), e, lambda: _loaded(ctx, e))


def _loaded(ctx: Context, e: Load) -> Tile:
    operand = ctx.operands[e.source]
    axes = ctx.sorted_axes(free_axes(e))
    if operand.dtype in ("i8", "u8") and (shared := _shared_by(ctx, e.index)) is not None:
        return _repeated(ctx, e, *shared)
    if any(ctx.group(n) for i in e.index for n in walk(i)):
        # What is of a group, and of no member, is loaded once for all of a tile.
        axes = ctx.sorted_axes({a for i in e.index for a in ctx.eval(i).axes})
    whole = len(axes) == len(ctx.wide(free_axes(e)))
    if whole and (block := _block(ctx, e, axes)) is not None:
        return Tile(block, axes)
    offset, inside = address(ctx, operand, e.index, axes)
    reference = operand.ref.at[offset]  # type: ignore[attr-defined]
    zero = None if inside is None else jnp.zeros((), stored_type(operand.dtype))
    loaded = plgpu.load(reference, mask=inside, other=zero)
    return Tile(direct(loaded) if _is_scattered(ctx, operand, e.index) else loaded, axes)


def _shared_by(ctx: Context, idx: tuple[Expr, ...]) -> tuple[Axis, int] | None:
    """An axis of which so many neighbours, a power of two, have one element of what lies side by side (two numbers of
    four bits a byte); None if none has."""
    last = idx[-1] if idx else None
    if not isinstance(last, Op) or last.name != "floordiv" or not isinstance(last.args[0], Index):
        return None
    axis, number = last.args[0].axis, last.args[1]
    if not isinstance(number, Const) or axis.size is not None or any(axis in free_axes(i) for i in idx[:-1]):
        return None
    n, side = int(number.value), ctx.side(axis)
    return (axis, n) if 1 < n < min(side, axis.extent) and n & (n - 1) == 0 and side % n == 0 else None


def _repeated(ctx: Context, e: Load, axis: Axis, n: int) -> Tile:
    """A load of each element that `n` indices of an axis share, once; by each of them it would be a load of its own."""
    few = Axis(f"%{axis.name}/{n}", -(-axis.extent // n))
    ctx.places[few] = axis
    start = ctx.start(axis)
    ctx.push({} if start is None else {few: lax.div(start, jnp.int32(n))}, {few: ctx.side(axis) // n})
    try:
        shared = substitute(e, {}, {e.index[-1]: index(few)})
        assert isinstance(shared, Load)
        once = load(ctx, shared)
    finally:
        ctx.pop()
    at = once.axes.index(few)
    shape = (*once.array.shape[: at + 1], n, *once.array.shape[at + 1 :])
    every = lax.broadcast_in_dim(once.array, shape, tuple(d for d in range(len(shape)) if d != at + 1))
    whole = (*shape[:at], shape[at] * n, *shape[at + 2 :])
    return Tile(every.reshape(whole), tuple(axis if a == few else a for a in once.axes))


def _is_scattered(ctx: Context, operand: Operand, idx: tuple[Expr, ...]) -> bool:
    """Whether elements of a tile have places of their own, of a table: no neighbours along an axis lie side by
    side, but those that all diagonals share."""
    if ctx.blocks is None or ctx.interpret or itemsize(operand.dtype) not in (2, 4):
        return False
    terms, _ = _place(operand, idx)
    wide = {t: ctx.wide(free_axes(t)) for t in terms}
    beside = {*(wide[t] for t in terms if len(wide[t]) == 1 and abs(terms[t]) == 1)}
    return len(beside) > 1 or not beside and any(len(own) > 1 for own in wide.values())


def _place(operand: Operand, idx: tuple[Expr, ...]) -> tuple[dict[Expr, int], int]:
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


def _block(ctx: Context, e: Load, axes: tuple[Axis, ...]) -> Array | None:
    """A tile that the copy engine brings, of rows by features, or along a loop; None where it cannot."""
    operand = ctx.operands[e.source]
    if ctx.blocks is None or e.source not in ctx.blocks.positions or operand.offset:
        return None
    if len(axes) == 2 and all(a in ctx.order for a in axes):
        return None  # tiles of rows by keys go to registers: through shared memory they take longer
    vector = len(axes) == 1 and operand.dtype == "f32" and any(axes[0] in s.starts for s in ctx.scopes[1:])
    if len(axes) != 2 and not vector:
        return None
    sides = {a: ctx.side(a) for a in axes}
    ragged = {a for a in axes if ctx.within(a) is not None}
    flat = flattened(e.index, operand.shape, operand.strides)
    index, extents, strides = zip(*((f.index, f.extent, f.stride) for f in flat), strict=True)
    shape = block_shape(index, extents, strides, operand.dtype, sides, ragged)
    if shape is None:
        return None
    extent = tuple(sides[a] for a in shape.axes)
    box = (*(1 for _ in shape.dims[: -len(extent)]), *extent)
    dims = tuple(flat[d].dims for d in shape.dims)
    number = ctx.blocks.number(Block(ctx.blocks.positions[e.source], dims, box, operand.dtype))
    first = [_first(ctx, index[d]) for d in shape.dims]
    tile = block_load(number, first, extent, JNP[operand.dtype])
    return transposed(Tile(tile, shape.axes), axes).array


def _first(ctx: Context, i: Expr) -> Array:
    """The first of the indices that an index expression takes over the current tile."""
    terms, constant = linear(i)
    at = jnp.int32(constant)
    for t, k in terms.items():
        first = ctx.start(t.axis) if isinstance(t, Index) else ctx.eval(t).array
        at = at if first is None else at + first.astype(jnp.int32) * jnp.int32(k)
    return at


def address(
    ctx: Context, operand: Operand, idx: tuple[Expr, ...], axes: tuple[Axis, ...]
) -> tuple[Array, Array | None]:
    """Flat offsets over `axes`, and where they are inside of the tensor (None: everywhere)."""
    ends = zip(map(seen, operand.shape), map(seen, operand.strides), strict=True)
    kind = jnp.int64 if operand.offset + sum(max(0, (n - 1) * s) for n, s in ends) >= 2**31 else jnp.int32
    checks: list[Tile] = [m for a in axes if (m := ctx.within(a)) is not None]
    given: list[tuple[Tile, int | Array]] = []
    for i, n, stride in zip(idx, operand.shape, operand.strides, strict=True):
        if not is_inside(i, n):
            tile = ctx.eval(i)
            low, high = jnp.zeros_like(tile.array), jnp.full_like(tile.array, ctx.number(n))
            # Triton's load is as wide as it knows a mask to be alike, which it knows of one term rightly.
            at_least, below = (lax.ge, lax.lt) if len(linear(i)[0]) == 1 else (POINTWISE["ge"], POINTWISE["lt"])
            checks.append(Tile(at_least(tile.array, low) & below(tile.array, high), tile.axes))
        if isinstance(stride, Size):
            given.append((ctx.eval(i), ctx.number(stride)))
    terms, constant = _place(operand, idx)
    offset: Array = jnp.asarray(constant, kind)
    # Scalars first, so that a program's base address is computed once.
    tiles = [*given, *((ctx.eval(t), k) for t, k in terms.items())]
    for tile, k in sorted(tiles, key=lambda p: len(p[0].axes)):
        step = tile.array.astype(kind) * jnp.asarray(k, kind)
        offset = offset + step if not tile.axes else _added(ctx, offset, Tile(step, tile.axes), axes)
    shape = ctx.shape(axes)
    if offset.shape != shape:
        offset = jnp.broadcast_to(offset, shape)
    inside: Array | None = None
    for check in checks:
        spread = ctx.spread(check, axes)
        inside = spread if inside is None else inside & spread
    return offset, inside


def _added(ctx: Context, offset: Array, step: Tile, axes: tuple[Axis, ...]) -> Array:
    shape = ctx.shape(axes)
    whole = offset if offset.shape == shape else jnp.broadcast_to(offset, shape)
    return whole + ctx.spread(step, axes)
