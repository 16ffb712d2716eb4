"""Tables: what every tile of columns would compute again for its rows is stored once, by an earlier kernel."""

from __future__ import annotations

from dataclasses import replace

from ..build import substitute
from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Load, Op, children, free_axes, index, load, loads, reductions, walk
from . import registers
from .covered import MAX_COVERED
from .fuse import Fused, Output
from .itself import JUMPS

# What takes many instructions an element.
COSTLY = (*registers.COSTLY, "div", "sqrt", "rsqrt")


def tabulate(first: tuple[Fused, ...], groups: tuple[Fused, ...], name: str, compute: str) -> tuple[Fused, ...]:
    """Before: `m[i] + log(l[i])` or `g[i, d] * sigmoid(x[i, d])` in a loop over i. After: a load of it; one of the
    kernels that run first, and has a program for each tile of i already, stores it.

    Args:
      first: kernels whose results the others load.
      name: begins the names of what is stored.

    Returns: all kernels.
    """
    own_results = {o.name for kernel in (*first, *groups) for o in kernel.outputs}
    every = dict.fromkeys(e for g in groups for o in g.outputs for e in walk(o.expr) if _is_costly(e))
    costly = [e for e in every if own_results.isdisjoint(n.source for n in loads(e))]
    asked = _asked(groups)
    tables: dict[Expr, Output] = {}
    held: dict[Expr, Expr] = {}
    made: list[Fused] = []
    for kernel in first:
        axes = kernel.outputs[0].axes
        added: list[Output] = []
        beside = _beside(kernel, groups, costly)
        orders = {e: _as_stored(e, kernel, beside) for e in costly}
        rows = [e for e in costly if len(orders[e]) == len(axes)]
        sides = [e for e in costly if len(orders[e]) == len(axes) + 1 and _is_side(e) and e not in asked]
        for e in (*_largest(rows), *_largest(sides)):
            if e in held:
                continue
            order = orders[e]
            own = (*axes, *(Axis(f"x{len(axes)}", a.extent) for a in order[len(axes) :]))
            expr = substitute(e, {a: index(b) for a, b in zip(order, own, strict=True)})
            if expr not in tables:
                dtype = compute if len(own) == len(axes) else e.dtype
                tables[expr] = Output(f"{name}_l{len(tables)}", own, dtype, expr)
                added.append(tables[expr])
            held[e] = load(tables[expr].name, tuple(map(index, order)), tables[expr].dtype)
        made.append(Fused((*kernel.outputs, *added)))
    rest = (Fused(tuple(replace(o, expr=substitute(o.expr, {}, held)) for o in g.outputs)) for g in groups)
    return (*made, *rest)


def _is_costly(e: Expr) -> bool:
    """Whether `e` is a costly number, and made of loads of which one has all its axes."""
    if not isinstance(e, Op) or not is_float(e.dtype) or reductions(e):
        return False
    costly = any(isinstance(n, Op) and n.name in COSTLY for n in walk(e))
    return costly and len(free_axes(e)) == len(_order(e)) > 0


def _asked(groups: tuple[Fused, ...]) -> set[Expr]:
    """All that is compared, and what that is made of."""
    found = set[Expr]()
    left = [a for g in groups for o in g.outputs for e in walk(o.expr) if _jumps(e) for a in children(e)]
    while left:
        e = left.pop()
        if e not in found:
            found.add(e)
            left += children(e)
    return found


def _jumps(e: Expr) -> bool:
    """Whether the last bit of what an operation is given matters: the forward pass asked the same of more bits."""
    return isinstance(e, Op) and e.name in JUMPS and any(is_float(a.dtype) for a in e.args)


def _is_side(e: Expr) -> bool:
    """Whether `e`, of rows and features, is a side of products in 16 bits, and costly at each of its elements."""
    each = any(isinstance(n, Op) and n.name in COSTLY and free_axes(n) == free_axes(e) for n in walk(e))
    return each and itemsize(e.dtype) == 2 and _order(e)[-1].extent <= MAX_COVERED


def _largest(found: list[Expr]) -> list[Expr]:
    return [e for e in found if not any(e is not other and e in walk(other) for other in found)]


def _beside(kernel: Fused, groups: tuple[Fused, ...], costly: list[Expr]) -> dict[Expr, tuple[int, ...]]:
    """For costly numbers of rows that `groups` load a result of `kernel` for, by their names of axes: which of their
    axes, in order, are those of the kernel's rows.

    What the kernel stores may lie as the result does, and what the numbers are made of as queries do. The same number
    of another axis (rows in a loop) is stored with them.
    """
    own, found = {o.name for o in kernel.outputs}, dict[Expr, tuple[int, ...]]()
    known = {*costly}
    for o in (o for g in groups for o in g.outputs):
        rows = dict.fromkeys(_axes(n) for n in loads(o.expr) if n.source in own)
        for e in (e for e in walk(o.expr) if rows and e in known):
            order = _order(e)
            for n in rows:
                if len({*n} & {*order}) == len(n):
                    found.setdefault(_named(e), tuple(map(order.index, n)))
    return found


def _as_stored(e: Expr, kernel: Fused, beside: dict[Expr, tuple[int, ...]]) -> tuple[Axis, ...]:
    """The axes of `e`, first those that `kernel` has; () if `e` has others."""
    axes, order = kernel.outputs[0].axes, _order(e)
    for first in (order[: len(axes)], tuple(order[n] for n in beside.get(_named(e), ()))):
        if [a.extent for a in first] == [a.extent for a in axes]:
            return (*first, *(a for a in order if a not in first))
    return ()


def _named(e: Expr) -> Expr:
    """`e` with names of axes by their order alone."""
    return substitute(e, {a: index(Axis(f"%{n}", a.extent)) for n, a in enumerate(_order(e))})


def _axes(n: Load) -> tuple[Axis, ...]:
    """Those of a load in its order, each in an index of its own or the parts of one (a batch, and its heads); () if an
    index has several."""
    own = [free_axes(i) for i in n.index]
    return tuple(dict.fromkeys(a for axes in own for a in axes)) if all(len(axes) <= 1 for axes in own) else ()


def _order(e: Expr) -> tuple[Axis, ...]:
    """The axes of `e` in the order in which a load has all of them; () if none has."""
    for n in loads(e):
        order = _axes(n)
        if frozenset(order) == free_axes(e):
            return order
    return ()
