"""Interval arithmetic on expressions: their least and greatest value over a tile.

A bool's span is (whether it is certain, whether it is possible): False < True.
"""

from __future__ import annotations

from collections.abc import Callable

from .build import FALSE, TRUE, negate, op
from .dtype import is_int
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
        return equal if name == "eq" else _opposite(equal)

    def _sides(self, e: Op) -> tuple[str, Expr, Expr]:
        """The comparison with all that depends on one part of the tile on its left, with a positive sign."""
        terms, c = linear(op("sub", *e.args, dtype="i64"))
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
                    return _int("min", spans[0][0], spans[1][0]), _int("max", spans[0][1], spans[1][1])
                divisor = e.args[1]
                if isinstance(divisor, Const) and divisor.value > 0:
                    return _int("floordiv", spans[0][0], divisor), _int("floordiv", spans[0][1], divisor)
        limits = bounds(e)
        return None if limits is None else (const(limits[0], "i64"), const(limits[1], "i64"))


def _ordered(name: str, left: Span, right: Span) -> Span:
    """lt, le, gt or ge of two spans. Written so that a NaN among the ends makes it possible and not certain."""
    if name in ("gt", "ge"):
        name, left, right = _MIRRORED[name], right, left
    certain = op(name, left[1], right[0], dtype="bool")
    never = op("ge" if name == "lt" else "gt", left[0], right[1], dtype="bool")
    return certain, negate(never)


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
