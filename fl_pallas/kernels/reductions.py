"""Reductions over the axes of tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..schedule.build import op, select, substitute
from ..schedule.dtype import is_float
from ..schedule.expr import Axis, Expr, Reduce, const, free_axes, index, raw_reduce, reductions, ref
from ..schedule.inner import (
    CHUNK,
    as_product,
    as_sheared,
    as_shifted,
    as_vector_product,
    covering_tile,
    is_matrix_product,
    power_of_two,
)
from .elementwise import combined
from .products import is_worth_a_matrix, matmul, sheared, shifted, vector_matmul
from .steady import hoist, is_stepped
from .tile import FIRST, Context, Tile

IDENTITY = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf, "any": False, "all": True}
# Longer sums that are taken one index at a time are loops: unrolled, all their operands would be loaded at once.
UNROLL = 4
# Sums inside of sums are loops from so many matrix products of a kernel on: they would be copies of copies.
MOST_PRODUCTS = 64
# Where tiles are so small that these elements are those of many indices, or all, sums take as many at once: the loads
# of one index after another wait for memory each time. They are the first dimension, which a thread has to itself.
AT_ONCE, MANY = 16384, 64
REDUCE: dict[str, Callable[[Array, int], Array]] = {
    "sum": lambda x, at: jnp.sum(x, axis=at),
    "prod": lambda x, at: jnp.prod(x, axis=at),
    "max": lambda x, at: jnp.max(x, axis=at),
    "min": lambda x, at: jnp.min(x, axis=at),
    "any": lambda x, at: jnp.max(x, axis=at),
    "all": lambda x, at: jnp.min(x, axis=at),
}


def reduced(ctx: Context, r: Reduce) -> Tile:
    """A reduction over the whole of its axis."""
    if not any(r.axis in s.sides for s in ctx.scopes) or ctx.has_whole(r.axis):
        return _reduced(ctx, r)
    # Inside of a sum over an axis of the same name and extent, of which one index is taken at a time.
    ctx.push({r.axis: jnp.int32(0)}, {r.axis: covering_tile(r.axis)})
    try:
        return _reduced(ctx, r)
    finally:
        ctx.pop()


def _reduced(ctx: Context, r: Reduce) -> Tile:
    wide = ctx.wide(free_axes(r.body) | {r.axis})
    if is_stepped(ctx, r) or not ctx.gathers() and as_sheared(r.body, r.axis, wide) is not None:
        return _sequential(ctx, r)
    found = reduce_tile(ctx, r.kind, r.body, r.axis, r.dtype)
    return Tile(found.array != 0, found.axes) if r.kind in ("any", "all") else found


def reduce_tile(ctx: Context, kind: str, body: Expr, axis: Axis, dtype: str, keep_nan: bool = True) -> Tile:
    """The reduction of `body` over the current tile of `axis`; any and all give 0 or 1 as int32.

    keep_nan: whether max and min must give NaN where they meet one, as PyTorch's do; the Triton
    lowering's do not by themselves.
    """
    if kind == "sum" and is_float(body.dtype) and ctx.side(axis) > 1:
        wide = ctx.wide(free_axes(body))
        product = as_product(body, axis, wide)
        if product is not None:
            return matmul(ctx, product, axis, dtype)
        by_position = as_sheared(body, axis, wide) if ctx.gathers() else None
        if by_position is not None:
            return sheared(ctx, by_position, axis, dtype)
        by_position = as_shifted(body, axis, wide)
        if by_position is not None:
            return shifted(ctx, by_position, axis, dtype) if ctx.gathers() else _by_index(ctx, body, axis, dtype)
        product = as_vector_product(body, axis, wide)
        if product is not None and dtype in ("bf16", "f16") and is_worth_a_matrix(ctx, product, axis):
            return vector_matmul(ctx, product, axis, dtype)
    axes = ctx.sorted_axes(free_axes(body) | {axis})
    x = ctx.spread(ctx.eval(body), axes)
    if kind in ("any", "all"):
        x = x.astype(jnp.int32)
    inside = ctx.within(axis)
    if inside is not None:
        identity = jnp.full(x.shape, identity_of(kind, x.dtype))
        x = jnp.where(ctx.spread(inside, axes), x, identity)
    at = axes.index(axis) if axis in axes else None
    rest = tuple(a for a in axes if a != axis)
    if at is None:
        return Tile(x, rest)
    out = REDUCE[kind](x, at)
    if keep_nan and kind in ("max", "min") and jnp.issubdtype(x.dtype, jnp.floating):
        found = jnp.max((x != x).astype(jnp.int32), axis=at) > 0
        out = jnp.where(found, jnp.full_like(out, jnp.nan), out)
    return Tile(out, rest)


def _by_index(ctx: Context, body: Expr, axis: Axis, dtype: str) -> Tile:
    """The sum of `body` over the current tile of `axis`, one index at a time."""
    start, each = ctx.start(axis), Axis("%each", ctx.side(axis))
    scope = ctx.push({}, {})
    try:
        scope.refs["%start"] = Tile(jnp.int32(0) if start is None else start, ())
        place = op("add", ref("%start", (), "i64"), index(each), dtype="i64")
        inside = op("lt", place, const(axis.extent, "i64") if axis.size is None else axis.size, dtype="bool")
        one = select(inside, substitute(body, {axis: place}), const(0.0, body.dtype))
        each_sum = raw_reduce("sum", each, one, dtype)
        assert isinstance(each_sum, Reduce)
        return _sequential(ctx, each_sum)
    finally:
        ctx.pop()


def _sequential(ctx: Context, r: Reduce) -> Tile:
    """One index (or one chunk: for a long matrix product, and where tiles are small) of the axis at a time."""
    wide = ctx.wide(free_axes(r.body) | {r.axis})
    whole = is_matrix_product if ctx.gathers() else as_product
    product = r.kind == "sum" and bool(whole(r.body, r.axis, wide))
    axes = ctx.sorted_axes(free_axes(r))
    shape = ctx.shape(axes)
    side = CHUNK if product else 1
    places = ctx.places
    if not product and r.kind == "sum" and is_float(r.body.dtype) and not reductions(r.body):
        most, extent = AT_ONCE // math.prod(shape), power_of_two(r.axis.extent)
        side = min(most, extent) if most >= min(MANY, extent) else 1
        ctx.places = {**places, r.axis: FIRST}  # elsewhere in the kernel it may be any dimension
    steps = -(-r.axis.extent // side)
    held = jnp.int32 if r.kind in ("any", "all") else ctx.type_of(r)
    total = jnp.full(shape, identity_of(r.kind, held))
    probe = ctx.push({r.axis: jnp.int32(0)}, {r.axis: side})
    ctx.pop()
    hoist(ctx, [r.body], probe)

    def step(n: Array | int, total: Array) -> Array:
        ctx.push({r.axis: jnp.asarray(n, jnp.int32) * side}, {r.axis: side})
        if side == 1:
            t = ctx.eval(r.body)
            x = ctx.spread(t, axes).astype(held)
        else:
            x = ctx.spread(reduce_tile(ctx, r.kind, r.body, r.axis, r.dtype), axes).astype(held)
        ctx.pop()
        return combined(ctx, r.kind, total, x)

    if steps <= UNROLL and (ctx.unrolled == 1 or ctx.products < MOST_PRODUCTS):
        ctx.unrolled *= steps
        for n in range(steps):
            total = step(n, total)
        ctx.unrolled //= steps
    else:
        total = lax.fori_loop(0, steps, step, total)
    ctx.places = places
    return Tile(total != 0 if r.kind in ("any", "all") else total, axes)


def identity_of(kind: str, dtype: Any) -> Array:
    """The identity of a reduction in a jax type."""
    value = IDENTITY[kind]
    if isinstance(value, float) and math.isinf(value) and not jnp.issubdtype(dtype, jnp.floating):
        info = jnp.iinfo(dtype)
        value = info.min if value < 0 else info.max
    return jnp.asarray(value, dtype)
