"""The pointwise operations of the schedule IR on jax arrays: one table, for every realisation.

Arguments have equal shapes and, where they are floats, one type. Only primitives that Pallas's Triton
lowering knows are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ..schedule.philox import BITS, MASK, MULTIPLIER, ROUNDS, WEYL, philox

LOG2_E = math.log2(math.e)


def _exp(x: Array) -> Array:
    # exp2 is one instruction on NVIDIA GPUs; float64 keeps the accurate form.
    return jnp.exp(x) if x.dtype == jnp.float64 else jnp.exp2(x * jnp.float32(LOG2_E))


def _maximum(a: Array, b: Array) -> Array:
    # The Triton lowering's max returns the other operand for NaN; PyTorch's propagates it.
    if _is_float(a):
        return jnp.where((a < b) | (b != b), b, a)
    return jnp.maximum(a, b)


def _minimum(a: Array, b: Array) -> Array:
    if _is_float(a):
        return jnp.where((a > b) | (b != b), b, a)
    return jnp.minimum(a, b)


def _sigmoid(x: Array) -> Array:
    one = jnp.ones_like(x)
    if x.dtype == jnp.float64:
        return one / (one + jnp.exp(-x))
    # Two instructions, where a division takes eight.
    root = lax.rsqrt(one + jnp.exp2(x * jnp.float32(-LOG2_E)))
    return root * root


# Rational approximation of erf on [-4, 4] (the one XLA and Eigen use), a few ulp in float32.
_ERF_P = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
          -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_ERF_Q = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
          -1.42647390514189e-02)  # fmt: skip


def _erf(x: Array) -> Array:
    if x.dtype == jnp.float64:
        return lax.erf(x)
    z = jnp.where(x > 4, jnp.float32(4), jnp.where(x < -4, jnp.float32(-4), x))
    s = z * z
    p, q = jnp.full_like(x, _ERF_P[0]), jnp.full_like(x, _ERF_Q[0])
    for c in _ERF_P[1:]:
        p = p * s + jnp.float32(c)
    for c in _ERF_Q[1:]:
        q = q * s + jnp.float32(c)
    return z * p / q


# (log1p(x) - x) / x² on [0, 1]: what PyTorch would round to bfloat16, within 7e-5 of log1p, and what not, within
# 2 ulp.
_LOG1P_16 = (-0.497774482, 0.309224725, -0.161363021, 0.0431062542)
_LOG1P = (-0.499996483, 0.33321324, -0.248571634, 0.191536546, -0.137538031, 0.0792045444, -0.0300657973, 0.00536482548)


def log1p(x: Array, most: float, narrow: bool) -> Array:
    """log(1 + x) of float32 from 0 to `most`: 5 to 14 instructions, where libdevice's takes 40, and a branch.

    It ends with a sum: a product at the end would be rounded or not, as what follows is a sum or is not, and the same
    score would not be the same number everywhere.

    Args:
      narrow: whether PyTorch would round the result to bfloat16.
    """
    *coefficients, last = _LOG1P_16 if narrow else _LOG1P
    p = jnp.full_like(x, last)
    for c in reversed(coefficients):
        p = p * x + jnp.float32(c)
    p = x + x * x * p
    return p if most <= 1 else jnp.where(x > 1, jnp.log(x + 1), p)


def _round(x: Array) -> Array:
    # Halves go to the even neighbour; what is left above a whole number is exact, and a sum with 0.5 would not be.
    down = jnp.floor(x)
    above = x - down
    odd = down - 2 * jnp.floor(down * 0.5) != 0
    near = jnp.where((above > 0.5) | (above == 0.5) & odd, down + 1, down)
    # An infinity has nothing above; what rounds to 0 from below is -0 (Triton's `-` takes from 0, and gives 0).
    return jnp.where(jnp.abs(x) == jnp.inf, x, jnp.where(x < 0, _neg(jnp.abs(near)), near))


def _trunc(x: Array) -> Array:
    return jnp.where(x < 0, jnp.ceil(x), jnp.floor(x))


def _pow(x: Array, y: Array) -> Array:
    if _is_float(x):
        return lax.pow(x, y)
    # Integers by squaring. What 64 bits hold of a power is told by 6 of the exponent, but for those of 1 and -1; a
    # negative power of any other is 0, as in PyTorch.
    power, square = jnp.ones_like(x), x
    for bit in range(6):
        power = jnp.where((y >> bit) & 1 == 1, power * square, power)
        square = square * square
    of_unit = jnp.where(y & 1 == 1, x, jnp.ones_like(x))
    return jnp.where(jnp.abs(x) == 1, of_unit, jnp.where(y < 0, jnp.zeros_like(x), power))


def _sub(a: Array, b: Array) -> Array:
    """a - b. Triton takes `constant - range` to be as divisible as the constant and the range's first number are, so
    that whole runs of it would compare alike; of a complement it takes nothing.
    """
    return a - b if _is_float(b) or not b.ndim else a + (~b + jnp.asarray(1, b.dtype))


def _neg(x: Array) -> Array:
    # JAX 0.11 cannot lower lax.neg of a constant; integers as in `_sub`.
    return x * jnp.asarray(-1, x.dtype) if _is_float(x) or not x.ndim else ~x + jnp.asarray(1, x.dtype)


def _ordered(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A comparison of tiles of integers by their complements, for the reason that `_sub` gives: sums may be affected
    too. LLVM takes the complements off again.
    """

    def compared(a: Array, b: Array) -> Array:
        return compare(a, b) if _is_float(a) or not a.ndim else compare(~b, ~a)

    return compared


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _floordiv(a: Array, b: Array) -> Array:
    quotient = lax.div(a, b)
    inexact = lax.rem(a, b) != 0
    return jnp.where(inexact & ((a < 0) != (b < 0)), quotient - 1, quotient)


