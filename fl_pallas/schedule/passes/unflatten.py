"""Reductions over flattened dimensions become reductions over each of the dimensions, where that sets others free; and
flattened axes of outputs become the axes that they were, where one of those is shifted or masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from ..build import COMPARISONS, dimensions, reduce_over, rewrite, row_major, substitute
from ..dtype import is_int
from ..expr import Axis, Const, Expr, Index, Load, Op, Reduce, free_axes, index, loads, reductions, walk
from ..inner import factors
from .covered import MAX_COVERED, is_batch_sum, is_covered
from .cut import MAX_GROWTH, is_larger_than
from .fuse import Fused, Output

# Operations that put one position beside another.
_POSITIONS = ("add", "sub", *COMPARISONS)


def unflatten(fused: Fused) -> Fused:
    """`sum[r < m·n](… max[k](f(r // n, k)) …)` → `sum[i < m](sum[j < n](… max[k](f(i, k)) …))`.

    A matrix product of views sums over all rows and columns at once, as einsum's gradient of weights that mix heads
    does. Only when they are apart is it seen that a row's own reductions are the same for all of its columns.
    """
    fused = _parallel_apart(fused)
    return Fused(tuple(replace(o, expr=rewrite(o.expr, _apart)) for o in fused.outputs))


def _parallel_apart(fused: Fused) -> Fused:
    """`o[x < m·n] = sum[j](q(x // n, x % n) * k(x % n + j))` → `o[i·n + l] = sum[j](q(i, l) * k(l + j))`.

    An einsum folds a batch into the rows of a product whose other side has none, and the gradient is made so. A tile of
    such rows is of several members, and where its positions begin and end is not known. Heads and features that were
    joined are apart where scores are of the head alone.
    """
    for axis in dict.fromkeys(a for o in fused.outputs for a in o.axes):
        nodes = {n for o in fused.outputs for n in walk(o.expr) if axis in free_axes(n)}
        places = {i for n in nodes if isinstance(n, Load) for i in n.index}
        # Where it is read as it is (of a projection, behind a batch), quotients are a mask's blocks.
        if any(1 in _strides(i, axis) for i in places):
            continue
        among = [n for n in nodes if isinstance(n, Op) and n.name in _POSITIONS and is_int(n.args[0].dtype)]
        beside = [n for n in among if free_axes(n) - {axis} and not loads(n)]
        strides = {s for n in beside for c in n.args if (s := _beyond(c, axis))}
        found = {r for n in nodes for r in reductions(n) if axis in free_axes(r)}
        strides |= {s for r in found for s in _quotients(r, axis)} or _of_batch(fused, axis)
        axes = dimensions(axis, strides | {s for i in places if (s := _beyond(i, axis))}) if strides else [axis]
        if len(axes) > 1:
            fused = Fused(tuple(_over(o, axis, axes) for o in fused.outputs))
    return fused


def _quotients(r: Reduce, axis: Axis) -> set[int]:
    """The strides of the dimensions by which alone a matrix product is along a flattened `axis`, all of them quotients
    (heads, of which each has features)."""
    if not is_covered(r):
        return set()
    found = [i for n in loads(r) for i in n.index if axis in free_axes(i)]
    if not all(isinstance(i, Op) and i.name == "floordiv" for i in found):
        return set()
    return {s for i in found if (s := _beyond(i, axis))}


def _of_batch(fused: Fused, axis: Axis) -> set[int]:
    """The stride of a batch that lies flattened in a result alone, and in nothing that is loaded (members and heads):
    other kernels make what they know of a row for each member and head. (Two numbers in a byte are loaded by a quotient
    alone.)"""
    reads = {n for o in fused.outputs for n in loads(o.expr) if axis in free_axes(n)}
    taken = {i.name for n in reads for i in walk(n) if isinstance(i, Op) and _beyond(i, axis)}
    if "mod" not in taken:
        return set()
    found = {frozenset(s for i in n.index for s in _strides(i, axis)) for n in reads}
    return {*next(iter(found))} - {1} if len(found) == 1 and all(len(s) == 1 for s in found) else set()


def _strides(i: Expr, axis: Axis) -> Iterator[int]:
    """The strides by which an index takes a flattened axis apart; 1 where it takes it as it is."""
    if isinstance(i, Index) and i.axis == axis:
        yield 1
    elif (stride := _beyond(i, axis)) is not None:
        yield stride
    elif isinstance(i, Op):
        for a in i.args:
            yield from _strides(a, axis)


def _over(o: Output, axis: Axis, axes: list[Axis]) -> Output:
    """The output over `axes` in place of the one that flattens them."""
    if axis not in o.axes:
        return o
    place = {axis: row_major(map(index, axes), axes)}
    dims = o.dims or tuple((index(a), a.extent) for a in o.axes)
    own = tuple(b for a in o.axes for b in (axes if a == axis else [a]))
    return Output(o.name, own, o.dtype, substitute(o.expr, place), tuple((substitute(i, place), n) for i, n in dims))


def _apart(e: Expr) -> Expr:
    if not isinstance(e, Reduce) or e.axis.extent <= MAX_COVERED:
        return e
    axes = dimensions(e.axis, {s for n in walk(e.body) if (s := _beyond(n, e.axis))})
    if len(axes) == 1:
        return e
    body = substitute(e.body, {e.axis: row_major(map(index, axes), axes)})
    # (Bounds are found for quotients too, of what is read as it is.)
    whole = any(1 in _strides(i, e.axis) for n in loads(e.body) for i in n.index)
    outer = _shared(body, {*axes}) or (set() if whole else _unmasked(body, {*axes}))
    if not (outer or _frees_reductions(body, {*axes}) or _frees_sides(body, {*axes}, is_batch_sum(e))):
        return e
    inner = reduce_over(e.kind, [a for a in axes if a not in outer], body, e.dtype)
    # Where that is much, the parts of a sum are not stored, and their sum not taken by itself.
    if outer and is_larger_than(inner, loads(inner), MAX_GROWTH):
        return e
    return reduce_over(e.kind, [a for a in axes if a in outer], inner, e.dtype)


def _unmasked(body: Expr, axes: set[Axis]) -> set[Axis]:
    """The axes (heads) that none of the masks knows that compare another (queries) with an axis from outside (keys): a
    loop along that one alone has an end."""
    tests = [n for n in walk(body) if isinstance(n, Op) and n.name in COMPARISONS and is_int(n.args[0].dtype)]
    asked = [free_axes(n) & axes for n in tests if free_axes(n) & axes and free_axes(n) - axes and not loads(n)]
    return axes.difference(*asked) if asked else set()


def _shared(body: Expr, axes: set[Axis]) -> set[Axis]:
    """The axes (heads) that both sides of a matrix product inside have, where one side alone has another (queries). (A
    scale that several keys share is on their side, if the queries have none of the axes.)"""
    shared: set[Axis] = set()
    for r in (r for r in reductions(body) if is_covered(r)):
        sides = [own for f in factors(r.body) if r.axis in (own := free_axes(f))]
        if all(own & axes or len(own) == 1 for own in sides):
            shared |= {a for s, t in combinations([own & axes for own in sides], 2) if s != t for a in s & t}
    return shared


def _frees_reductions(body: Expr, axes: set[Axis]) -> bool:
    """Whether a long reduction inside is the same along some of the axes."""
    return any(0 < len(free_axes(r) & axes) < len(axes) for r in reductions(body) if not is_covered(r))


def _frees_sides(body: Expr, axes: set[Axis], sequential: bool) -> bool:
    """Whether the axes are rows and columns of matrix products inside; or one of them is any side's own, where the sum
    would be taken one index after the other."""
    for r in (r for r in reductions(body) if is_covered(r)):
        sides = [free_axes(f) & axes for f in factors(r.body) if r.axis in free_axes(f)]
        if any(not (a <= b or b <= a) for a, b in combinations(sides, 2)):
            return True
        if sequential and any(0 < len(s) < len(axes) for s in sides):
            return True
    return False


def _beyond(e: Expr, axis: Axis) -> int | None:
    """The stride along a flattened `axis` of the dimension that `e`, a quotient, begins with or, a remainder, leaves
    out; None for anything else."""
    if not isinstance(e, Op) or e.name not in ("floordiv", "mod") or not isinstance(e.args[1], Const):
        return None
    of = e.args[0]
    if isinstance(of, Op) and of.name == "mod":
        of = of.args[0]
    stride = 1 if isinstance(of, Index) and of.axis == axis else _beyond(of, axis)
    return stride and stride * int(e.args[1].value)
