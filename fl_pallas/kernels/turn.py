"""Sines and cosines in float32, for tiles that are wide.

NVIDIA's library has a branch for angles of any size, whose arrays lie in memory, and takes four times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

# Up to here multiples of the first two parts of pi / 2 are exact (Cody and Waite's reduction, as in Cephes' sinf.c).
EXACT = 8192.0
_QUARTER = (1.5703125, 4.837512969970703125e-4, 7.54978995489188216e-8)
# Minimax polynomials on [-pi / 4, pi / 4], of the square (Cephes).
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def turned(name: str, x: Array, largest: float) -> Array:
    """The sine ("sin") or cosine ("cos") of float32 angles, radians, none of which is larger than `largest`."""
    library: Callable[[Array], Array] = jnp.sin if name == "sin" else jnp.cos

    def near(x: Array) -> Array:
        return _near(x, 0 if name == "sin" else 1)

    if largest <= EXACT:
        return near(x)
    return lax.cond(jnp.max(jnp.abs(x)) > EXACT, library, near, x)


def _near(x: Array, ahead: int) -> Array:
    """The sine of x and so many quarters of a turn, for |x| up to EXACT."""
    quarters = jnp.floor(x * jnp.float32(2 / math.pi) + jnp.float32(0.5))
    rest = x
    for part in _QUARTER:
        rest = rest - quarters * jnp.float32(part)
    square = rest * rest
    sine = rest + rest * square * _polynomial(_SINE, square)
    cosine = jnp.float32(1) - jnp.float32(0.5) * square + square * square * _polynomial(_COSINE, square)
    quadrant = quarters.astype(jnp.int32) + jnp.int32(ahead)
    found = jnp.where(quadrant & 1 == 1, cosine, sine)
    return jnp.where(quadrant & 2 == 2, -found, found)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    value = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = value * x + jnp.float32(c)
    return value