def _mod(a: Array, b: Array) -> Array:
    remainder = lax.rem(a, b)
    return jnp.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


def _uniform(key: Array, first: Array, row: Array, column: Array) -> Array:
    key, first, row, column = (x.astype(jnp.uint32) for x in (key, first, row, column))
    bits = philox(column, first + row, [key + jnp.uint32(n * WEYL & MASK) for n in range(ROUNDS)], _multiplied)
    # The mantissa of a number from 1 to 2; a conversion would take longer.
    one = jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits >> jnp.uint32(32 - BITS) | one, jnp.float32) - jnp.float32(1)


def _multiplied(x: Array) -> tuple[Array, Array]:
    # One instruction of a GPU gives both words.
    product = x.astype(jnp.uint64) * jnp.uint64(MULTIPLIER)
    return (product >> jnp.uint64(32)).astype(jnp.uint32), product.astype(jnp.uint32)


def _quotient(a: Array, b: Array) -> Array:
    """a / b, whole where that is exact: XLA multiplies by a rounded inverse, and Triton divides numbers so."""
    approximate = a / b
    whole = jnp.floor(approximate + 0.5)
    return jnp.where(whole * b == a, whole, approximate)


def _close_to_log2(x: Array) -> Array:
    return jnp.log(x) * jnp.asarray(LOG2_E, x.dtype)


def _log2(x: Array) -> Array:
    """log2(x), whole for powers of two: levels and buckets are cut there."""
    close = _close_to_log2(x)
    whole = jnp.floor(close + 0.5)
    return jnp.where(jnp.exp2(whole) == x, whole, close)


def tanh_by_exp(x: Array) -> Array:
    """tanh in float32, rounded as it should be where it is near 1. XLA's is off by a unit in the last place there, on a
    CPU, and 1 - tanh², its derivative, is no more than a few of them.
    """
    one = jnp.ones_like(x)
    far = jnp.sign(x) * (one - 2 * one / (one + jnp.exp(2 * jnp.abs(x))))
    return jnp.where(jnp.abs(x) < 0.625, jnp.tanh(x), far)


def log2_by_parts(x: Array) -> Array:
    """`_log2` where exp2 is not exact, as XLA's is not on a CPU."""
    part, exponent = jnp.frexp(x)
    return jnp.where(part == 0.5, (exponent - 1).astype(x.dtype), _close_to_log2(x))


def _joined(whole: Array, *rest: Array) -> Array:
    """What a number of float32 is the parts of; those of infinities, behind the first, are NaN."""
    small = sum(rest[1:], rest[0])
    return whole + jnp.where(jnp.abs(small) < jnp.inf, small, jnp.zeros_like(small))


POINTWISE: dict[str, Callable[..., Array]] = {
    "add": lax.add,
    "sub": _sub,
    "mul": lax.mul,
    "div": lax.div,
    "quotient": _quotient,
    "neg": _neg,
    "abs": lax.abs,
    "max": _maximum,
    "min": _minimum,
    "pow": _pow,
    "exp": _exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": _log2,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.asin,
    "acos": jnp.acos,
    "atan": jnp.atan,
    "atan2": jnp.atan2,
    "tanh": jnp.tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "rounded": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": _round,
    "trunc": _trunc,
    "sign": lambda x: jnp.where(x != x, x, (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)),
    "floordiv": _floordiv,
    "mod": _mod,
    "isnan": lambda x: x != x,
    "isinf": lambda x: jnp.abs(x) == jnp.inf,
    "lt": _ordered(lax.lt),
    "le": _ordered(lax.le),
    "gt": _ordered(lax.gt),
    "ge": _ordered(lax.ge),
    "eq": lax.eq,
    "ne": lax.ne,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "shl": lax.shift_left,
    "shr": lax.shift_right_arithmetic,
    "select": lambda c, a, b: lax.select(c, a, b),
    "joined": _joined,
    "uniform": _uniform,
}
