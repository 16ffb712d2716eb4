"""Interval arithmetic on expressions: their least and greatest value over a tile.

A bool's span is (whether it is certain, whether it is possible): False < True.
"""

from __future__ import annotations

from collections.abc import Callable

from .build import FALSE, TRUE, cast, difference, negate, op, select
from .dtype import is_float, is_int
from .expr import Const, Expr, Op, const
from .integer import bounds, from_linear, linear

Span = tuple[Expr, Expr]
Known = Callable[[Expr], Span | None]

UNKNOWN: Span = (FALSE, TRUE)
_ORDER = ("lt", "le", "gt", "ge")
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def truth(condition: Expr, known: Known, group: Callable[[Expr], object]) -> Span:
    """(certain, possible) of a bool over a tile: unknown parts are possible and not certain.

    Args:
      condition: a bool expression.
      known: the span of an expression where it is known as a whole, tried before its parts.
      group: what of a tile an expression depends on; the terms of a sum that agree on it are taken
        together, so that `position[j] - j` is known as a whole.
    """
    return _Spans(known, group).truth(condition)


class _Spans:
    def __init__(self, known: Known, group: Callable[[Expr], object]):
        self.known, self.group = known, group

    def truth(self, e: Expr) -> Span:
        found = self.known(e)
        if found is not None:
            return found
        if not isinstance(e, Op):
            return UNKNOWN
        if e.name in ("and", "or"):
            return _each(e.name, *(self.truth(a) for a in e.args), dtype="bool")
        if e.name == "not":
            return _opposite(self.truth(e.args[0]))
        if e.name == "select":
            test, then, other = e.args
            left = op("and", test, then, dtype="bool")
            return self.truth(op("or", left, op("and", negate(test), other, dtype="bool"), dtype="bool"))
        if e.name in _MIRRORED:
            return self._comparison(e)
        return UNKNOWN

    def _comparison(self, e: Op) -> Span:
        name, (a, b) = e.name, e.args
        if is_int(a.dtype) and is_int(b.dtype):
            name, a, b = self._sides(e)
        left, right = self.span(a), self.span(b)
        if left is None or right is None:
            return UNKNOWN
        if name in _ORDER:
            return _ordered(name, left, right)
        equal = _each("and", _ordered("le", left, right), _ordered("ge", left, right), dtype="bool")
        if _is_wide(left) or _is_wide(right):
            equal = FALSE, equal[1]
        return equal if name == "eq" else _opposite(equal)

    def _sides(self, e: Op) -> tuple[str, Expr, Expr]:
        """The comparison with all that depends on one part of the tile on its left, with a positive sign."""
        terms, c = difference(*e.args)
        groups = [self.group(t) for t in terms]
        # Neither side is subtracted from the other: ids may be as large as an integer can be.
        lead = next((g for g in groups if g), None)
        left = {t: k for (t, k), g in zip(terms.items(), groups, strict=True) if g == lead}
        right = {t: -k for t, k in terms.items() if t not in left}
        if next(iter(left.values()), 1) > 0:
            return e.name, from_linear((left, 0), "i64"), from_linear((right, -c), "i64")
        flipped = ({t: -k for t, k in side.items()} for side in (left, right))
        return _MIRRORED[e.name], from_linear((next(flipped), 0), "i64"), from_linear((next(flipped), c), "i64")

    def span(self, e: Expr) -> Span | None:
        """The least and the greatest value of a number; None if they are not known."""
        found = self.known(e)
        if found is not None or not is_int(e.dtype):
            return found
        terms, c = linear(e)
        if e in terms:
            return self._operation(e)
        total: Span | None = (const(c, "i64"), const(c, "i64"))
        parts: dict[object, dict[Expr, int]] = {}
        for t, k in terms.items():
            parts.setdefault(self.group(t) or t, {})[t] = k
        for part in parts.values():
            inner = self._part(part)
            if inner is None:
                return None
            total = _each("add", total, inner, dtype="i64")
        return total

    def _part(self, terms: dict[Expr, int]) -> Span | None:
        """The span of a sum of terms of one group, or of one term."""
        sign = 1 if next(iter(terms.values())) > 0 else -1
        together = from_linear(({t: sign * k for t, k in terms.items()}, 0), "i64")
        found = self.known(together)
        if found is not None:
            return _scaled(found, sign)
        total: Span | None = (const(0, "i64"), const(0, "i64"))
        for t, k in terms.items():
            inner = self.known(t) or self._operation(t)
            if inner is None:
                return None
            total = _each("add", total, _scaled(inner, k), dtype="i64")
        return total

    def _operation(self, e: Expr) -> Span | None:
        name = e.name if isinstance(e, Op) else ""
        if isinstance(e, Op) and name in ("abs", "max", "min", "select", "floordiv"):
            args = [self.span(a) for a in (e.args[1:] if name == "select" else e.args)]
            spans = [a for a in args if a is not None]
            if len(spans) == len(args):
                if name == "abs":
                    low, high = _scaled(spans[0], -1)
                    return _int("max", _int("max", spans[0][0], low), const(0, "i64")), _int("max", spans[0][1], high)
                if name in ("max", "min"):
                    return _each(name, *spans, dtype="i64")
                if name == "select":
                    return self._selected(e.args[0], *spans)
                divisor = e.args[1]
                if isinstance(divisor, Const) and divisor.value > 0:
                    return _int("floordiv", spans[0][0], divisor), _int("floordiv", spans[0][1], divisor)
        if isinstance(e, Op) and name == "cast" and is_float(e.args[0].dtype):
            inner = self._real(e.args[0])
            if inner is not None:
                return _truncated(inner[0], -1), _truncated(inner[1], 1)
        limits = bounds(e)
        return None if limits is None else (const(limits[0], "i64"), const(limits[1], "i64"))

    def _selected(self, test: Expr, then: Span, other: Span) -> Span:
        """The span of a selection: both, unless the test is sure to go one way."""
        certain, possible = self.truth(test)

        def end(name: str, a: Expr, b: Expr) -> Expr:
            return select(certain, a, select(possible, _int(name, a, b), b))

        return end("min", then[0], other[0]), end("max", then[1], other[1])

    def _real(self, e: Expr) -> Span | None:
        """The span of a float that is made of indices by operations that grow, as rounding does: each end is computed
        as any element is."""
        if isinstance(e, Const):
            return e, e
        if not isinstance(e, Op) or not is_float(e.dtype):
            return None
        if e.name == "cast" and is_int(e.args[0].dtype):
            inner = self.span(e.args[0])
            return None if inner is None else (cast(inner[0], e.dtype), cast(inner[1], e.dtype))
        spans = [self._real(a) for a in e.args]
        known = [s for s in spans if s is not None]
        if len(known) < len(spans):
            return None
        first, factor = known[0], e.args[-1]
        if e.name in _GROWING:
            low, high = (op(e.name, *ends, dtype=e.dtype) for ends in zip(*known, strict=True))
            return low, high
        if e.name in ("sub", "neg", "abs"):
            flipped = [op("neg", x, dtype=e.dtype) for x in reversed(known[-1])]
            if e.name == "neg":
                return flipped[0], flipped[1]
            if e.name == "sub":
                return op("add", first[0], flipped[0], dtype=e.dtype), op("add", first[1], flipped[1], dtype=e.dtype)
            largest = op("max", first[1], flipped[1], dtype=e.dtype)
            least = op("max", first[0], flipped[0], dtype=e.dtype)
            return op("max", least, const(0.0, e.dtype), dtype=e.dtype), largest
        if e.name in ("mul", "div", "quotient") and isinstance(factor, Const) and factor.value > 0:
            return op(e.name, first[0], factor, dtype=e.dtype), op(e.name, first[1], factor, dtype=e.dtype)
        return None


