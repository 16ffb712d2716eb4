"""Terms of a loop's sums: factors free of its axis are hoisted, and differences of data become two products."""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from dataclasses import replace

from ..build import cast
from ..expr import Axis, Expr, Load, Op, free_axes
from ..inner import factors
from ..laws import Scope, Term, is_narrow


def plain_terms(body: Expr, dtype: str, scope: Scope) -> list[Term]:
    """A body that does not move, with the factors free of the loop axis hoisted.

    A sum or difference, of data of 16 bits, is taken apart where a part of it then has fewer axes:
    Σ_j (w(i, j) · k(j, d) + s(i, j) · u(i, d)) is a product of matrices, and sums of rows.
    """
    if isinstance(body, Op) and body.name == "neg":
        return [replace(t, hoisted=scope.op("neg", t.hoisted)) for t in plain_terms(body.args[0], dtype, scope)]
    if (
        isinstance(body, Op)
        and body.name in ("add", "sub")
        and (is_narrow(body) or _adds_differences(body, dtype, scope))
    ):
        left, right = (plain_terms(a, dtype, scope) for a in body.args)
        if body.name == "sub":
            right = [replace(t, hoisted=scope.op("neg", t.hoisted)) for t in right]
        if any(frozenset().union(*map(free_axes, t.factors)) < free_axes(body) for t in (*left, *right)):
            return [*left, *right]
    if dtype == "bf16" and (terms := _differences(body, scope)):
        return terms
    one, kept = scope.const(1.0), []
    for f in _factors(body, scope):
        if scope.varies(f):
            kept.append(f)
        else:
            one = scope.op("mul", one, cast(f, scope.dtype))
    return [Term(one, factors=tuple(kept))]


def _adds_differences(body: Op, dtype: str, scope: Scope) -> bool:
    return dtype == "bf16" and any(_differences(a, scope) for a in body.args)


def _differences(body: Expr, scope: Scope) -> list[Term]:
    """Σ_j w(i, j) · (a(i, d) - b(j, d)) as a(i, d) · Σ_j w(i, j) - Σ_j w(i, j) · b(j, d), a product of matrices, for
    loaded bfloat16; empty if the body is none.

    Far from the origin the terms cancel. They are exact but for sums in float32 if both take w as a product of matrices
    rounds it (the second may become none, where tiles have one index of d): what that rounds away is multiplied by the
    difference then, as it is in PyTorch, and not by a and b.
    """
    found = factors(body)
    own = _difference([f for f in found if scope.varies(f)], frozenset(), scope)
    if own is None:
        return []
    (a, b, sign), moving = own
    hoisted = functools.reduce(
        lambda x, y: scope.op("mul", x, y),
        [cast(g, scope.dtype) for g in found if not scope.varies(g)],
        scope.const(sign),
    )
    weight = scope.op("rounded", functools.reduce(lambda x, y: scope.op("mul", x, y), moving))
    first = scope.op("mul", hoisted, cast(a, scope.dtype))
    return [Term(first, factors=(weight,)), Term(scope.op("neg", hoisted), factors=(weight, b))]


def apart(t: Term, dtype: str, scope: Scope) -> list[Term]:
    """`_differences` of what is taken about a running maximum: the weights are powers, times other factors."""
    if t.exponent is None or t.shifts or dtype != "bf16":
        return [t]
    own = _difference(t.factors, free_axes(t.exponent), scope)
    if own is None:
        return [t]
    (a, b, sign), rest = own
    first = scope.op("mul", scope.op("mul", scope.const(sign), t.hoisted), cast(a, scope.dtype))
    second = scope.op("mul", scope.const(-sign), t.hoisted)
    weights = replace(t, factors=rest, rounded=True)
    return [replace(weights, hoisted=first), replace(weights, hoisted=second, last=b)]


def _difference(
    found: Sequence[Expr], axes: frozenset[Axis], scope: Scope
) -> tuple[tuple[Expr, Expr, float], tuple[Expr, ...]] | None:
    """What does not vary of a difference among factors that do, what varies, and the sign of the former; and the other
    factors, of which weights of these axes are one. None if there is none, or none of features."""
    for n, f in enumerate(found):
        if not isinstance(f, Op) or f.name != "sub":
            continue
        if not all(isinstance(a, Load) and a.dtype == "bf16" for a in f.args):
            continue
        rest = (*found[:n], *found[n + 1 :])
        others = axes.union(*map(free_axes, rest))
        own, other, sign = (*f.args, 1.0) if scope.varies(f.args[1]) else (*f.args[::-1], -1.0)
        sides = others & free_axes(own), free_axes(f) - others
        if scope.varies(own) or not all(any(a.extent > 1 for a in some) for some in sides):
            continue
        if _is_one_side((axes, *map(free_axes, rest)), {scope.axis} | free_axes(own) & free_axes(other)):
            return (own, other, sign), rest
    return None


def _is_one_side(weights: Sequence[Set[Axis]], apart: Set[Axis]) -> bool:
    """Whether a product of matrices has all weights of these axes on one side, and rounds what they make together
    (`inner.as_product`): each shares an axis with another, or has none.

    Args:
      apart: axes that are no side's: the one that is summed, and a batch's.
    """
    sides: list[set[Axis]] = []
    for own in ({a for a in axes - apart if a.extent > 1} for axes in weights):
        met = [s for s in sides if s & own]
        sides = [s for s in sides if s not in met] + ([own.union(*met)] if own else [])
    return len(sides) < 2


def _factors(e: Expr, scope: Scope) -> tuple[Expr, ...]:
    """The factors of a product, taken apart as far as some of them are free of the loop axis."""
    if isinstance(e, Op) and e.name == "neg":
        return (scope.const(-1.0), *_factors(e.args[0], scope))
    if not isinstance(e, Op) or e.name != "mul":
        return (e,)
    parts = [_factors(a, scope) for a in e.args]
    found = (*parts[0], *parts[1])
    return found if any(not scope.varies(f) for f in found) else (e,)
