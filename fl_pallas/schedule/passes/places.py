"""Where an extremum is: of what increases with scores it is where that of scores is, which a loop knows exactly."""

from __future__ import annotations

from dataclasses import replace

from ..build import COMPARISONS, op, reduce, rewrite, substitute
from ..expr import Axis, Const, Expr, Op, Reduce, free_axes, index
from .fuse import Fused


def places(fused: Fused) -> Fused:
    """Before: `exp(s[j] - m) / l == max[j](exp(s[j] - m) / l)`. After: `s[j] == max[j](s[j])`.

    A maximum that is derived from another (`max exp = exp max`) may differ from what it is the maximum of in the last
    bit, and nothing would equal it.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _of_scores)) for o in fused.outputs))


def _of_scores(e: Expr) -> Expr:
    if not isinstance(e, Op):
        return e
    if e.name == "or" and e.dtype == "bool":
        return op("or", e.args[0], _same_place(*e.args), dtype="bool")
    if e.name not in COMPARISONS:
        return e
    for n, m in enumerate(e.args):
        x = e.args[1 - n]
        if not isinstance(m, Reduce):
            continue
        along = axis_of_extremum(m, x)
        core = _core(m.body, m.axis)
        if along is not None and core is not m.body:
            sides = (substitute(core, {m.axis: index(along)}), reduce(m.kind, m.axis, core, core.dtype))
            return op(e.name, *(sides if n == 1 else sides[::-1]), dtype="bool")
    return e


def axis_of_extremum(m: Expr, x: Expr) -> Axis | None:
    """The axis of `x` along which `m` is its maximum, or minimum; None if it is none."""
    if not isinstance(m, Reduce) or m.kind not in ("max", "min"):
        return None
    own = (a for a in free_axes(x) - free_axes(m) if a.extent == m.axis.extent)
    return next((a for a in own if substitute(m.body, {m.axis: index(a)}) is x), None)


def _same_place(found: Expr, other: Expr) -> Expr:
    """`isnan` of what increases with scores, beside the place of their extremum, as that of the scores."""
    if not (isinstance(found, Op) and found.name == "eq" and isinstance(other, Op) and other.name == "isnan"):
        return other
    x, m = found.args
    along = free_axes(x) - free_axes(m)
    same = isinstance(m, Reduce) and any(_core(other.args[0], a) is x for a in along)
    return op("isnan", x, dtype="bool") if same else other


def _core(e: Expr, axis: Axis) -> Expr:
    """What `e` increases with, along the axis."""
    while isinstance(e, Op):
        varying = [n for n, a in enumerate(e.args) if axis in free_axes(a)]
        if len(varying) != 1:
            terms = _varying_terms(e, axis)
            if terms is e:
                break
            e = terms
            continue
        (n,) = varying
        others = [a for k, a in enumerate(e.args) if k != n]
        scaled = e.name == "mul" or e.name == "div" and n == 0
        increases = e.name in ("exp", "exp2", "add") or e.name == "sub" and n == 0 or scaled and _positive(others[0])
        if not increases:
            break
        e = e.args[n]
    return e


def _varying_terms(e: Expr, axis: Axis) -> Expr:
    """A sum, without the terms that are the same along the axis."""
    if not isinstance(e, Op) or e.name not in ("add", "sub"):
        return e
    a, b = e.args
    if axis not in free_axes(b):
        return _varying_terms(a, axis)
    if axis not in free_axes(a):
        return _varying_terms(b, axis) if e.name == "add" else e
    return op(e.name, _varying_terms(a, axis), _varying_terms(b, axis), dtype=e.dtype)


def _positive(e: Expr) -> bool:
    """Whether `e` is provably positive, but for underflow."""
    if isinstance(e, Const):
        return e.value > 0
    if isinstance(e, Reduce):
        return e.kind in ("sum", "max", "min", "prod") and _positive(e.body)
    if isinstance(e, Op) and e.name in ("mul", "div", "add", "max", "min"):
        return all(map(_positive, e.args))
    return isinstance(e, Op) and e.name in ("exp", "exp2")
