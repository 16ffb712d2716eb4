"""Strength reduction: what an element of a tile costs is taken out of it, to a row of the tile or to a constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..build import COMPARISONS, cast, op, rewrite, select, whole_power, with_children
from ..dtype import is_float, is_int
from ..expr import Axis, Const, Expr, Load, Op, Reduce, Ref, const, free_axes, loads, reductions, walk
from ..integer import bounds, from_linear, linear
from ..laws import EXACT, holds_large, is_narrow, may_be_large, non_negative, positive_factor, power_of_difference
from ..plan import Accumulator, Loop, Step
from ..program import Value
from ..remember import remembered
from .fuse import Fused

# The largest power, in halves, that is taken by multiplications of a root.
MOST_HALVES = 7
# What makes whole numbers of floats.
_CUTTING = ("floor", "ceil", "round", "trunc")


def without_divisions(fused: Fused, facts: Sequence[Value] = ()) -> Fused:
    """Before: `x[i, j] / y[i]`, `x / 3`. After: `x[i, j] * (1 / y[i])`, `x * 0.333…`: one division a row, not one an
    element. Constant factors become one, and `p * a - p * b` is `p * (a - b)`. Where a quotient is cut off, or compared
    (positions by a block's length), its last bit counts: it stays a division.

    With what `facts` know to be a sum of exponentials, `exp(x[i, j] - m[i]) / l[i]` is `exp(x[i, j] - (m[i] + log l))`.
    """
    positive = frozenset(f.name for f in facts if f.expr is not None and _is_positive(f.expr))

    def rule(e: Expr) -> Expr:
        return _into_exponent(_multiplied(e), positive)

    return Fused(tuple(replace(o, expr=rewrite(rewrite(o.expr, _cut_exactly), rule)) for o in fused.outputs))


def _cut_exactly(e: Expr) -> Expr:
    """`floor(i / 7)` of a quotient that is as PyTorch rounds it: 7 times a rounded seventh may be less than 1."""
    if not isinstance(e, Op) or not any(is_float(a.dtype) for a in e.args):
        return e
    # What is compared may be a maximum of its kind, which has to be computed alike.
    compared = e.name in COMPARISONS and not any(is_float(n.dtype) for n in loads(e))
    if compared or e.name in _CUTTING or e.name == "cast" and is_int(e.dtype):
        return with_children(e, tuple(map(_exactly, e.args)))
    return e


@remembered
def _exactly(e: Expr) -> Expr:
    """`e` with its quotients of tensors and positions left divisions; sums of scores are not exact in any case, and by
    a power of two a product is."""
    if not isinstance(e, Op) or not is_float(e.dtype) or reductions(e):
        return e
    args = tuple(map(_exactly, e.args))
    by = args[1] if e.name == "div" else None
    rounds = by is not None and not (isinstance(by, Const) and abs(math.frexp(by.value)[0]) == 0.5)
    return op("quotient", *args, dtype=e.dtype) if rounds else with_children(e, args)


def _is_positive(e: Expr) -> bool:
    return isinstance(e, Reduce) and e.kind == "sum" and isinstance(e.body, Op) and e.body.name == "exp"


def _into_exponent(e: Expr, positive: frozenset[str]) -> Expr:
    """`exp(a - b) * (1 / l)` as `exp(a - (b + log(l)))`; `b` and `l`, a load known to be positive, are of a row.

    Not where masks may be large numbers: beside that of a row which sees nothing, `log(l)` would be lost to rounding;
    nor where all is in 32 bits, of which sharp scores would lose some.
    """
    if not isinstance(e, Op) or e.name != "mul":
        return e
    for power, inverse in (e.args, e.args[::-1]):
        if isinstance(power, Op) and power.name == "exp" and isinstance(inverse, Op) and inverse.name == "div":
            exponent, by = power.args[0], inverse.args[1]
            if not isinstance(by, Load) or by.source not in positive or inverse.args[0] is not const(1.0, e.dtype):
                continue
            if isinstance(exponent, Op) and exponent.name == "sub" and free_axes(exponent.args[1]) == free_axes(by):
                x = exponent.args[0]
                if may_be_large(x, by) or not is_narrow(x):
                    continue
                row = op("add", exponent.args[1], op("log", by, dtype=e.dtype), dtype=e.dtype)
                return op("exp", op("sub", x, row, dtype=e.dtype), dtype=e.dtype)
    return e


def _multiplied(e: Expr) -> Expr:
    if not isinstance(e, Op) or not is_float(e.dtype):
        return e
    one = const(1.0, e.dtype)
    if e.name == "div" and free_axes(e.args[1]) < free_axes(e.args[0]):
        return op("mul", e.args[0], op("div", one, e.args[1], dtype=e.dtype), dtype=e.dtype)
    if e.name == "mul" and isinstance(e.args[1], Const):
        return _scaled(e.args[0], e.args[1], e.dtype)
    if e.name in ("add", "sub") and (outer := _with_factor_outside(e)) is not None:
        return outer
    if e.name == "sub" and all(isinstance(a, Op) and a.name == "mul" for a in e.args):
        left, right = (a.args for a in e.args)  # type: ignore[union-attr]
        for n, m in ((0, 0), (0, 1), (1, 0), (1, 1)):
            if left[n] is right[m] and free_axes(left[n]) == free_axes(e):
                return op("mul", left[n], op("sub", left[1 - n], right[1 - m], dtype=e.dtype), dtype=e.dtype)
    return e


def _with_factor_outside(e: Op) -> Expr | None:
    """`x[i, j] * c + slope[h] * d[i, j]` as `(x - (slope / -c) * d) * c`: the exponent takes on the factor.

    As a difference, for Triton begins a matrix product from what is added to it: each of its sums would be rounded.
    """
    for n, term in enumerate(e.args):
        if not isinstance(term, Op) or term.name != "mul" or not isinstance(term.args[1], Const):
            continue
        other, factor = e.args[1 - n], float(term.args[1].value)
        if not isinstance(other, Op) or other.name != "mul" or not 2.0**-20 < factor < 2.0**20:
            continue
        for slope, d in (other.args, other.args[::-1]):
            if free_axes(slope) < free_axes(e) and not holds_large(other) and not _may_be_mask(d):
                by = -1 / factor if e.name == "add" else 1 / factor
                sides = (term.args[0], op("mul", op("mul", slope, const(by, e.dtype), dtype=e.dtype), d, dtype=e.dtype))
                reverse = e.name == "sub" and n == 1
                outer = op("sub", *(sides[::-1] if reverse else sides), dtype=e.dtype)
                return op("mul", outer, term.args[1], dtype=e.dtype)
    return None


@remembered
def _may_be_mask(e: Expr) -> bool:
    """Whether tensors or choices are among its terms, other than in sums: what a mask is multiplied by is immense."""
    if isinstance(e, Op):
        return e.name == "select" or any(map(_may_be_mask, e.args))
    return isinstance(e, Load)


def _scaled(x: Expr, factor: Const, dtype: str) -> Expr:
    """x · factor: constant factors become one, and go to the terms of a sum, or of a choice, that may hold what a mask
    put there. Every pass then has the same number of it, where products round now alone, now with a sum.
    """
    if isinstance(x, Op) and x.dtype == dtype:
        if x.name == "mul" and isinstance(x.args[1], Const):
            return op("mul", x.args[0], op("mul", x.args[1], factor, dtype=dtype), dtype=dtype)
        if x.name in ("select", "add", "sub") and (holds_large(x) or _is_term(Load, x) and _is_term(Reduce, x)):
            first = 1 if x.name == "select" else 0
            return op(x.name, *x.args[:first], *(_scaled(a, factor, dtype) for a in x.args[first:]), dtype=dtype)
    return op("mul", x, factor, dtype=dtype)


@remembered
def _is_term(kind: type[Expr], e: Expr) -> bool:
    """Whether one of the terms is such an expression, times constants perhaps: products are, and additive masks."""
    if isinstance(e, Op) and e.name in ("select", "add", "sub"):
        return any(_is_term(kind, a) for a in e.args)
    if isinstance(e, Op) and e.name == "mul" and isinstance(e.args[1], Const):
        return _is_term(kind, e.args[0])
    return isinstance(e, kind) and is_float(e.dtype)


def by_element(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Before: `exp(x[i, j] * c - m[i])`. After: `exp2(x[i, j] * c' - m[i] * log2(e))`: one multiplication and one
    instruction an element. Before: `float(j - i)`. After: `float(j) - float(i)`: a conversion a row and a column.
    Before: `pow(decay[h], float(j - i))`, of whole numbers. After: a power of two, the logarithm one a head.
    Before: `pow(d2[i, j], -1.5)`, of squares. After: `r * (r * r)` of its root.
    """
    narrow = any(is_narrow(s.update) for loop in loops for s in loop.steps if isinstance(s, Accumulator))

    def rule(e: Expr) -> Expr:
        if isinstance(e, Op) and e.name == "pow":
            rooted = _by_root(e)
            return _by_logarithm(e) if narrow and rooted is e else rooted
        return _float_of_parts(_power_of_two(e) if _is_exp(e) else e)

    def cheaper(step: Step) -> Step:
        return replace(step, update=rewrite(step.update, rule)) if isinstance(step, Accumulator) else step

    return tuple(replace(loop, steps=tuple(map(cheaper, loop.steps))) for loop in loops)


def _by_root(e: Op) -> Expr:
    """A power of so many and a half of what is never negative: four instructions, where one of any numbers takes 80."""
    base, exponent = e.args
    if not is_float(e.dtype) or not isinstance(exponent, Const) or not non_negative(base, frozenset()):
        return e
    halves = abs(exponent.value) * 2
    if halves % 2 != 1 or halves > MOST_HALVES:
        return e
    root = op("sqrt" if exponent.value > 0 else "rsqrt", base, dtype=e.dtype)
    if halves == 1 or exponent.value < 0:
        return whole_power(root, int(halves))
    return op("mul", root, whole_power(base, int(halves) // 2), dtype=e.dtype)


def _by_logarithm(e: Op) -> Expr:
    """A power of a number of fewer axes and of a whole number, by the logarithm: ten instructions an element, where
    one of any numbers takes 80, and branches. In 32 bits its rounding would be seen, times the exponent; -0 is as 0.
    """
    base, exponent = e.args
    if not is_float(e.dtype) or not free_axes(base) < free_axes(e) or not _is_whole(exponent):
        return e

    def f(name: str, *args: Expr) -> Expr:
        return op(name, *args, dtype=e.dtype)

    def of(name: str, *args: Expr) -> Expr:
        return op(name, *args, dtype="bool")

    zero, one, two, half = (const(n, e.dtype) for n in (0.0, 1.0, 2.0, 0.5))
    size = f("exp2", f("mul", exponent, f("log2", f("abs", base))))
    odd = of("ne", f("mul", f("floor", f("mul", exponent, half)), two), exponent)
    signed = select(of("and", of("lt", base, zero), odd), f("neg", size), size)
    return select(of("eq", exponent, zero), one, signed)  # of zero, and of what is infinite or NaN, too


@remembered
def _is_whole(e: Expr) -> bool:
    """Whether a float is of integers alone: finite, and whole."""
    if isinstance(e, Const):
        return math.isfinite(e.value) and e.value == int(e.value)
    if not isinstance(e, Op):
        return False
    if e.name == "cast":
        return is_int(e.args[0].dtype)
    return e.name in ("add", "sub", "mul", "neg", "abs", "max", "min") and all(map(_is_whole, e.args))


def _float_of_parts(e: Expr) -> Expr:
    """The float of a sum of integers as a sum of floats, where each depends on fewer axes and all sums are exact."""
    if not isinstance(e, Op) or e.name != "cast" or not is_float(e.dtype) or not is_int(e.args[0].dtype):
        return e
    whole = e.args[0]
    if isinstance(whole, Op) and whole.name == "abs":
        inner = cast(whole.args[0], e.dtype)
        parts = _float_of_parts(inner)
        return e if parts is inner else op("abs", parts, dtype=e.dtype)
    terms, c = linear(whole)
    spans = [bounds(t) for t in terms]
    largest = abs(c) + sum(abs(k) * max(map(abs, s)) if s else EXACT for k, s in zip(terms.values(), spans))
    groups: dict[frozenset[Axis], dict[Expr, int]] = {}
    for t, k in terms.items():
        groups.setdefault(free_axes(t), {})[t] = k
    if len(groups) < 2 or largest >= EXACT or free_axes(whole) in groups:
        return e
    out = cast(const(c, whole.dtype), e.dtype)
    # Those with a positive sign come first, for the others to be taken from them.
    for group in sorted(groups.values(), key=lambda g: -max(g.values())):
        sign = 1 if max(group.values()) > 0 else -1
        part = cast(from_linear(({t: sign * k for t, k in group.items()}, 0), whole.dtype), e.dtype)
        out = op("add" if sign > 0 else "sub", out, part, dtype=e.dtype)
    return out


def _is_exp(e: Expr) -> bool:
    return isinstance(e, Op) and e.name == "exp" and is_float(e.dtype) and bool(free_axes(e))


def _is_of_statistics(e: Expr) -> bool:
    """Whether all of an expression is of running statistics of rows: large ones cancel as they are, not scaled."""
    return all(isinstance(n, Ref | Const | Op) for n in walk(e))


def _power_of_two(e: Expr) -> Expr:
    (exponent,) = e.args  # type: ignore[union-attr]
    base = math.log2(math.e)
    if not isinstance(exponent, Op) or exponent.name not in ("add", "sub") or _is_of_statistics(exponent):
        core, factor = positive_factor(exponent)
        return op("exp2", op("mul", core, const(factor * base, e.dtype), dtype=e.dtype), dtype=e.dtype)
    x, reference = exponent.args
    if exponent.name == "sub" and free_axes(reference) < free_axes(x):
        if may_be_large(x, reference) or not is_narrow(x):
            return power_of_difference(x, reference, 1.0, e.dtype)
    cores = [positive_factor(a) for a in exponent.args]
    scaled = (op("mul", core, const(factor * base, e.dtype), dtype=e.dtype) for core, factor in cores)
    return op("exp2", op(exponent.name, *scaled, dtype=e.dtype), dtype=e.dtype)
