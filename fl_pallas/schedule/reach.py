"""What a number can be, where a condition is known to hold: its least and greatest value, and whether it may be NaN.

As for masks that are read off an expression (`passes/contributes.py`), loaded data is taken to be finite, and so is
what is computed of finite numbers: an infinity is one that is written down, -inf of a mask. A product of two vectors is
taken to be less than 2^120 at that, so that scores to which a mask adds the least number of a type (-2^128) are masked.
A running or final value (`Ref`) may be anything, unless it is known to be finite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from .build import COMPARISONS, negate
from .dtype import is_float
from .expr import Const, Expr, Index, Load, Op, Reduce, Ref, Size, children, walk
from .remember import remembered

MOST = sys.float_info.max
# The most that products of two vectors come to.
SCORE = 2.0**120
# What is smaller may be 0 where it is computed, in 32 bits; and how far a rounded number may be off.
LEAST, ROUNDING = 1e-30, 2.0**-6


@dataclass(frozen=True)
class Reach:
    """Numbers from `low` to `high`, and NaN perhaps; a bool is 0 or 1."""

    low: float
    high: float
    nan: bool = False

    def is_only(self, value: float) -> bool:
        return not self.nan and self.low == value == self.high

    @property
    def is_finite(self) -> bool:
        return not self.nan and math.inf not in (-self.low, self.high)

    def __or__(self, other: Reach) -> Reach:
        return Reach(min(self.low, other.low), max(self.high, other.high), self.nan or other.nan)


FINITE, ANYTHING, EITHER = Reach(-MOST, MOST), Reach(-math.inf, math.inf, True), Reach(0, 1)
Known = Callable[[Expr], Reach | None]


def reach(e: Expr, test: Expr, outcome: bool, known: Known) -> Reach:
    """What `e` can be where `test` has an outcome.

    Args:
      test: a bool expression.
      known: what is loaded can be, or an expression whose parts do not show that it is finite; None for not known.
    """
    return Reaches(e, known).where(test, outcome).of(e)


class Reaches:
    """What the parts of an expression can be; found once for all outcomes of tests that they do not ask.

    Args:
      known: as for `reach`.
    """

    def __init__(self, whole: Expr, known: Known):
        self.whole, self.known = whole, known
        self.outcomes: dict[Expr, bool] = {}
        self.found: dict[Expr, Reach] = {}
        self.otherwise: Reaches | None = None
        self.asking: frozenset[Expr] = frozenset()

    def where(self, test: Expr, outcome: bool) -> Reaches:
        """The same where a test has an outcome."""
        made = Reaches(self.whole, self.known)
        made.outcomes = {test: outcome, negate(test): not outcome}
        made.otherwise, made.asking = self, _asking(self.whole, test)
        return made

    def of(self, e: Expr) -> Reach:
        if self.otherwise is not None and e not in self.asking:
            return self.otherwise.of(e)
        if e not in self.found:
            found = self._of(e)
            asks = isinstance(e, Load) or not found.is_finite
            self.found[e] = asks and self.known(e) or found
        return self.found[e]

    def _of(self, e: Expr) -> Reach:
        if e in self.outcomes:
            return Reach(self.outcomes[e], self.outcomes[e])
        if isinstance(e, Const):
            value = float(e.value)
            return ANYTHING if math.isnan(value) else Reach(value, value)
        if isinstance(e, Index):
            return Reach(0, e.axis.extent - 1)
        if isinstance(e, (Load, Size)):
            return EITHER if e.dtype == "bool" else FINITE
        if isinstance(e, Ref):
            return ANYTHING
        if isinstance(e, Reduce):
            return self._reduced(e)
        return self._computed(e)

    def _reduced(self, e: Reduce) -> Reach:
        body = self.of(e.body)
        if e.kind in ("max", "min", "any", "all"):
            return body
        if e.kind == "sum" and body.is_finite:
            # A sum of what has one sign has it too.
            most = SCORE if _is_of_vectors(e.body) else MOST
            return Reach(min(body.low, 0.0) and -most, max(body.high, 0.0) and most)
        return _unknown(body)

    def _computed(self, e: Op) -> Reach:
        args = [self.of(a) for a in e.args]
        if e.name == "select":
            test, then, other = args
            return then if test.low == 1 else other if test.high == 0 else then | other
        if e.name in COMPARISONS:
            return _compared(e.name, *args)
        if e.name in _TRUTHS and e.dtype == "bool":
            return _TRUTHS[e.name](*args)
        if not is_float(e.dtype):
            same = e.name == "cast" and not is_float(e.args[0].dtype) and e.dtype != "bool"
            return args[0] if same else EITHER if e.dtype == "bool" else _unknown(*args)
        if e.name in _INCREASING:
            return _along(_INCREASING[e.name], args[0])
        rule = _RULES.get(e.name)
        if rule is not None:
            return rule(*args)
        return _unknown(*args)


def _is_of_vectors(e: Expr) -> bool:
    """Whether `e` is a product of what is loaded."""
    if isinstance(e, Op) and e.name in ("mul", "cast", "neg"):
        return all(map(_is_of_vectors, e.args))
    return isinstance(e, Load) or isinstance(e, Const) and abs(e.value) <= 1


@remembered
def _asking(e: Expr, test: Expr) -> frozenset[Expr]:
    """The parts of an expression that a test, or its negation, is a part of."""
    found = {test, negate(test)}
    for n in walk(e):
        if not found.isdisjoint(children(n)):
            found.add(n)
    return frozenset(found)


def _unknown(*of: Reach) -> Reach:
    """What is computed of numbers, in a way that is not known."""
    return FINITE if all(a.is_finite for a in of) else ANYTHING


def _compared(name: str, a: Reach, b: Reach) -> Reach:
    """A comparison is decided where its sides lie apart, or are one number each; NaN is unlike all, and not less."""
    nan = a.nan or b.nan
    ends = [(a.low, b.high), (a.high, b.low)]
    apart = a.high < b.low or b.high < a.low
    if name in ("eq", "ne"):
        if apart:
            return Reach(name == "ne", name == "ne")
        same = a.low == a.high == b.low == b.high and not nan
        return Reach(name == "eq", name == "eq") if same else EITHER
    outcomes = {COMPARISONS[name](x, y) for x, y in ends} | ({False} if nan else set())
    return Reach(min(outcomes), max(outcomes))


def _add(a: Reach, b: Reach) -> Reach:
    if any(x.low == -math.inf and y.high == math.inf for x, y in ((a, b), (b, a))):
        return ANYTHING  # inf - inf
    return _between(a.low + b.low, a.high + b.high, a, b)


def _neg(a: Reach) -> Reach:
    return Reach(-a.high, -a.low, a.nan)


def _mul(a: Reach, b: Reach) -> Reach:
    for x, y in ((a, b), (b, a)):
        if x.low <= 0 <= x.high and math.inf in (y.high, -y.low):
            return ANYTHING  # 0 · inf
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return _between(min(corners), max(corners), a, b)


def _div(a: Reach, b: Reach) -> Reach:
    if a.is_only(0.0) and b.is_finite:
        return a
    if b.is_finite and not b.low <= 0 <= b.high and not a.nan:
        corners = [x / y for x in (a.low, a.high) for y in (b.low, b.high)]
        return _between(min(corners), max(corners), a, b)
    return ANYTHING if b.is_only(0.0) else _unknown(a, b)


def _between(low: float, high: float, *of: Reach) -> Reach:
    """What is computed of numbers: finite where they are, unless it is one number."""
    if low != high and all(a.is_finite for a in of):
        low, high = max(low, -MOST), min(high, MOST)
    return Reach(low, high, any(a.nan for a in of))


def _along(f: Callable[[float], float], a: Reach) -> Reach:
    """A function that does not decrease."""
    try:
        low, high = f(a.low), f(a.high)
    except (ValueError, OverflowError):
        return _unknown(a)
    # Less than LEAST may be 0 or not.
    return _between(0.0 if 0 < low < LEAST else low, 0.0 if -LEAST < high < 0 else high, a)


def _abs(a: Reach) -> Reach:
    ends = abs(a.low), abs(a.high)
    return Reach(0.0 if a.low <= 0 <= a.high else min(ends), max(ends), a.nan)


def _rounded(a: Reach) -> Reach:
    """What is rounded: to no other side of 0, 1 or -1, which stay what they are."""
    low, high = (
        x if x in (0.0, 1.0, -1.0) or abs(x) >= MOST else x + off * abs(x)
        for x, off in ((a.low, -ROUNDING), (a.high, ROUNDING))
    )
    return _between(low, high, a)


def _pow(a: Reach, b: Reach) -> Reach:
    if b.is_only(b.low) and b.low > 0 and a.low >= 0:
        return _along(lambda x: x**b.low, a)
    return _unknown(a, b)


def _from(least: float, f: Callable[[float], float]) -> Callable[[float], float]:
    """A function that is -inf at the least number that it takes."""
    return lambda x: -math.inf if x == least else f(x)


def _grows(f: Callable[[float], float]) -> Callable[[float], float]:
    """An exponential, which Python has no large numbers for."""
    return lambda x: f(min(x, 700.0)) if x != math.inf else x


_exp = _grows(math.exp)


_INCREASING: dict[str, Callable[[float], float]] = {
    "exp": _exp,
    "exp2": lambda x: _exp(x * math.log(2)),
    "expm1": _grows(math.expm1),
    "sigmoid": lambda x: 1 / (1 + _exp(-x)) if x != -math.inf else 0.0,
    "tanh": math.tanh,
    "erf": math.erf,
    "sqrt": math.sqrt,
    "log": _from(0.0, math.log),
    "log2": _from(0.0, math.log2),
    "log1p": _from(-1.0, math.log1p),
    "sign": lambda x: float((x > 0) - (x < 0)),
    "atan": math.atan,
}
_RULES: dict[str, Callable[..., Reach]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _neg(b)),
    "neg": _neg,
    "mul": _mul,
    "div": _div,
    "quotient": _div,
    "abs": _abs,
    "max": lambda a, b: Reach(max(a.low, b.low), max(a.high, b.high), a.nan or b.nan),
    "min": lambda a, b: Reach(min(a.low, b.low), min(a.high, b.high), a.nan or b.nan),
    "pow": _pow,
    "cast": _rounded,
    "rounded": _rounded,
    "sin": lambda a: Reach(-1.0, 1.0) if a.is_finite else ANYTHING,
    "cos": lambda a: Reach(-1.0, 1.0) if a.is_finite else ANYTHING,
}
_TRUTHS: dict[str, Callable[..., Reach]] = {
    "not": lambda a: Reach(1 - a.high, 1 - a.low),
    "and": lambda a, b: Reach(min(a.low, b.low), min(a.high, b.high)),
    "or": lambda a, b: Reach(max(a.low, b.low), max(a.high, b.high)),
    "isnan": lambda a: Reach(0, a.nan),
    "isinf": lambda a: Reach(a.low == a.high and abs(a.low) == math.inf and not a.nan, not a.is_finite or a.nan),
}
