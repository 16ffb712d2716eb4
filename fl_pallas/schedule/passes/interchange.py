"""Sums in another order: what a number takes of each member of a batch is summed before the members are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..build import reduce, rewrite, substitute
from ..expr import Axis, Const, Expr, Op, Reduce, free_axes, index, loads, reductions, ref
from .covered import is_batch_sum, is_covered
from .cut import is_larger_than
from .fuse import Fused

# Numbers that a row takes of each element (coordinates), at most, beside what a kernel computes of it.
FEATURES = 4


def interchange(fused: Fused) -> Fused:
    """`sum[j](select(t == f(i, j), sum[b](s(b, i, j)), 0))` → `sum[b](sum[j](select(t == f(i, j), s(b, i, j), 0)))`.

    The gradient of a bias that a batch shares, [i, j], need not be stored for its table's positions t to be summed: of
    each member a position reads the few tiles that are its own. A slope times a distance has no table: what it takes of
    each row is one more sum of the kernel of the queries. Where a table's is no larger than the operands that is slower
    (16 heads, 512 keys, 16 members: 6.5 ms for 1.2), and it is stored. Of several sums (a bias that is added, and gates
    besides) all are taken together.
    """
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _outward)) for o in fused.outputs))


def _outward(e: Expr) -> Expr:
    if not isinstance(e, Reduce) or e.kind != "sum":
        return e
    if (sums := _added(e.body, e)) and len({(r.axis.extent, r.axis.size) for r in sums}) == 1:
        axis = next(iter(sums)).axis
        inside = {r: substitute(r.body, {r.axis: index(axis)}) for r in sums}
        each = reduce("sum", e.axis, substitute(e.body, {}, inside), e.dtype)
        return reduce("sum", axis, _outward(each), e.dtype)
    return e


def is_larger_than_operands(r: Expr) -> bool:
    """Whether there are more results than elements of each operand; one that is read at several axes at once is a
    table."""
    return is_larger_than(r, [n for n in loads(r) if all(len(free_axes(i)) <= 1 for i in n.index)])


def _added(body: Expr, e: Reduce, tests: tuple[Expr, ...] = ()) -> dict[Reduce, None] | None:
    """The sums over batches that `body` adds up, each times what does not depend on its batch, where tests hold; 0
    elsewhere. None if that is not what it is, or if members are not to be summed first."""
    if isinstance(body, Reduce):
        if not is_batch_sum(_without_statistics(body)):
            return None
        of_table = any(e.axis in free_axes(t) and free_axes(t) - free_axes(body) for t in tests)
        return {body: None} if (is_larger_than_operands(body) if of_table else _is_less_of_each(e, body)) else None
    if not isinstance(body, Op):
        return None
    others: list[Expr] = []
    if body.name == "select":
        test, inner, zero = sorted(body.args, key=is_zero)
        if not is_zero(zero):
            return None
        added, others, tests = [inner], [test], (*tests, test)
    elif body.name in ("mul", "div"):
        first, second = body.args
        turned = body.name == "mul" and not any(is_batch_sum(_without_statistics(r)) for r in reductions(first))
        added, others = ([second], [first]) if turned else ([first], [second])
    elif body.name in ("neg", "cast", "add", "sub"):
        added = [*body.args]
    else:
        return None
    found: dict[Reduce, None] = {}
    for a in added:
        if (sums := _added(a, e, tests)) is None:
            return None
        found |= sums
    return None if any(r in reductions(o) or r.axis in free_axes(o) for r in found for o in others) else found


def _is_less_of_each(e: Reduce, r: Reduce) -> bool:
    """Whether all that `e` takes of each member is less than what `r` gives of all, and no matrix product of each; and
    a member is no part of several results (weights of heads that are mixed)."""
    own, members = free_axes(e), [n for n in reductions(_without_statistics(r).body) if r.axis in free_axes(n)]
    less = count(own - free_axes(r)) <= FEATURES and count({*own, r.axis}) < count(free_axes(r))
    return less and bool(members) and all(free_axes(r) <= free_axes(n) for n in members)


def count(axes: Iterable[Axis]) -> int:
    """How many elements have these axes."""
    return math.prod(a.extent for a in axes)


def _without_statistics(r: Reduce) -> Reduce:
    """`r` with what is known of rows, or of columns, in place of the sums that tell it."""
    found = [n for n in reductions(r.body) if not is_covered(n) and not free_axes(r) <= free_axes(n)]
    return replace(r, body=substitute(r.body, {}, {n: ref("%known", tuple(free_axes(n)), n.dtype) for n in found}))


def is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0
