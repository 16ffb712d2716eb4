"""What is the same in all iterations of a loop, and is evaluated before it."""

from __future__ import annotations

from collections.abc import Iterable

from ..schedule.dtype import is_float
from ..schedule.expr import Const, Expr, Index, Load, Op, Reduce, children, free_axes, loads, reductions, ref_names
from ..schedule.inner import Product, as_product, as_sheared, is_sequential, parts_of
from .loads import load
from .products import Side, parts_of_side, ranged, sides_of
from .tile import Context, Scope


def hoist(ctx: Context, exprs: Iterable[Expr], loop: Scope) -> None:
    """Evaluate what `exprs` share with the world outside of `loop`, before it starts."""
    done: set[Expr] = set()

    def visit(e: Expr) -> None:
        if e in done or isinstance(e, (Const, Index)):
            return
        done.add(e)
        if not loop.binds(e) and not parts_of(e):
            if isinstance(e, Load):
                load(ctx, e)
            elif not _is_address(e):
                ctx.eval(e)
            return
        for c in children(e):
            visit(c)

    for e in exprs:
        visit(e)


def _is_address(e: Expr) -> bool:
    """Whether it is integer arithmetic of addresses, which is left where it is used."""
    return isinstance(e, Op) and not is_float(e.dtype) and not loads(e)


def steady_sides(ctx: Context, exprs: Iterable[Expr]) -> list[Side]:
    """The sides of matrix products in `exprs` that are computed, and are the same wherever this scope is."""
    here = ctx.scopes[-1]
    inner = dict.fromkeys(n for e in exprs for n in reductions(e))
    stepped = {r for r in inner if is_stepped(ctx, r)}
    indices = {r.axis for r in stepped}
    found: dict[Side, None] = {}
    for r in inner:
        if r in stepped:
            continue
        p, window = _matrix_product(ctx, r)
        sides = sides_of(p, r.axis, r.dtype) if p is not None else ()
        for side in (part for s in sides for part in parts_of_side(ctx, s)):
            raw = len(side.factors) == 1 and isinstance(n := side.factors[0], Load) and n.dtype == side.dtype
            # Which positions a window has, hangs on where the loop is.
            moves = any(
                window in ref_names(f) or here.binds(f) or free_axes(f) & indices - {r.axis} for f in side.factors
            )
            if not raw and not moves:
                found[side] = None
    return [*found]


def is_stepped(ctx: Context, r: Reduce) -> bool:
    """Whether one index of a reduction's axis, or one chunk, is taken at a time."""
    return not ctx.has_whole(r.axis) and is_sequential(r, ctx.wide(free_axes(r.body)) - {r.axis})


def _matrix_product(ctx: Context, r: Reduce) -> tuple[Product | None, str | None]:
    """What `reduced` makes a matrix product of, if it does, and the position in a window that it may have; of a
    reduction that is not stepped."""
    if r.kind != "sum" or not is_float(r.body.dtype):
        return None, None
    wide = ctx.wide(free_axes(r.body) | {r.axis})
    p, window = as_product(r.body, r.axis, wide), None
    if p is None and ctx.gathers() and (sheared := as_sheared(r.body, r.axis, wide)) is not None:
        p, window = sheared.product, sheared.position
    return None if p is None else ranged(ctx, p, r.dtype), window
