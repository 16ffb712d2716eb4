"""What a row's sum is, beyond what its rounded result says of it.

Where a sum is computed from a result (`exchange`), it is as exact as that is rounded. A gradient of a row and a feature
bears it; but where all of a row is added up, as for a temperature, the terms cancel, and what is left of them may be
less than that rounding makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..build import op, reduce_over, select, substitute, with_children
from ..dtype import is_float
from ..expr import Axis, Expr, Index, Load, Op, Reduce, children, const, free_axes, load, loads, raw_reduce, reductions
from .fuse import Fused, Output

# Of a derivative, each of which has a sum of its own.
MAX_TERMS = 8


def with_residuals(groups: tuple[Fused, ...], near: Mapping[Load, Expr]) -> tuple[Fused, ...]:
    """Before: `sum[j](f(i, j, near[i]))`, with `near` a value close to a sum over j. After: that, and the sum's
    difference from it times `sum[j](∂f/∂near)`; all of it are sums of one loop, and f is affine in `near`.

    Sums over i then have the exact sum, which the kernel of the rows stores: a running sum may ask for the difference
    of both, in which what is the same in both cancels.

    Args:
      groups: kernels that load what stands for sums.
      near: the sums, by what stands for them.
    """
    corrected = set[str]()  # a sum may stand in several places, by other names of its rows
    for n, group in enumerate(groups):
        for stands, exact in near.items():
            if stands.source not in corrected and any(_is_of_rows(o, stands) for o in group.outputs):
                before, groups = groups, _with_exact(groups, n, stands, exact)
                if groups != before:
                    corrected.add(stands.source)
    return groups


def _is_of_rows(o: Output, stands: Load) -> bool:
    """Whether an output has the rows that a sum is of."""
    return stands in loads(o.expr) and all(isinstance(i, Index) and i.axis in o.axes for i in stands.index)


def _with_exact(groups: tuple[Fused, ...], at: int, stands: Load, exact: Expr) -> tuple[Fused, ...]:
    """`groups`, one of which has the rows of a sum and stores it, if any of them has to correct something."""
    corrected = tuple(_each(g, lambda e: _corrected(e, stands, exact)) for g in groups)
    axes = tuple(i.axis for i in stands.index if isinstance(i, Index))
    if corrected == groups or {*axes} != free_axes(exact) or len({*axes}) < len(axes):
        return groups
    added = Output(f"{stands.source}_exact", axes, stands.dtype, exact)
    exactly = tuple(_each(g, lambda e: _corrected(e, stands, exact, added.name)) for g in groups)
    if not any(m.source == added.name for g in exactly for o in g.outputs for m in loads(o.expr)):
        return corrected
    return tuple(Fused((*corrected[n].outputs, added)) if n == at else g for n, g in enumerate(exactly))


def _each(g: Fused, change: Callable[[Expr], Expr]) -> Fused:
    return Fused(tuple(replace(o, expr=change(o.expr)) for o in g.outputs))


def _corrected(e: Expr, stands: Load, exact: Expr, stored: str = "") -> Expr:
    """`e` with sums along a row corrected; and, where the exact sum is `stored`, with that in sums over rows."""

    def rule(n: Expr) -> Expr:
        axes, body = _nest(n)
        for m in loads(body) if axes else ():
            if m.source != stands.source:
                continue
            own = frozenset().union(*map(free_axes, m.index))
            rows, along = [a for a in axes if a in own], [a for a in axes if a not in own]
            if rows and not along and stored and not _is_along(body, m, own):
                exactly = load(stored, m.index, m.dtype)
                return reduce_over("sum", axes, substitute(body, {}, {m: exactly}), n.dtype)
            slopes = _slopes(body, m) if along and free_axes(body) <= own.union(along) else None
            if slopes is not None:
                place = {i.axis: j for i, j in zip(stands.index, m.index, strict=True) if isinstance(i, Index)}
                residual = _finite(op("sub", substitute(exact, place), m, dtype=n.dtype))
                whole = reduce_over("sum", along, body, n.dtype)
                for slope in slopes:
                    term = op("mul", residual, reduce_over("sum", along, slope, n.dtype), dtype=n.dtype)
                    whole = op("add", whole, term, dtype=n.dtype)
                return reduce_over("sum", rows, whole, n.dtype)
        return n

    memo: dict[Expr, Expr] = {}

    def visit(n: Expr) -> Expr:
        # The outermost sums first: one over rows may be inside of one along them.
        if n not in memo:
            made = rule(n)
            memo[n] = with_children(n, tuple(map(visit, children(n)))) if made is n else made
        return memo[n]

    return visit(e)


def _finite(residual: Expr) -> Expr:
    """A difference, or 0 where it is none: both sums of a row that sees nothing are NaN, and perhaps not asked for."""
    size = op("abs", residual, dtype=residual.dtype)
    return select(op("lt", size, const(math.inf, residual.dtype), dtype="bool"), residual, const(0.0, residual.dtype))


def _is_along(e: Expr, m: Load, own: frozenset[Axis]) -> bool:
    """Whether `m`, of axes `own`, is in a sum over another."""
    return any(r.axis not in own and m in loads(r.body) for r in reductions(e))


def _nest(e: Expr) -> tuple[list[Axis], Expr]:
    """The axes of sums of sums, the outermost first, and what they are of. A factor of a sum is one of its terms (of a
    slope's gradient, positions are, of a sum over a batch)."""
    axes: list[Axis] = []
    while isinstance(inner := _multiplied_out(e) if axes else e, Reduce) and inner.kind == "sum" and is_float(e.dtype):
        axes.append(inner.axis)
        e = inner.body
    return axes, e


def _multiplied_out(e: Expr) -> Expr:
    """A product of a sum as the sum of products; not of a score, which is one for all that it is multiplied by."""
    if isinstance(e, Op) and e.name in ("mul", "div", "neg"):
        ways = enumerate(e.args[:1] if e.name == "div" else e.args)
        for n, s in ((n, _multiplied_out(a)) for n, a in ways):
            others = e.args[:n] + e.args[n + 1 :]
            if not isinstance(s, Reduce) or s.kind != "sum" or not reductions(s.body):
                continue
            if all(s.axis not in free_axes(a) for a in others):
                term = op(e.name, *e.args[:n], s.body, *e.args[n + 1 :], dtype=e.dtype)
                return raw_reduce("sum", s.axis, term, e.dtype)
    return e


def _slopes(e: Expr, x: Load) -> list[Expr] | None:
    """Terms of the derivative of `e` by `x`; None if `e` is not affine in it, or they are many."""
    if e is x:
        return [const(1.0, e.dtype)]
    if x not in loads(e):
        return []
    if not isinstance(e, Op) or not is_float(e.dtype):
        return None
    inner: list[list[Expr]] = []
    for a in e.args:
        found = _slopes(a, x)
        if found is None or sum(map(len, inner)) + len(found) > MAX_TERMS:
            return None
        inner.append(found)
    dtype, args = e.dtype, e.args
    if e.name == "add":
        return [*inner[0], *inner[1]]
    if e.name in ("sub", "neg"):
        return [*(inner[0] if e.name == "sub" else ()), *(op("neg", s, dtype=dtype) for s in inner[-1])]
    if e.name == "mul" and not (inner[0] and inner[1]):
        other = args[0] if inner[1] else args[1]
        return [op("mul", s, other, dtype=dtype) for s in (*inner[0], *inner[1])]
    if e.name == "div" and not inner[1]:
        return [op("div", s, args[1], dtype=dtype) for s in inner[0]]
    if e.name == "select" and not inner[0]:
        zero = const(0.0, dtype)
        return [select(args[0], s, zero) for s in inner[1]] + [select(args[0], zero, s) for s in inner[2]]
    return inner[0] if e.name in ("cast", "rounded") else None
