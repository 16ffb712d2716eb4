"""Tables of rows: what every tile of columns would compute again for its rows is stored once, by an earlier kernel."""

from __future__ import annotations

from dataclasses import replace

from ..build import substitute
from ..expr import Axis, Expr, Index, Op, Reduce, free_axes, index, load, loads, walk
from .fuse import Fused, Output

# What takes many instructions an element.
COSTLY = ("div", "log", "exp", "sqrt", "rsqrt")


def tabulate(first: tuple[Fused, ...], groups: tuple[Fused, ...], name: str, compute: str) -> tuple[Fused, ...]:
    """Before: `m[i] + log(l[i])` in a loop over i. After: a load of it; one of the kernels that run first, and has a
    program for each tile of i already, stores it.

    Args:
      first: kernels whose results the others load.
      name: begins the names of what is stored.

    Returns: all kernels.
    """
    rows = dict.fromkeys(e for g in groups for o in g.outputs for e in walk(o.expr) if _is_row(e))
    found = [e for e in rows if not any(e is not other and e in walk(other) for other in rows)]
    tables: dict[Expr, Output] = {}
    held: dict[Expr, Expr] = {}
    made: list[Fused] = []
    for kernel in first:
        axes = kernel.outputs[0].axes
        added: list[Output] = []
        for e in found:
            order = _order(e)
            if e in held or [a.extent for a in order] != [a.extent for a in axes]:
                continue
            expr = substitute(e, {a: index(b) for a, b in zip(order, axes)})
            if expr not in tables:
                tables[expr] = Output(f"{name}_l{len(tables)}", axes, compute, expr)
                added.append(tables[expr])
            held[e] = load(tables[expr].name, tuple(map(index, order)), compute)
        made.append(Fused((*kernel.outputs, *added)))
    rest = (Fused(tuple(replace(o, expr=substitute(o.expr, {}, held)) for o in g.outputs)) for g in groups)
    return (*made, *rest)


def _is_row(e: Expr) -> bool:
    """Whether `e` is costly, and made of loads of which one has all its axes."""
    nodes = list(walk(e))
    if not isinstance(e, Op) or any(isinstance(n, Reduce) for n in nodes):
        return False
    costly = any(isinstance(n, Op) and n.name in COSTLY for n in nodes)
    return costly and len(free_axes(e)) == len(_order(e)) > 0


def _order(e: Expr) -> tuple[Axis, ...]:
    """The axes of `e` in the order in which a load has all of them, each as an index; () if none has."""
    for n in loads(e):
        order = tuple(i.axis for i in n.index if isinstance(i, Index))
        if frozenset(order) == free_axes(e) and len(set(order)) == len(order):
            return order
    return ()