_GROWING = ("add", "max", "min", "log", "log2", "log1p", "sqrt", "exp", "exp2")
# An infinity, as the logarithm of 0 is, becomes no integer.
_LARGEST = 2.0**30


def _truncated(e: Expr, beside: int) -> Expr:
    """An end as an integer, and one further: a logarithm is not computed to the last bit."""
    within = op("min", op("max", e, const(-_LARGEST, e.dtype), dtype=e.dtype), const(_LARGEST, e.dtype), dtype=e.dtype)
    return _int("add", cast(within, "i64"), const(beside, "i64"))


def _ordered(name: str, left: Span, right: Span) -> Span:
    """lt, le, gt or ge of two spans. Written so that a NaN among the ends makes it possible and not certain."""
    if name in ("gt", "ge"):
        name, left, right = _MIRRORED[name], right, left
    certain = op(name, left[1], right[0], dtype="bool")
    never = op("ge" if name == "lt" else "gt", left[0], right[1], dtype="bool")
    return certain, negate(never)


def _is_wide(s: Span) -> bool:
    """Whether a span is known to hold several integers."""
    terms, width = difference(s[1], s[0]) if is_int(s[0].dtype) else ({}, 0)
    return not terms and width > 0


def _opposite(s: Span) -> Span:
    return negate(s[1]), negate(s[0])


def _each(name: str, a: Span, b: Span, dtype: str) -> Span:
    """An operation that grows with both of its arguments."""
    return op(name, a[0], b[0], dtype=dtype), op(name, a[1], b[1], dtype=dtype)


def _scaled(s: Span, k: int) -> Span:
    low, high = (_int("mul", x, const(k, "i64")) for x in s)
    return (low, high) if k > 0 else (high, low)


def _int(name: str, a: Expr, b: Expr) -> Expr:
    return op(name, a, b, dtype="i64")
