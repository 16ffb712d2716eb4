"""Kernel cuts: a reduction that a loop would recompute at every step gets a kernel of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..build import substitute
from ..expr import Axis, Expr, Reduce, free_axes, index, load, reductions, ref, walk
from .fuse import Fused, Output
from .stream import MAX_COVERED, parallel_axes


@dataclass(frozen=True)
class _Cut:
    node: Reduce
    axes: tuple[Axis, ...]


def cut(fused: Fused, name: str) -> tuple[Fused, ...]:
    """Before: one kernel with `sum[i](… max[j](s(i, j)) …)`. After: a kernel storing max[j](s(i, j))
    for each i, and one that loads it.

    Such a reduction depends on an axis bound outside it (so it is no value of the program's parallel
    axes) but not on every axis of the work around it, which would repeat it. It is linear in size.
    """
    kernels: list[Fused] = []
    while True:
        found = _repeated(fused)
        if not found:
            return (*kernels, fused)
        shape = found[0].axes
        together = [c for c in found if c.axes == shape]
        outputs, replaced = [], {}
        for c in together:
            label = f"{name}_t{sum(len(k.outputs) for k in kernels) + len(outputs)}"
            own = {a: Axis(f"x{n}", a.extent) for n, a in enumerate(shape)}
            expr = substitute(c.node, {a: index(b) for a, b in own.items()})
            outputs.append(Output(label, tuple(own.values()), c.node.dtype, expr))
            replaced[c.node] = load(label, tuple(index(a) for a in shape), c.node.dtype)
        kernels += cut(Fused(tuple(outputs)), f"{name}_{len(kernels)}")
        fused = Fused(tuple(replace(o, expr=substitute(o.expr, {}, dict(replaced))) for o in fused.outputs))


def _repeated(fused: Fused) -> list[_Cut]:
    parallel = frozenset(parallel_axes(fused))
    found: dict[Reduce, None] = {}
    for o in fused.outputs:
        for r in reductions(o.expr):
            bound = free_axes(r) - parallel
            large = r.axis.extent > 2 * MAX_COVERED or bool(reductions(r.body))
            if bound and large and _around(o.expr, r) - free_axes(r):
                found[r] = None
    # Outer reductions contain inner ones: the outermost leads, with what else has its shape.
    ordered = sorted(found, key=lambda r: sum(r in reductions(s) for s in found))
    return [_Cut(r, tuple(sorted(free_axes(r), key=lambda a: (a not in parallel, a.name)))) for r in ordered]


def _around(e: Expr, r: Reduce) -> frozenset[Axis]:
    """Axes of the inner reductions that remain when `r` is known: the work that would repeat it."""
    held = ref("%cut", tuple(free_axes(r)), r.dtype)
    rest = substitute(e, {}, {r: held})
    inner = [n for n in reductions(rest) if free_axes(n) & free_axes(r)]
    return frozenset().union(*(free_axes(n) for n in inner if held not in set(walk(n))))
