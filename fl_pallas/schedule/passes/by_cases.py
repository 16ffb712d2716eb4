"""Positions that views divide: what they are where a mask lets them through.

A relative shift is a view of a padded matrix: the element (i, j) comes from row (i·n + j + n) // (n + 1) of it. That is
i where a mask lets only j <= i through; and where no mask tells, it is one of two rows, by whether j <= i.
"""

from __future__ import annotations

from dataclasses import replace

from ..build import difference, negate, op, select, substitute, with_children
from ..dtype import is_int
from ..expr import Axis, Const, Expr, Op, Reduce, children, const, free_axes, walk
from ..integer import Linear, floordiv, from_linear, least, linear, linear_bounds, mod
from ..scan import RUNNING
from .fuse import Fused

# Conditions to go by in one expression.
MAX_CASES = 2
Facts = tuple[Linear, ...]


def by_cases(fused: Fused) -> Fused:
    """Before: `select(j <= i, k[(i * 8 + j + 8) // 9], -inf)`. After: `select(j <= i, k[i], -inf)`."""
    return Fused(tuple(replace(o, expr=solved(o.expr, o.axes)) for o in fused.outputs))


def solved(e: Expr, axes: tuple[Axis, ...]) -> Expr:
    """`e`, of these axes, with its divided positions by cases."""
    return _Cases().whole(e, (), frozenset(axes))


def under_masks(e: Expr) -> Expr:
    """`e` without the tests that masks around them decide."""
    return _Cases(every=True).visit(e, ())


class _Cases:
    """every: whether what has nothing divided in it is looked at too."""

    def __init__(self, every: bool = False) -> None:
        self.every = every
        self.memo: dict[tuple[Expr, int], Expr] = {}
        self.known: dict[tuple, int] = {}
        self.plain: dict[Expr, bool] = {}

    def whole(self, e: Expr, facts: Facts, own: frozenset[Axis]) -> Expr:
        """`e`, a case each where one of two quotients is known; the cases go as far in as they can.

        own: axes that have their first values here; a condition without them is for what is around.
        """
        e = self.visit(e, facts)
        for _ in range(MAX_CASES):
            found = (c for n in walk(e) if _is_division(n) for c in _cases(n, facts) if free_axes(c) & own)
            condition = next(found, None)
            if condition is None:
                break
            held = _holding(e, condition, facts)
            place, known = e, facts
            while not isinstance(place, Reduce):
                inside = [c for c in children(place) if c in held]
                if len(inside) != 1 or is_int(inside[0].dtype):
                    break
                (child,) = inside
                if isinstance(place, Op) and place.name == "select" and child is not place.args[0]:
                    known = (*known, *_told_in(place.args[0], child is place.args[1]))
                place = child
            cases = (self.visit(place, (*known, *_told_in(condition, holds))) for holds in (True, False))
            e = substitute(e, {}, {place: select(condition, *cases)})
        return e

    def visit(self, e: Expr, facts: Facts) -> Expr:
        """`e` where the facts hold: linear forms of indices that are at most 0."""
        if not self.every and self._is_plain(e):
            return e
        facts = tuple(f for f in facts if any(free_axes(t) & free_axes(e) for t in f[0]))
        key = e, self.known.setdefault(tuple((tuple(f.items()), c) for f, c in facts), len(self.known))
        if key not in self.memo:
            self.memo[key] = self._visit(e, facts)
        return self.memo[key]

    def _is_plain(self, e: Expr) -> bool:
        """Whether nothing in `e` is divided."""
        if e not in self.plain:
            divides = isinstance(e, Op) and e.name in ("floordiv", "mod")
            self.plain[e] = not divides and all(map(self._is_plain, children(e)))
        return self.plain[e]

    def _visit(self, e: Expr, facts: Facts) -> Expr:
        if isinstance(e, Reduce):
            outside = tuple(f for f in facts if not any(e.axis in free_axes(t) for t in f[0]))
            return with_children(e, (self.whole(e.body, outside, frozenset((e.axis,))),))
        if isinstance(e, Op) and e.name == "select":
            condition = self.visit(e.args[0], facts)
            if isinstance(condition, Const):
                return self.visit(e.args[1 if condition.value else 2], facts)
            then = self.visit(e.args[1], (*facts, *_told_in(condition, True)))
            return select(condition, then, self.visit(e.args[2], (*facts, *_told_in(condition, False))))
        if isinstance(e, Op) and e.name in RUNNING:
            # What is summed is of other indices than the one of which something is known.
            along = free_axes(e.args[1])
            facts = tuple(f for f in facts if not any(along & free_axes(t) for t in f[0]))
        args = tuple(self.visit(c, facts) for c in children(e))
        if isinstance(e, Op) and _is_division(e):
            return (floordiv if e.name == "floordiv" else mod)(args[0], int(e.args[1].value), e.dtype, facts)  # type: ignore[union-attr]
        return _decided(_undivided(with_children(e, args)), facts)


