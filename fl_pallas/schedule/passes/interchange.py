"""Sums in another order: what a number takes of each member of a batch is summed before the members are."""

from __future__ import annotations

from dataclasses import replace

from ..build import reduce, rewrite, substitute
from ..expr import Axis, Const, Expr, Op, Reduce, free_axes, index, loads, reductions
from .cut import is_larger_than
from .fuse import Fused
from .stream import is_batch_sum


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
    if (sums := _added(e.body, e.axis)) and len({(r.axis.extent, r.axis.size) for r in sums}) == 1:
        axis = next(iter(sums)).axis
        inside = {r: substitute(r.body, {r.axis: index(axis)}) for r in sums}
        each = reduce("sum", e.axis, substitute(e.body, {}, inside), e.dtype)
        return reduce("sum", axis, _outward(each), e.dtype)
    return e


def is_larger_than_operands(r: Expr) -> bool:
    """Whether there are more results than elements of each operand; one that is read at several axes at once is a
    table."""
    return is_larger_than(r, [n for n in loads(r) if all(len(free_axes(i)) <= 1 for i in n.index)])


def _added(body: Expr, axis: Axis, tests: tuple[Expr, ...] = ()) -> dict[Reduce, None] | None:
    """The sums over batches that `body` adds up, each times what does not depend on its batch, where tests hold; 0
    elsewhere. None if that is not what it is, or if members are not to be summed first."""
    if isinstance(body, Reduce):
        of_table = any(axis in free_axes(t) and free_axes(t) - free_axes(body) for t in tests)
        return {body: None} if is_batch_sum(body) and (not of_table or is_larger_than_operands(body)) else None
    if not isinstance(body, Op):
        return None
    others: list[Expr] = []
    if body.name == "select":
        test, inner, zero = sorted(body.args, key=is_zero)
        if not is_zero(zero):
            return None
        added, others, tests = [inner], [test], (*tests, test)
    elif body.name in ("mul", "div"):
        inner, *others = sorted(body.args, key=_holds_no_batch_sum) if body.name == "mul" else body.args
        added = [inner]
    elif body.name in ("neg", "cast", "add", "sub"):
        added = [*body.args]
    else:
        return None
    found: dict[Reduce, None] = {}
    for a in added:
        if (sums := _added(a, axis, tests)) is None:
            return None
        found |= sums
    return None if any(r in reductions(o) or r.axis in free_axes(o) for r in found for o in others) else found


def _holds_no_batch_sum(e: Expr) -> bool:
    return not any(map(is_batch_sum, reductions(e)))


def is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0
