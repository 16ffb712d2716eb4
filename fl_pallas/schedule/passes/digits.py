"""Dimensions that PyTorch's products have joined, looked at apart.

A layer makes biases of pairs as a matrix of as many rows as there are pairs, and a kernel loads `made[x0 * n + j0, h]`.
While operands are laid out that is `made[x0, j0, h]`, a tile of pairs for each head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..build import op
from ..dtype import is_float
from ..expr import Const, Expr, Index, Load, const, load, loads
from ..integer import linear
from ..plan import KernelPlan, bounds_of, expressions
from .rewritten import rewritten

Digits = tuple[tuple[int, ...], ...]
"""Of each dimension of a tensor, the extents of those that it was joined from."""


def apart(
    plans: Sequence[KernelPlan], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[KernelPlan], dict[str, tuple[int, ...]], dict[str, Digits]]:
    """The plans, the shapes of what they load, and the digits of what is not loaded as it lies, each of whose loads has
    an index for every digit."""
    found: dict[str, set[Digits]] = {}
    for node in (n for plan in plans for e in expressions(plan) for n in loads(e)):
        shape = shapes[node.source]
        own = is_float(node.dtype) and all(isinstance(extent, int) for extent in shape)
        digits = tuple(_digits(i, n) if own else (n,) for i, n in zip(node.index, shape, strict=True))
        found.setdefault(node.source, set()).add(digits)
    loops = [loop for plan in plans for loop in plan.loops]
    bounds = [e for loop in loops for e in (*dict(loop.above), *bounds_of(loop)) if e is not None]
    # What kernels store has the dimensions of that store, in an order of its own.
    fixed = {n.source for e in bounds for n in loads(e)} | {s.name for plan in plans for s in plan.stores}
    cut = {name: next(iter(ways)) for name, ways in found.items() if len(ways) == 1 and name not in fixed}
    cut = {name: digits for name, digits in cut.items() if any(len(d) > 1 for d in digits)}

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source not in cut:
            return n
        parts = (_parts(i) if len(d) > 1 else (i,) for i, d in zip(n.index, cut[n.source], strict=True))
        return load(n.source, tuple(i for part in parts for i in part), n.dtype)

    lying = {name: tuple(n for d in digits for n in d) for name, digits in cut.items()}
    return [rewritten(plan, rule) for plan in plans] if cut else [*plans], {**shapes, **lying}, cut


def together(plans: Sequence[KernelPlan], cut: Mapping[str, Digits]) -> list[KernelPlan]:
    """The plans, with what was loaded digit by digit as it lies."""

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source not in cut:
            return n
        indices, joined = iter(n.index), list[Expr]()
        for digits in cut[n.source]:
            joined.append(next(indices))
            for extent in digits[1:]:
                above = op("mul", joined[-1], const(extent, "i64"), dtype="i64")
                joined[-1] = op("add", above, next(indices), dtype="i64")
        return load(n.source, tuple(joined), n.dtype)

    return [rewritten(plan, rule) for plan in plans] if cut else [*plans]


def _digits(i: Expr, extent: int) -> tuple[int, ...]:
    """The extents of the axes that `i` is the number of, together as many as `extent`; that alone if it is none."""
    parts = _parts(i)
    extents = tuple(p.axis.extent for p in parts if isinstance(p, Index) and p.axis.size is None)
    terms, _ = linear(i)
    weights = [math.prod(extents[k + 1 :]) for k in range(len(extents))]
    is_number = len(extents) == len(parts) > 1 and [terms[p] for p in parts] == weights
    return extents if is_number and math.prod(extents) == extent else (extent,)


def _parts(i: Expr) -> tuple[Expr, ...]:
    """The terms of a sum, the one that counts most first; `i` itself if there is a constant among them."""
    terms, rest = linear(i)
    return (i,) if rest or isinstance(i, Const) else tuple(sorted(terms, key=lambda t: -terms[t]))