def _is_division(e: Expr) -> bool:
    """Whether `e` is a quotient or remainder of an index of several axes."""
    if not isinstance(e, Op) or e.name not in ("floordiv", "mod") or not is_int(e.dtype):
        return False
    n = e.args[1]
    return isinstance(n, Const) and n.value > 0 and len(free_axes(e.args[0])) > 1


def _cases(division: Expr, facts: Facts) -> list[Expr]:
    """A condition under which a division has the smaller of two quotients; none if there are other than two."""
    assert isinstance(division, Op) and isinstance(division.args[1], Const)
    n = int(division.args[1].value)
    terms, c = linear(division.args[0])
    rest = {t: k for t, k in least(terms, n).items() if k}, c
    span = linear_bounds(rest, facts)
    if span is None or span[1] // n != span[0] // n + 1:
        return []
    return [op("lt", from_linear(rest, "i64"), const(span[1] // n * n, "i64"), dtype="bool")]


def _holding(e: Expr, condition: Expr, facts: Facts) -> set[Expr]:
    """The nodes of `e` that hold a division with these cases."""
    held: set[Expr] = set()
    for n in walk(e):
        if any(c in held for c in children(n)) or _is_division(n) and condition in _cases(n, facts):
            held.add(n)
    return held


def _undivided(e: Expr, fewest: int = 2) -> Expr:
    """a // n >= b as a >= b · n, of `fewest` terms at least: a // n and, of two, those of b."""
    if not isinstance(e, Op) or e.name not in ("lt", "le", "gt", "ge") or not is_int(e.args[0].dtype):
        return e
    terms, c = difference(*e.args)
    quotients = [t for t in terms if isinstance(t, Op) and t.name == "floordiv" and isinstance(t.args[1], Const)]
    if len(quotients) != 1 or terms[quotients[0]] != 1 or len(terms) < fewest:
        return e
    (quotient,) = quotients
    n = int(quotient.args[1].value)  # type: ignore[union-attr]
    rest = {t: -k * n for t, k in terms.items() if t is not quotient}
    # a // n + rest < 0, or <= 0, that is < 1.
    limit = from_linear((rest, ((e.name in ("le", "gt")) - c) * n), "i64")
    return op("lt" if e.name in ("lt", "le") else "ge", quotient.args[0], limit, dtype="bool")  # type: ignore[union-attr]


def _told_in(condition: Expr, holds: bool) -> Facts:
    """What is at most 0 where a condition holds, or where it does not."""
    return told(condition if holds else negate(condition))


def told(condition: Expr) -> Facts:
    """What is at most 0 where `condition` holds."""
    condition = _undivided(condition, fewest=1)
    if not isinstance(condition, Op):
        return ()
    if condition.name == "and":
        return tuple(f for a in condition.args for f in told(a))
    if condition.name not in ("lt", "le", "gt", "ge") or not all(is_int(a.dtype) for a in condition.args):
        return ()
    a, b = condition.args if condition.name in ("lt", "le") else condition.args[::-1]
    terms, c = difference(a, b)
    return ((terms, c + (condition.name in ("lt", "gt"))),) if terms else ()


def _decided(e: Expr, facts: Facts) -> Expr:
    """A comparison that the facts decide is what they say."""
    if not isinstance(e, Op) or e.name not in ("lt", "le", "gt", "ge"):
        return e
    for outcome in (True, False):
        for terms, c in told(negate(e) if outcome else e):
            span = linear_bounds((terms, c), facts)
            if span is not None and span[0] > 0:
                return const(outcome, "bool")
    return e
