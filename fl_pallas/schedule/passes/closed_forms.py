"""Whether any position of a row meets a condition, as what the row's own position tells.

A loop over all columns for that would have no bounds, and a kernel that looks whether a row sees anything would go on
behind its window's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce as folded

from ..build import FALSE, TRUE, difference, negate, op, rewrite
from ..dtype import is_int
from ..expr import Axis, Const, Expr, Op, Reduce, const, free_axes, reductions
from ..program import Program, Value, reads_of
from .bound_loops import solve, solve_certain, without_not
from .resolve_views import inlined


def in_closed_form(program: Program) -> Program:
    """`any[j](i - j <= 9 & j < lengths[b])` → `i - 9 < lengths[b] & i - 9 < 64 & 0 < lengths[b]`, of 64 columns, and
    the same of `all`; what data decides otherwise stays."""
    pointwise = {v.name: v for v in program.values if v.expr is not None and not reductions(v.expr)}
    made: dict[str, Value] = {}
    decided: dict[str, Value] = {}
    values = []
    for v in program.values:
        if v.expr is not None:
            expr = inlined(v.expr, decided)
            if any(r.kind in ("any", "all") for r in reductions(expr)):
                expr = rewrite(expr, lambda e: _closed(e, pointwise, made))
            if expr is not v.expr:
                v = replace(v, expr=expr, reads=reads_of(expr))
                decided |= {v.name: v} if isinstance(expr, Const) else {}
        values.append(v)
    return replace(program, values=tuple(values))


def _closed(e: Expr, pointwise: Mapping[str, Value], made: dict[str, Value]) -> Expr:
    if not isinstance(e, Reduce) or e.kind not in ("any", "all"):
        return e
    body = inlined(e.body, pointwise, made)
    found = _any(body if e.kind == "any" else negate(body), e.axis)
    return e if found is None else found if e.kind == "any" else negate(found)


def _any(condition: Expr, axis: Axis) -> Expr | None:
    """Whether `condition` holds for any index of `axis`, without that axis; None if there is no such form."""
    cases = [_of_all(case, axis) for case in _cases(condition)]
    known = [c for c in cases if c is not None]
    return folded(_or, known, FALSE) if len(known) == len(cases) else None


def _cases(condition: Expr) -> Iterator[Expr]:
    """Conditions of which one holds where `condition` does."""
    return map(negate, _conjuncts(negate(condition)))


def _conjuncts(condition: Expr) -> Iterator[Expr]:
    """Conditions that all hold where `condition` does."""
    match condition:
        case Op(name="and", args=(a, b)):
            yield from (*_conjuncts(a), *_conjuncts(b))
        case Op(name="not") if (inner := without_not(condition)) is not None:
            yield from _conjuncts(inner)
        case Op(name="eq", args=(a, b)) if is_int(a.dtype) and is_int(b.dtype):
            yield from (op(name, a, b, dtype="bool") for name in ("le", "ge"))
        case _:
            yield condition


def _of_all(condition: Expr, axis: Axis) -> Expr | None:
    """`_any` of what holds in one interval of indices."""
    rest, lowest, beyond = TRUE, [const(0, "i64")], [const(axis.extent, "i64")]
    for c in _conjuncts(condition):
        if axis not in free_axes(c):
            rest = _and(rest, c)
            continue
        interval = solve_certain(c, axis, frozenset())
        if interval is None or not all(map(_is_same, interval, solve(c, axis, frozenset()))):
            return None
        lower, upper = interval
        lowest += [*flat("max", lower)] if lower is not None else []
        beyond += [*flat("min", upper)] if upper is not None else []
    pairs = (op("lt", low, high, dtype="bool") for low in lowest for high in beyond)
    return folded(_and, pairs, rest)


def _is_same(a: Expr | None, b: Expr | None) -> bool:
    if a is None or b is None:
        return a is b
    return difference(a, b) == ({}, 0)


def flat(name: str, e: Expr) -> Iterator[Expr]:
    """What `e` is the largest, or the least, of."""
    if isinstance(e, Op) and e.name == name:
        for a in e.args:
            yield from flat(name, a)
    else:
        yield e


def _and(a: Expr, b: Expr) -> Expr:
    return op("and", a, b, dtype="bool")


def _or(a: Expr, b: Expr) -> Expr:
    return op("or", a, b, dtype="bool")
