"""Running sums of tiles; along rows as products with a triangle of ones.

Triton's own scan along rows exchanges registers between threads eleven times an element; a product with 64 × 64 ones is
on the matrix unit, which has time. Along columns threads add up what they have, which is quicker.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ..errors import Unsupported
from ..schedule.build import op, select
from ..schedule.dtype import itemsize
from ..schedule.expr import Op, const, free_axes
from ..schedule.scan import BACK, BLOCK, LESS, WHOLE, scanned_axis
from .native import opaque, summed_from_the_end
from .tile import Context, Tile

# As many numbers of bfloat16 hold all bits of a float32; of what PyTorch would round to 16 bits, fewer hold enough.
PARTS, NARROW_PARTS = 3, 2
# What the matrix unit takes at least of an operand's side; and the most ones of a side.
LEAST, MOST = 16, 128
# What an infinity, its opposite and what is no number count for: as many as a tile may hold of them do not add up.
_PLUS, _MINUS, _NAN = 1.0, 256.0, 65536.0


def running(ctx: Context, e: Op) -> Tile:
    """What comes before the tile, or after it, and what the tile itself has up to each of its indices."""
    body, place, before, count = e.args
    axis = scanned_axis(e)
    back, whole, less = e.name in BACK, e.name in WHOLE, e.name in LESS
    axes = ctx.sorted_axes(free_axes(body) | free_axes(before) | {axis})
    start, side = ctx.start(axis), ctx.side(axis)
    if side < min(BLOCK, axis.extent):
        raise Unsupported("a running sum", "its blocks are wider than tiles")
    at = axes.index(axis)
    inside = op("lt", place, count, dtype="bool")
    x = ctx.spread(ctx.eval(select(inside, body, const(0.0, body.dtype))), axes)
    within = ctx.within(axis)
    if within is not None:
        x = jnp.where(ctx.spread(within, axes), x, jnp.zeros_like(x))
    # Where products do not leave the element out it is taken off as it is wanted for other things, which holds fewer
    # registers; XLA would compute it anew, with other last bits.
    off = less and not _by_products(x, at) and not ctx.interpret
    x = lax.optimization_barrier(x) if ctx.interpret else x
    narrow = itemsize(e.dtype) == 2
    sums = running_sums(x, at, back, whole or off, narrow, ctx.interpret, ctx.blocks is not None, less)
    first = jnp.int32(0) if start is None else start
    last = jnp.minimum(first + jnp.int32(side - 1), ctx.extent32(axis) - jnp.int32(1))
    ctx.push({axis: last if back else first}, {axis: 1})
    try:
        outer = ctx.eval(before)
        others = tuple(a for a in axes if a != axis)
        outer = Tile(ctx.spread(outer, others), others)
    finally:
        ctx.pop()
    sums = sums + ctx.spread(outer, axes)
    return Tile(sums - ctx.spread(ctx.eval(body), axes) if off else sums, axes)


def _by_products(x: Array, along: int) -> bool:
    """Whether running sums of a tile along a dimension are products."""
    rows = x.shape[0] if x.ndim in (2, 3) and along == x.ndim - 1 else 0
    # (Several blocks of a row lie side by side.)
    return min(rows, x.shape[-1]) >= LEAST and math.prod(x.shape[1:]) <= MOST and x.dtype == jnp.float32


def running_sums(
    x: Array, along: int, back: bool, whole: bool, narrow: bool, interpret: bool, native: bool, less: bool = False
) -> Array:
    """Running sums of a tile along a dimension.

    Args:
      back: from the end on.
      whole: whether an element is in its own sum.
      narrow: whether PyTorch would round the sums to 16 bits.
      interpret: whether XLA runs it on a CPU, where some of its products know no bfloat16.
      native: whether it is in Triton's hands, with what JAX has no name for.
      less: whether a sum without the element itself is NaN where that is not finite.
    """
    if not _by_products(x, along):
        return _scanned(x, along, back, whole, interpret, native, less)
    shape, each = x.shape, x.shape[-1]
    rows, width = shape[0], math.prod(shape[1:])
    x = x.reshape(rows, width)
    row, column = (lax.broadcasted_iota(jnp.int32, (width, width), d) for d in (0, 1))
    first, second = (row, column) if back else (column, row)
    kind = jnp.float32 if interpret else jnp.bfloat16
    # (Sides of tiles are powers of two.)
    ones = (((row ^ column) < each) & (first >= second if whole else first > second)).astype(kind)

    def summed(part: Array) -> Array:
        sides = part.astype(kind), ones
        return lax.dot_general(*sides, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    rest, part = x, _upper(x)
    sums = summed(part)
    for _ in range((NARROW_PARTS if narrow else PARTS) - 1):
        rest = rest - part
        part = _upper(rest)
        sums = sums + summed(part)
    # In a product an infinity, times 0, reaches elements before it.
    is_finite = jnp.sum(x * jnp.float32(0)) == 0

    def scanned() -> Array:
        tile = opaque(x, interpret).reshape(shape)
        return _scanned(tile, along, back, whole, interpret, native, less).reshape(rows, width)

    return lax.cond(is_finite, lambda: sums, scanned).reshape(shape)


def _upper(x: Array) -> Array:
    """The upper half of float32's bits, a number of bfloat16: what is cut off, unlike what is rounded off, needs no
    conversion back."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16)), jnp.float32)


def _scanned(x: Array, along: int, back: bool, whole: bool, interpret: bool, native: bool, less: bool = False) -> Array:
    if not whole:

        def others(y: Array) -> Array:
            return _scanned(y, along, back, True, interpret, native) - y

        return others(x) if less else _of_others(x, others)
    if interpret:
        return lax.cumsum(x, axis=along, reverse=back)
    if not back:
        return jnp.cumsum(x, axis=along)
    return summed_from_the_end(x, along) if native else jnp.sum(x, axis=along, keepdims=True) - jnp.cumsum(x, along) + x


def _of_others(x: Array, summed: Callable[[Array], Array]) -> Array:
    """Running sums without an element itself, by such of finite numbers: infinities, and what is no number, are
    counted."""
    zero, nan, infinite = (jnp.full_like(x, n) for n in (0, math.nan, math.inf))
    signed = jnp.where(x > 0, jnp.full_like(x, _PLUS), jnp.full_like(x, _MINUS))
    special = jnp.where(x != x, jnp.full_like(x, _NAN), jnp.where(jnp.abs(x) == math.inf, signed, zero))
    seen = summed(special)
    sums = summed(jnp.where(special == 0, x, zero))
    plus = seen - jnp.floor(seen / _MINUS) * _MINUS > 0
    of_infinities = jnp.where((seen >= _NAN) | plus & (seen >= _MINUS), nan, jnp.where(plus, infinite, -infinite))
    return jnp.where(seen == 0, sums, of_infinities)
