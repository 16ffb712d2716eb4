"""Along with what rows need first: what PyTorch would compute element by element of the tensors that a kernel loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..build import substitute
from ..dtype import is_float
from ..expr import Axis, Expr, free_axes, index, loads, reductions, sources
from ..program import Program, Value, depends
from .fuse import Fused, Output, renamed
from .region import Region
from .resolve_views import inlined


def take_along(
    program: Program, region: Region, taken: frozenset[str], first: Sequence[Fused], made: dict[str, Value]
) -> tuple[Region, tuple[Fused, ...]]:
    """Before: a kernel loads rows of a gate, of its result and of the gradient for sums of them, and PyTorch loads them
    again for the gate's own gradient. After: the kernel stores that too.

    Args:
      taken: the members of all regions.
      first: the kernels that run first, a program for each tile of rows; they read nothing that others store.
      made: what has been written in terms of what no other value is, for any region of the program.

    Returns: the region, with what it makes now as well; the kernels.
    """
    kernels: list[Fused] = []
    pointwise = {v.name: v for v in program.values if v.expr is not None and not reductions(v.expr)}
    for kernel in first:
        others = ((name, v) for name, v in pointwise.items() if name not in taken)
        found = {name: o for name, v in others if (o := _of_what_is_loaded(v, kernel, pointwise, made))}
        read = {r for m in region.members for r in program.by_name[m].reads} - {*region.members}
        added = [
            o
            for name, o in found.items()
            if not pointwise[name].is_view
            and _is_needed(program, name, taken | found.keys())
            and not depends(program, read, {name})
        ]
        kernels.append(Fused((*kernel.outputs, *added)))
        names = {*region.members, *(o.name for o in added)}
        members = tuple(v.name for v in program.values if v.name in names)
        region = replace(region, members=members, outputs=(*region.outputs, *(o.name for o in added)))
        taken |= names
    return region, tuple(kernels)


def _of_what_is_loaded(v: Value, kernel: Fused, pointwise: dict[str, Value], made: dict[str, Value]) -> Output | None:
    """`v` over the axes of a kernel's rows and one of its features; None if it takes other loads than the kernel's."""
    if v.expr is None or not is_float(v.dtype):
        return None
    rows = kernel.outputs[0].axes
    count = math.prod(a.extent for a in rows)
    width = math.prod(v.shape) // count
    own = (*rows, Axis(f"x{len(rows)}", width)) if width > 1 else rows
    groups = _grouped(v.shape, own)
    if groups is None:
        return None
    e = inlined(v.expr, pointwise, made)
    if not sources(e) <= {n.source for o in kernel.outputs for n in loads(o.expr)}:
        return None
    out = renamed(replace(v, expr=e), groups)
    known = {_place(n, rows) for o in kernel.outputs for n in loads(o.expr)}
    read = {_place(n, rows) for n in loads(out.expr)}
    return out if read and read <= known else None


def _place(node: Expr, rows: tuple[Axis, ...]) -> Expr:
    """A load with whatever runs along its features, a sum or a store, as one axis."""
    return substitute(node, {a: index(Axis("%", a.extent)) for a in free_axes(node) if a not in rows})


def _grouped(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], ...] | None:
    """For each dimension the axes, in order, that it is or flattens; None if they do not match."""
    rest = list(axes)
    groups: list[tuple[Axis, ...]] = []
    for extent in shape:
        group: list[Axis] = []
        while rest and math.prod(a.extent for a in group) < extent:
            group.append(rest.pop(0))
        if math.prod(a.extent for a in group) != extent:
            return None
        groups.append(tuple(group))
    return tuple(groups) if all(a.extent == 1 for a in rest) else None


def _is_needed(program: Program, name: str, inside: frozenset[str] | set[str]) -> bool:
    """Whether it is returned, or read outside, as it is or through a view."""
    if name in program.outputs:
        return True
    readers = (program.by_name[u] for u in program.users[name])
    return any(_is_needed(program, u.name, inside) if u.is_view else u.name not in inside for u in readers)
