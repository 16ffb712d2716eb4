"""Distances: what is read of a table at a place that a distance decides, by costly steps, is stored once for each.

Before: t[bucket(log(i - j)), h] for each query and key, as T5 has it. After: a kernel stores, for each distance l,
x(h, l) = t[bucket(log(l)), h], and scores load x(h, i - j).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from ..expr import Axis, Expr, Load, Op, children, free_axes, index, load, loads, walk
from ..integer import from_linear
from .by_distance import over_distances
from .fuse import Fused, Output
from .look_up import replaced, tabled

# Operations that take longer than a load.
COSTLY = ("log", "log1p", "exp", "expm1", "sin", "cos", "tan", "atan", "pow", "sqrt", "div")
# Elements for each that is stored, at least; and in all: a launch takes as long as so many logarithms.
SHARE, LEAST = 8, 2**23


def look_up_distances(groups: tuple[Fused, ...], name: str) -> tuple[tuple[Fused, ...], tuple[Fused, ...]]:
    """The kernels of a region → those that run first, and store what distances decide; and these.

    Args:
      name: begins the names of what is stored.
    """
    stored: dict[Expr, Output] = {}
    held: dict[Expr, Expr] = {}
    for n, elements in (found for g in groups for o in g.outputs for found in _costly(o.expr)):
        ways = [_looked_up(n, i, j, elements) for i, j in itertools.permutations(sorted(free_axes(n), key=str), 2)]
        # The distance of queries from keys, or of keys from queries: one table for all kernels.
        known = sorted((way for way in ways if way is not None), key=lambda way: way[0].expr not in stored)
        for out, place in known[:1]:
            out = stored.setdefault(out.expr, replace(out, name=f"{name}{len(stored)}"))
            held[n] = load(out.name, place, out.dtype)
    return tuple(Fused((out,)) for out in stored.values()), replaced(groups, held)


def _looked_up(n: Load, i: Axis, j: Axis, elements: int) -> tuple[Output, tuple[Expr, ...]] | None:
    """What is stored for each distance of i from j, and where `n` is found there; None if that does not decide it."""
    decided = over_distances(n, i, j)
    if decided is None:
        return None
    made, along, sign, least = decided
    if elements < max(LEAST, SHARE * math.prod(a.extent for a in free_axes(made))):
        return None
    table, order = tabled(made, along, n.dtype)
    place = from_linear(({index(i): 1, index(j): sign}, -least), "i64")
    return table, (*map(index, order[:-1]), place)


def _costly(e: Expr) -> Iterator[tuple[Load, int]]:
    """What is loaded at a costly place, and of how many elements that is which it is in."""
    around: dict[Expr, int] = {}
    for n in walk(e):
        for c in children(n):
            around[c] = max(around.get(c, 1), math.prod(a.extent for a in free_axes(n)))
    for n in loads(e):
        if len(free_axes(n)) > 1 and any(isinstance(m, Op) and m.name in COSTLY for i in n.index for m in walk(i)):
            yield n, around.get(n, 1)
