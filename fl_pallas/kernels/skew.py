"""Tiles of which each row takes its own part, a column further on or back than the row before it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .native import gather

# Rows and columns of what a warp has of a matrix product at once (PTX ISA, fragments of wgmma and mma): a thread has
# two columns of a row.
FRAGMENT = 8


def skewed(
    x: Array, shape: tuple[int, int], axis: int, sign: int, back: int, interpret: bool, unsteady: Array | None = None
) -> Array:
    """A tile of `shape`: each element is that of `x` which has, along `axis`, the index of its own along `axis`, `sign`
    times its other index and `back` together, modulo the extent of `x`; along the other dimension, its own.

    On a GPU they go through shared memory, 32 banks of four bytes. What a warp holds of eight rows and eight columns
    comes next to each other there, columns of even numbers before the odd ones: so no two threads meet in a bank, be it
    where they put theirs, or where they take what has moved. A place is the sum of what hangs on a thread alone, which
    is computed for eight by eight elements, and of what compilers know.

    Args:
      unsteady: 0, of which compilers believe that it changes: what is to be made again wherever it is used, lest it
        take registers.
    """
    extent, other = x.shape[axis], shape[1 - axis]
    if interpret:
        here, there = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (axis, 1 - axis))
        at = here + jnp.int32(sign) * there + jnp.int32(back)
        return jnp.take_along_axis(x, at & jnp.int32(extent - 1), axis)
    least, most = back, back + shape[axis] - 1
    least, most = (least, most + other - 1) if sign > 0 else (least - other + 1, most)
    few = min(FRAGMENT, *x.shape, *shape)
    parts = (shape[0] // few, few, shape[1] // few, few)
    block, within = ([_along(parts, 2 * d + n) for d in (0, 1)] for n in (0, 1))
    moved = within[axis] + jnp.int32(sign) * within[1 - axis] + jnp.int32(back)
    if unsteady is not None:
        moved = moved + unsteady
    within[axis] = moved & jnp.int32(few - 1)
    row, places = _placed(x, few, within)
    # A block's neighbours along each dimension lie so far apart. Each number is multiplied first, and added then: so
    # compilers see what a register and a constant make together.
    apart = (x.shape[1] * few, few * few)
    along = (moved >> jnp.int32(few.bit_length() - 1)) * jnp.int32(apart[axis])
    if least < 0 or most >= extent:
        along = along + block[axis] * jnp.int32(apart[axis]) + block[1 - axis] * jnp.int32(sign * apart[axis])
        along = along & jnp.int32((extent // few - 1) * apart[axis])
        at = along + (block[1 - axis] * jnp.int32(apart[1 - axis]) + places)
    else:
        both = jnp.int32(sign * apart[axis] + apart[1 - axis])
        at = (along + places) + block[axis] * jnp.int32(apart[axis]) + block[1 - axis] * both
    return gather(row, at.reshape(1, -1)).reshape(shape)


def _along(shape: tuple[int, ...], dimension: int) -> Array:
    """Indices along a dimension, 1 in all others."""
    only = tuple(n if d == dimension else 1 for d, n in enumerate(shape))
    return lax.broadcasted_iota(jnp.int32, only, dimension)


def _placed(x: Array, few: int, within: list[Array]) -> tuple[Array, Array]:
    """`x` as one row, of blocks of few rows by few columns; and the places in a block of those at some indices."""
    rows, columns = (n // few for n in x.shape)
    row, column = within
    if few != FRAGMENT or x.dtype.itemsize != 4:
        # Numbers of two bytes: the two columns of a thread have one bank.
        blocks = x.reshape(rows, few, columns, few).transpose(0, 2, 1, 3)
        return blocks.reshape(1, -1), row * jnp.int32(few) + column
    pairs = FRAGMENT // 2
    blocks = x.reshape(rows, FRAGMENT, columns, pairs, 2).transpose(0, 2, 4, 1, 3)
    odd, pair = column & jnp.int32(1), lax.shift_right_logical(column, jnp.int32(1))
    return blocks.reshape(1, -1), odd * jnp.int32(FRAGMENT * pairs) + row * jnp.int32(pairs) + pair
