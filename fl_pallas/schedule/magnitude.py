"""How large a number can be, as far as its expression tells."""

from __future__ import annotations

import math

from .dtype import is_float
from .expr import Const, Expr, Op
from .integer import bounds
from .laws import non_negative
from .remember import remembered


@remembered
def magnitude(e: Expr) -> float:
    """A bound of |e| over all its axes, but for NaN; infinite if none is known."""
    if not is_float(e.dtype):
        span = bounds(e)
        return math.inf if span is None else float(max(map(abs, span)))
    if isinstance(e, Const):
        return math.inf if math.isnan(e.value) else abs(float(e.value))
    if not isinstance(e, Op):
        return math.inf
    if e.name in ("sin", "cos", "tanh", "sigmoid", "erf", "uniform"):
        return 1.0
    if e.name in ("exp", "exp2") and _is_below(e.args[0]):
        return 1.0
    args = [magnitude(a) for a in e.args[e.name == "select" :]]
    if e.name in ("cast", "neg", "abs", "rounded"):
        return args[0]
    if e.name in ("add", "sub"):
        return sum(args)
    if e.name in ("max", "min", "select"):
        return max(args)
    if e.name == "mul" and math.inf not in args:
        return math.prod(args)
    return math.inf


@remembered
def _is_below(e: Expr) -> bool:
    """Whether e is provably <= 0 (or NaN)."""
    if isinstance(e, Const):
        return e.value <= 0
    if not isinstance(e, Op):
        return False
    if e.name == "neg":
        return non_negative(e.args[0], frozenset())
    if e.name == "mul":
        below = [_is_below(a) for a in e.args]
        return any(one and non_negative(other, frozenset()) for one, other in zip(below, reversed(e.args), strict=True))
    return any(map(_is_below, e.args)) if e.name == "min" else False
