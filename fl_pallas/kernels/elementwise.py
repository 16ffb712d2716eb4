"""Operations on the elements of tiles."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

from ..schedule.dtype import is_float
from ..schedule.expr import Const, Expr, Op
from ..schedule.integer import bounds
from ..schedule.laws import non_negative
from ..schedule.magnitude import magnitude
from .native import extreme, never, quotient
from .pointwise import POINTWISE, log1p, log2_by_parts, tanh_by_exp
from .tile import Context, Tile
from .turn import turned

COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": lax.add,
    "prod": lax.mul,
    "max": POINTWISE["max"],
    "min": POINTWISE["min"],
    "any": lax.max,
    "all": lax.min,
}


def elementwise(ctx: Context, e: Op) -> Tile:
    """An operation on what its arguments are, element by element."""
    if (group := ctx.group(e)) is not None:
        axis, start, number = group
        n = jnp.asarray(number, start.dtype)
        if e.name == "floordiv":
            return Tile(lax.div(start, n), ())
        return Tile(lax.iota(jnp.int32, ctx.side(axis)) + lax.rem(start, n), (axis,))
    args = [ctx.eval(a) for a in e.args]
    axes = ctx.sorted_axes({a for t in args for a in t.axes})
    arrays = [ctx.spread(t, axes) for t in args]
    if e.name == "cast":
        return Tile(arrays[0].astype(ctx.type_of(e)), axes)
    first = 1 if e.name == "select" else 0
    kind = jnp.result_type(*(a.dtype for a in arrays[first:]))
    if not is_float(e.dtype) and e.dtype != "bool" and e.name != "select":
        kind = jnp.promote_types(kind, ctx.type_of(e))
    arrays[first:] = [a.astype(kind) for a in arrays[first:]]
    if e.name == "tanh" and e.dtype == "bf16" and axes and not ctx.interpret:
        # One instruction, and four times as accurate as the bfloat16 that PyTorch would round to. Of a number
        # alone JAX would make a tensor, which goes with no other number.
        return Tile(plgpu.approx_tanh(arrays[0]), axes)
    if e.name == "tanh" and ctx.compute == "f32" and ctx.interpret:
        return Tile(tanh_by_exp(arrays[0]), axes)
    if e.name in ("floordiv", "mod") and axes and not ctx.interpret and _is_narrow(e.args[0]):
        arrays[0] = arrays[0] + never().astype(arrays[0].dtype)
    if e.name == "div" and ctx.compute == "f32" and (inverse := _inverse(e.args[1])) is not None:
        return Tile(arrays[0] * jnp.float32(inverse), axes)
    if e.name == "quotient" and ctx.compute == "f32" and axes and not ctx.interpret:
        return Tile(quotient(*jnp.broadcast_arrays(*arrays)), axes)
    if e.name in ("sin", "cos") and ctx.compute == "f32" and len(axes) > 1:
        return Tile(turned(e.name, arrays[0], magnitude(e.args[0])), axes)
    if e.name == "log1p" and ctx.compute == "f32" and not ctx.interpret and non_negative(e.args[0], frozenset()):
        return Tile(log1p(arrays[0], magnitude(e.args[0]), e.dtype == "bf16"), axes)
    if e.name == "log2" and ctx.interpret:
        return Tile(log2_by_parts(arrays[0]), axes)
    if e.name == "rounded" and ctx.interpret:
        # XLA takes the cast and its inverse for nothing.
        return Tile(lax.reduce_precision(arrays[0], 8, 7), axes)
    if e.name in ("max", "min"):
        return Tile(combined(ctx, e.name, *arrays), axes)
    made = POINTWISE[e.name](*arrays)
    return Tile(_rounded_alone(ctx, made) if e.name == "mul" and is_float(e.dtype) else made, axes)


def _rounded_alone(ctx: Context, product: Array) -> Array:
    """A product that LLVM, on a CPU, does not make one instruction of with the sum that it goes into.

    There XLA computes a score anew for whatever reads it: where it is compared with the maximum of all (its place,
    the gradient of that) it would be rounded once in one of the two and twice in the other, and equal nothing.
    """
    if ctx.nothing is None:
        return product
    kind = jnp.int64 if product.dtype == jnp.float64 else jnp.int32
    bits = lax.bitcast_convert_type(product, kind) + ctx.nothing.astype(kind)
    return lax.bitcast_convert_type(bits, product.dtype)


def combined(ctx: Context, kind: str, a: Array, b: Array) -> Array:
    """Partial reductions put together: two tiles of one shape."""
    native = ctx.blocks is not None and not ctx.interpret
    if native and kind in ("max", "min") and a.ndim and a.dtype == jnp.float32:
        return extreme(kind, a, b)
    return COMBINE[kind](a, b)


def _inverse(e: Expr) -> float | None:
    """1 / e for a floating constant whose inverse is a normal float32: a division takes half a dozen instructions."""
    if isinstance(e, Const) and is_float(e.dtype) and 2**-100 < abs(e.value) < 2**100:
        return 1 / e.value
    return None


def _is_narrow(e: Expr) -> bool:
    """Whether LLVM would divide these numbers as pairs of 16 bits."""
    span = bounds(e)
    return span is not None and -(2**15) <= span[0] and span[1] < 2**16
