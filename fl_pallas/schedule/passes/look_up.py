"""Look up: products with the rows of a table are made once for each row, and looked up at each element's position.

Before: Σ_d q(i, d) · t(p(i, j), d), for positions p of a table of few rows (distances that are clamped, buckets, kinds
of pairs): each element of the scores takes a sum of its own. After: a kernel stores w(i, p) = Σ_d q(i, d) · t(p, d), a
product of matrices, and scores load w(i, p(i, j)). DeBERTa's own code does so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..build import substitute
from ..expr import Axis, Expr, Index, Reduce, free_axes, index, load, loads, reductions
from ..integer import linear
from .fuse import Fused, Output

# Rows of a table for each index of the axes that its positions replace, at most.
SHARE = 0.5
# Shorter sums are taken for each element.
MIN_SUM = 8


def look_up(
    groups: tuple[Fused, ...], name: str, compute: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Fused, ...], tuple[Fused, ...]]:
    """The kernels of a region → those that run first, and store what is looked up; and these.

    Args:
      name: begins the names of what is stored.
      compute: the type it is stored in.
      shapes: of what is loaded, by name.
    """
    stored: dict[Expr, Output] = {}
    held: dict[Expr, Expr] = {}
    for r in dict.fromkeys(r for g in groups for o in g.outputs for r in reductions(o.expr)):
        place = _position(r, shapes)
        if place is None:
            continue
        position, axis = place
        made = substitute(r, {}, {position: index(axis)})
        table, order = tabled(made, axis, compute)
        out = stored.setdefault(table.expr, replace(table, name=f"{name}{len(stored)}"))
        held[r] = load(out.name, (*map(index, order[:-1]), position), compute)
    return tuple(Fused((out,)) for out in stored.values()), replaced(groups, held)


def tabled(made: Expr, axis: Axis, dtype: str) -> tuple[Output, tuple[Axis, ...]]:
    """What is stored of an expression, without a name yet; and the axes of `made` in the order of its own, `axis` the
    last."""
    order = (*sorted(free_axes(made) - {axis}, key=lambda a: (a.extent, a.name)), axis)
    own = tuple(Axis(f"x{k}", a.extent) for k, a in enumerate(order))
    expr = substitute(made, {a: index(b) for a, b in zip(order, own, strict=True)})
    return Output("", own, dtype, expr), order


def replaced(groups: tuple[Fused, ...], held: Mapping[Expr, Expr]) -> tuple[Fused, ...]:
    """The kernels with the expressions of `held` in place of what they stand for."""
    return tuple(Fused(tuple(replace(o, expr=substitute(o.expr, {}, held)) for o in g.outputs)) for g in groups)


def _position(r: Reduce, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Expr, Axis] | None:
    """The position at which a sum reads a table, and an axis of the table's rows; None if there is none, or if there
    are too many rows."""
    if r.kind != "sum" or r.axis.extent < MIN_SUM or reductions(r.body):
        return None
    for n in (n for n in loads(r.body) if r.axis in free_axes(n) and n.source in shapes):
        for position, extent in zip(n.index, shapes[n.source], strict=True):
            if len(free_axes(position)) < 2 or r.axis in free_axes(position):
                continue
            axis = Axis(f"%{extent}", extent)
            left = free_axes(substitute(r.body, {}, {position: index(axis)}))
            # Along an axis that shifts the position each row is met once: as many more are outside of the table.
            shifting = {t.axis for t in linear(position)[0] if isinstance(t, Index)}
            gone = free_axes(position) - left
            places = math.prod(min(a.extent, extent) if a in shifting else a.extent for a in gone)
            if left & free_axes(position) and 1 < extent <= SHARE * places:
                return position, axis
    return None
