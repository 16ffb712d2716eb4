"""Positions that views divide: what they are where a mask lets them through.

A relative shift is a view of a padded matrix: the element (i, j) comes from row (i·n + j + n) // (n + 1) of it. That is i
where a mask lets only j <= i through; and where no mask tells, it is one of two rows, by whether j <= i.
"""

from __future__ import annotations

from dataclasses import replace

from ..build import negate, op, select, with_children
from ..dtype import is_int
from ..expr import Const, Expr, Op, Reduce, children, const, free_axes, reductions, walk
from ..integer import Linear, divided, floordiv, linear, linear_bounds, mod
from .fuse import Fused

Facts = tuple[Linear, ...]


def by_cases(fused: Fused) -> Fused:
    """Before: `select(j <= i, k[(i * 8 + j + 8) // 9], -inf)`. After: `select(j <= i, k[i], -inf)`."""
    return Fused(tuple(replace(o, expr=_Cases().visit(o.expr, ())) for o in fused.outputs))


class _Cases:
    def __init__(self) -> None:
        self.memo: dict[tuple[Expr, int], Expr] = {}
        self.known: dict[tuple, int] = {}

    def visit(self, e: Expr, facts: Facts) -> Expr:
        """`e` where the facts hold: linear forms of indices that are at most 0."""
        if not any(map(_is_division, walk(e))):
            return e
        facts = tuple(f for f in facts if any(free_axes(t) & free_axes(e) for t in f[0]))
        key = e, self.known.setdefault(tuple((tuple(f.items()), c) for f, c in facts), len(self.known))
        if key not in self.memo:
            self.memo[key] = self._visit(e, facts)
        return self.memo[key]

    def _visit(self, e: Expr, facts: Facts) -> Expr:
        if isinstance(e, Reduce):
            outside = tuple(f for f in facts if not any(e.axis in free_axes(t) for t in f[0]))
            return with_children(e, (self.visit(e.body, outside),))
        if isinstance(e, Op) and e.name == "select":
            condition = self.visit(e.args[0], facts)
            if isinstance(condition, Const):
                return self.visit(e.args[1 if condition.value else 2], facts)
            then = self.visit(e.args[1], (*facts, *_told(condition)))
            return select(condition, then, self.visit(e.args[2], (*facts, *_told(negate(condition)))))
        args = tuple(self.visit(c, facts) for c in children(e))
        if isinstance(e, Op) and _is_division(e):
            return (floordiv if e.name == "floordiv" else mod)(args[0], int(e.args[1].value), e.dtype, facts)  # type: ignore[union-attr]
        return _decided(with_children(e, args), facts)


def _is_division(e: Expr) -> bool:
    """Whether `e` is a quotient or remainder of an index of several axes."""
    if not isinstance(e, Op) or e.name not in ("floordiv", "mod") or not is_int(e.dtype):
        return False
    n = e.args[1]
    return isinstance(n, Const) and n.value > 0 and len(free_axes(e.args[0])) > 1


def _told(condition: Expr) -> Facts:
    """What is at most 0 where `condition` holds."""
    if not isinstance(condition, Op):
        return ()
    if condition.name == "and":
        return tuple(f for a in condition.args for f in _told(a))
    if condition.name not in ("lt", "le", "gt", "ge") or not all(is_int(a.dtype) for a in condition.args):
        return ()
    a, b = condition.args if condition.name in ("lt", "le") else condition.args[::-1]
    terms, c = linear(op("sub", a, b, dtype="i64"))
    return ((terms, c + (condition.name in ("lt", "gt"))),) if terms else ()


def _decided(e: Expr, facts: Facts) -> Expr:
    """A comparison that the facts decide is what they say."""
    if not isinstance(e, Op) or e.name not in ("lt", "le", "gt", "ge"):
        return e
    for outcome in (True, False):
        for terms, c in _told(negate(e) if outcome else e):
            span = linear_bounds((terms, c), facts)
            if span is not None and span[0] > 0:
                return const(outcome, "bool")
    return e
