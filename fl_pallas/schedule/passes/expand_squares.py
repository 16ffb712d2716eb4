"""Squares of differences as matrix products: Σ (a - b)² = Σ a² + Σ b² - 2 Σ a·b.

Before: `sum[r4](t0 * t0 + t1 * t1 + t2 * t2)`, t being differences of points i and j: an operation for each pair and
coordinate. After: three sums over all twelve coordinates, one of them a product of matrices.

Only for loaded bfloat16: its products are exact in float32, and eight bits squared leave eight for what cancels. Of
equal points a little is left, of either sign; so not where a root, a logarithm or a quotient is taken of the sum, or
where it is a result itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ..build import op, reduce, substitute
from ..expr import Axis, Expr, Load, Op, Reduce, const, free_axes, index, load, reductions, walk
from ..inner import factors
from ..integer import linear
from .fuse import Fused

Difference = tuple[Expr, Expr]


def expand_squares(fused: Fused) -> Fused:
    """Fused outputs with the sums of squares that this law serves expanded."""

    def expanded(e: Expr) -> Expr:
        exposed = _exposed(e)
        found: dict[Expr, Expr] = {}
        for r in reductions(e):
            if r not in exposed and (new := _expanded(r)) is not None:
                # What scales such a sum may be made of another.
                found[r] = substitute(new, {}, found)
        return substitute(e, {}, found)

    return Fused(tuple(replace(o, expr=expanded(o.expr)) for o in fused.outputs))


_SINGULAR = ("sqrt", "rsqrt", "log", "log2", "pow", "div")
_LINEAR = ("add", "sub", "mul", "div", "neg", "abs", "cast", "select", "max", "min")


def _exposed(e: Expr) -> set[Expr]:
    """The sums that `e`, or what it takes the root, the logarithm, a power or the inverse of, is made of by sums,
    products and choices alone."""
    found: set[Expr] = set()
    stack = [e, *(n.args[-1 if n.name == "div" else 0] for n in walk(e) if isinstance(n, Op) and n.name in _SINGULAR)]
    while stack:
        n = stack.pop()
        if n in found:
            continue
        found.add(n)
        if isinstance(n, Op) and n.name in _LINEAR:
            stack += n.args
    return {n for n in found if isinstance(n, Reduce)}


def _expanded(r: Reduce) -> Expr | None:
    """The sum `r` of squares with its squares expanded; None if it is none."""
    scale = [f for f in factors(r.body) if r.axis not in free_axes(f)]
    rest = [f for f in factors(r.body) if r.axis in free_axes(f)]
    if r.kind != "sum" or r.dtype != "bf16":
        return None
    axes = [r.axis]
    if len(rest) == 1 and isinstance(rest[0], Reduce) and rest[0].kind == "sum":
        axes.append(rest[0].axis)
        rest = factors(rest[0].body)
    differences = _squares(rest)
    if not differences:
        return None
    if len(differences) > 1:
        rolled = _rolled(differences)
        if rolled is None or len(axes) > 1:
            return None
        axes.append(rolled[0])
        differences = [rolled[1]]
    ((a, b),) = differences
    if not (free_axes(a) - free_axes(b) and free_axes(b) - free_axes(a)):
        return None
    axis, (a, b) = _flattened(axes, (a, b))

    def total(x: Expr, y: Expr) -> Expr:
        return reduce("sum", axis, op("mul", x, y, dtype="bf16"), "bf16")

    both = op("mul", total(a, b), const(2.0, "bf16"), dtype="bf16")
    out = op("sub", op("add", total(a, a), total(b, b), dtype="bf16"), both, dtype="bf16")
    if scale:
        # Together first: they vary along fewer axes.
        out = op("mul", out, functools.reduce(lambda f, g: op("mul", f, g, dtype=r.dtype), scale), dtype=r.dtype)
    return out


def _squares(product: Sequence[Expr]) -> list[Difference]:
    """The differences whose squares a product comes to, one or a sum of several; none if it is anything else."""
    if len(product) == 1 and isinstance(product[0], Op) and product[0].name == "add":
        parts = [_squares(factors(arg)) for arg in product[0].args]
        return [d for part in parts for d in part] if all(parts) else []
    if len(product) == 2 and product[0] is product[1]:
        t = product[0]
        if isinstance(t, Op) and t.name == "sub":
            a, b = t.args
            if isinstance(a, Load) and isinstance(b, Load) and a.dtype == b.dtype == "bf16":
                return [(a, b)]
    return []


def _rolled(differences: Sequence[Difference]) -> tuple[Axis, Difference] | None:
    """The axis, and the difference along it, that differences at 0, 1, 2, … of some dimension unroll."""
    axis = Axis("%rolled", len(differences))
    sides = [_along(axis, [d[k] for d in differences]) for k in (0, 1)]
    return (axis, (sides[0], sides[1])) if sides[0] is not None and sides[1] is not None else None


def _along(axis: Axis, elements: Sequence[Expr]) -> Expr | None:
    """The load along `axis` of which `elements` are the elements, in order."""
    nodes = [n for n in elements if isinstance(n, Load)]
    first, last = nodes[0], nodes[-1]
    moving = [k for k, (i, j) in enumerate(zip(first.index, last.index, strict=True)) if i is not j]
    if len(moving) != 1:
        return None
    (k,) = moving
    terms, start = linear(first.index[k])
    for n, node in enumerate(nodes):
        others = node.index[:k] == first.index[:k] and node.index[k + 1 :] == first.index[k + 1 :]
        if node.source != first.source or not others or linear(node.index[k]) != (terms, start + n):
            return None
    place = op("add", first.index[k], index(axis), dtype="i64")
    return load(first.source, (*first.index[:k], place, *first.index[k + 1 :]), first.dtype)


def _flattened(axes: Sequence[Axis], pair: tuple[Expr, Expr]) -> tuple[Axis, tuple[Expr, Expr]]:
    """One axis for two that are summed over together, the second running fastest."""
    if len(axes) == 1:
        return axes[0], pair
    outer, inner = axes
    both = Axis(f"{outer.name}x{inner.extent}", outer.extent * inner.extent)
    n = const(inner.extent, "i64")
    places = {outer: op("floordiv", index(both), n, dtype="i64"), inner: op("mod", index(both), n, dtype="i64")}
    return both, (substitute(pair[0], places), substitute(pair[1], places))
