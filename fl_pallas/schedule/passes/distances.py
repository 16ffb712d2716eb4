"""Distances: what a distance decides by costly steps is stored once for each.

Before: t[bucket(log(i - j)), h] for each query and key, as T5 has it, or log(1 + a(h) * (i - j)), KERPLE's. After: a
kernel stores, for each distance l, x(h, l) = t[bucket(log(l)), h], and scores load x(h, i - j).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from ..expr import Axis, Expr, Load, Op, Reduce, children, free_axes, index, load, reductions, walk
from ..inner import factors, over_distances
from ..integer import from_linear
from .fuse import Fused, Output
from .interchange import count
from .look_up import replaced, tabled

# Operations that take longer than a load, and those besides by which a load's place is costly to find.
COSTLY = ("log", "log2", "log1p", "expm1", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "pow", "tanh", "erf")
COSTLY_PLACES = (*COSTLY, "exp", "sqrt", "div")
# Elements for each that is stored, at least; and in all: a launch takes as long as so many logarithms.
SHARE, LEAST = 8, 2**23


def look_up_distances(groups: tuple[Fused, ...], name: str) -> tuple[tuple[Fused, ...], tuple[Fused, ...]]:
    """The kernels of a region → those that run first, and store what distances decide; and these.

    Args:
      name: begins the names of what is stored.
    """
    stored: dict[Expr, Output] = {}
    held: dict[Expr, Expr] = {}
    for e in (o.expr for g in groups for o in g.outputs):
        elements = _elements(e)
        reached = {e}
        for n in reversed([*walk(e)]):
            if n not in reached:
                continue
            pairs = itertools.permutations(sorted(free_axes(n), key=str), 2) if n not in held and _is_costly(n) else ()
            ways = [_looked_up(n, i, j, elements[n]) for i, j in pairs]
            # The distance of queries from keys, or of keys from queries: one table for all kernels.
            known = sorted((way for way in ways if way is not None), key=lambda way: way[0].expr not in stored)
            for out, place in known[:1]:
                out = stored.setdefault(out.expr, replace(out, name=f"{name}{len(stored)}"))
                held[n] = load(out.name, place, out.dtype)
            if n not in held:
                reached.update(children(n))
    return tuple(Fused((out,)) for out in stored.values()), replaced(groups, held)


def _looked_up(n: Expr, i: Axis, j: Axis, elements: int) -> tuple[Output, tuple[Expr, ...]] | None:
    """What is stored for each distance of i from j, and where `n` is found there; None if that does not decide it."""
    decided = over_distances(n, i, j)
    if decided is None:
        return None
    made, along, sign, least = decided
    if elements * math.prod(r.axis.extent for r in reductions(n)) < max(LEAST, SHARE * count(free_axes(made))):
        return None
    table, order = tabled(made, along, n.dtype)
    place = from_linear(({index(i): 1, index(j): sign}, -least), "i64")
    return table, (*map(index, order[:-1]), place)


def _is_costly(n: Expr) -> bool:
    """Whether costly steps, such to a costly place, or a sum lead to a number."""
    if isinstance(n, Load):
        return any(isinstance(m, Op) and m.name in COSTLY_PLACES for i in n.index for m in walk(i))
    return isinstance(n, Reduce) or isinstance(n, Op) and n.name in COSTLY and not reductions(n)


def _elements(e: Expr) -> dict[Expr, int]:
    """Of how many elements that is which a node is in, up to the sums around it: how often it is computed."""
    found = dict.fromkeys(walk(e), 0)
    found[e] = count(free_axes(e))
    for n in reversed([*found]):
        if isinstance(n, Reduce):
            # Of a product of matrices each factor by itself; -1 is one too, of what is negated.
            for f in found.keys() & factors(n.body):
                found[f] = max(found[f], count(free_axes(f)))
        for c in children(n):
            found[c] = max(found[c], 0 if isinstance(n, Reduce) else found[n])
    return found
