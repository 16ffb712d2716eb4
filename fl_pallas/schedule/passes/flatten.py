"""Sums over parts, and over all within a part, are sums over the whole, where operands are read as a whole.

`sum[n < 4](sum[i < 12](p(n·12 + i) * q[n·12 + i]))` → `sum[r < 48](p(r) * q[r])`: the gradient of keys that chunks of
queries share is a sum over chunks of what each makes of it, and the loop goes over all queries.
"""

from __future__ import annotations

from dataclasses import replace

from ..build import op, rewrite, substitute
from ..expr import Axis, Expr, Reduce, const, free_axes, index, loads, raw_reduce
from ..integer import linear
from .fuse import Fused


def flatten(fused: Fused) -> Fused:
    """Reductions of the outputs, over whole axes."""
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _whole)) for o in fused.outputs))


def is_of_parts(e: Expr | None) -> bool:
    """Whether an expression is a reduction over parts, and over all within a part, of operands that are whole."""
    if not isinstance(e, Reduce) or not isinstance(e.body, Reduce) or e.kind != e.body.kind:
        return False
    return _is_read_whole(e.body.body, e.axis, e.body.axis)


def _whole(e: Expr) -> Expr:
    if not is_of_parts(e):
        return e
    assert isinstance(e, Reduce) and isinstance(e.body, Reduce)
    outer, inner, body = e.axis, e.body.axis, e.body.body
    axis = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
    n = const(inner.extent, "i64")
    places = {outer: op("floordiv", index(axis), n, dtype="i64"), inner: op("mod", index(axis), n, dtype="i64")}
    return raw_reduce(e.kind, axis, substitute(body, places), e.dtype)


def _is_read_whole(body: Expr, outer: Axis, inner: Axis) -> bool:
    """Whether some operand has the parts one after another, and none is of a part as a whole (what each member of a
    batch knows of a query that all share)."""
    read = [n for n in loads(body) if outer in free_axes(n)]
    if not all(inner in free_axes(n) for n in read):
        return False
    for terms, _ in (linear(i) for n in read for i in n.index):
        step = terms.get(index(inner), 0)
        if step and terms.get(index(outer), 0) == step * inner.extent:
            return True
    return False
