"""Running sums of tiles as products with a triangle of ones.

Triton's own scan exchanges registers between threads eleven times an element; a product with 64 × 64 ones is on the
matrix unit, which has time.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .native import opaque, summed_from_the_end

# As many numbers of bfloat16 hold all bits of a float32; for sums that PyTorch would round to 16 bits, fewer hold enough.
PARTS, NARROW_PARTS = 3, 2
# What the matrix unit takes at least of an operand's side.
LEAST = 16


def running_sums(x: Array, along: int, back: bool, narrow: bool, interpret: bool) -> Array:
    """Running sums of a tile of float32 [m, n], m and n from `LEAST` on, along a dimension.

    Args:
      back: from the end on.
      narrow: whether PyTorch would round the sums to 16 bits.
      interpret: whether XLA runs it on a CPU, where some of its products know no bfloat16.
    """
    side = x.shape[along]
    row, column = (lax.broadcasted_iota(jnp.int32, (side, side), d) for d in (0, 1))
    kind = jnp.float32 if interpret else jnp.bfloat16
    ones = (row >= column if back == bool(along) else row <= column).astype(kind)

    def summed(part: Array) -> Array:
        sides = (part.astype(kind), ones) if along else (ones, part.astype(kind))
        return lax.dot_general(*sides, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def scanned() -> Array:
        if interpret:
            return lax.cumsum(x, axis=along, reverse=back)
        kept = opaque(x)
        return summed_from_the_end(kept, along) if back else jnp.cumsum(kept, axis=along)

    rest, part = x, _upper(x)
    sums = summed(part)
    for _ in range((NARROW_PARTS if narrow else PARTS) - 1):
        rest = rest - part
        part = _upper(rest)
        sums = sums + summed(part)
    # In a product an infinity, times 0, reaches elements before it.
    return lax.cond(jnp.sum(x * jnp.float32(0)) == 0, lambda: sums, scanned)


def _upper(x: Array) -> Array:
    """The upper half of the bits of float32, a number of bfloat16: what is cut off, unlike what is rounded off, is found
    without a conversion back."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16)), jnp.float32)
