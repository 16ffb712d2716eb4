"""Holding: what kernels would compute many times over is stored, and loaded, where that is far quicker.

Before: Σ_j Σ_g w(h, g) · ds(g, i, j) · k(h, j, d): a program of head h computes the gradient of the scores of all
heads g, and so does that of each other head. After: a kernel stores ds(g, i, j), and the others load it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..build import rewrite, substitute
from ..dtype import is_float, itemsize
from ..expr import Axis, Const, Expr, Load, Op, Reduce, children, free_axes, index, load, loads, reductions, walk
from ..inner import is_product_of_loop
from ..plan import Accumulator, KernelPlan
from ..target import Target
from .fuse import Fused, Output
from .powers import is_masking
from .share import renaming
from .weigh import CLEARLY, cycles

# Memory is given for time where a region takes so many times as long without, and so many cycles longer (0.2 ms).
TIMES, SAVED = 2.5, 350_000
# Nothing is tried where computing nothing again, with the same loads, would hardly save anything.
AGAIN = 1.1
# Values of a region that are stored, at most.
MAX_HELD = 4

Groups = tuple[Fused, ...]


def hold(
    groups: Groups,
    name: str,
    compute: str,
    plan: Callable[[Groups], Sequence[KernelPlan]],
    target: Target,
    results: Collection[str],
    already: int = 0,
) -> Groups:
    """The kernels of a region, with further ones that store what they load.

    Args:
      groups: what each kernel computes.
      name: begins the names of what is stored.
      plan: the kernels that compute some groups, as they would be launched; none if they cannot be.
      results: names of what is stored for others than these kernels.
      already: how many values of the region are held.
    """

    def time(groups: Groups) -> float:
        return sum(cycles(p, target) for p in plan(groups)) or math.inf

    plans = plan(groups)
    before = sum(cycles(p, target) for p in plans)
    if before < SAVED:
        return groups
    if before < AGAIN * sum(cycles(p, target, once=True) for p in plans) and not any(map(_is_by_element, plans)):
        return groups
    best, least, room = groups, before, target.room
    for n in range(MAX_HELD - already):
        found = [(e, dtype) for e, dtype in _shared(best, compute).items() if _bytes(e, dtype) <= room]
        ways = [_holding(best, e, dtype, f"{name}{n}", results) for e, dtype in found]
        times = [time(way) for way in ways]
        if min(times, default=math.inf) >= CLEARLY * least:
            break
        which = min(range(len(ways)), key=times.__getitem__)
        best, least, room = ways[which], times[which], room - _bytes(*found[which])
    return best if TIMES * least < before and before - least > SAVED else groups


def _is_by_element(plan: KernelPlan) -> bool:
    """Whether a loop sums elements of three axes, and has sums of two of them to make before (the distances of pairs
    and their gradients): with those loaded, each thread would sum its own."""
    tiled = plan.choices.tiled
    updates = [(s.update, loop.axis) for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    return any(
        reductions(e) and len(free_axes(e) & tiled) > 2 and not is_product_of_loop(e, axis, tiled)
        for e, axis in updates
    )


def _bytes(e: Expr, dtype: str) -> int:
    return math.prod(a.extent for a in free_axes(e)) * itemsize(dtype)


def _shared(groups: Groups, compute: str) -> dict[Expr, str]:
    """What is computed with sums, is larger than all that it reads, and goes into something over further axes; and the
    type to store it in.

    That is what PyTorch rounds it to where it is a factor of products in 16 bits.
    """
    found: dict[Expr, str] = {}
    seen: set[tuple[Expr, str]] = set()
    made = {o.name for g in groups for o in g.outputs}

    def visit(e: Expr, multiplied: str) -> None:
        if (e, multiplied) in seen:
            return
        seen.add((e, multiplied))
        if isinstance(e, Reduce):
            multiplied = e.dtype if e.kind == "sum" and is_float(e.dtype) else compute
        elif not isinstance(e, Op) or e.name != "mul" and not is_masking(e):
            multiplied = compute
        sums = [c for c in children(e) if isinstance(_unscaled(c), Reduce) and free_axes(c) == free_axes(e)]
        for c in children(e):
            if (free_axes(e) - free_axes(c) or len(sums) > 1 and c in sums) and _is_large(c, made):
                found[c] = max(found.get(c, multiplied), multiplied, key=itemsize)
            if not isinstance(c, Load):
                visit(c, multiplied)

    for o in (o for g in groups for o in g.outputs):
        visit(o.expr, compute)
    # The same under other names is tried once; without its factor, where a sum has left that behind (the scale of
    # scores, in their gradient for queries and not for keys).
    there = [*found, *(o.expr for g in groups for o in g.outputs)]
    kept: dict[Expr, str] = {}
    for e, dtype in found.items():
        plain = _unscaled(e)
        e = plain if plain is not e and any(renaming(other, plain) for other in there) else e
        if not any(renaming(e, other) for other in kept):
            kept[e] = dtype
    return kept


def _unscaled(e: Expr) -> Expr:
    """What `e` multiplies by a constant."""
    if isinstance(e, Op) and e.name == "mul" and any(isinstance(c, Const) for c in e.args):
        return next((c for c in e.args if not isinstance(c, Const)), e)
    return e


def _is_large(e: Expr, made: set[str]) -> bool:
    """Whether `e` is larger than what it is made of: not what is held already, nor has as many elements in any case (a
    mask, a bias)."""
    size = math.prod(a.extent for a in free_axes(e))
    of = (n for n in loads(e) if n.source not in made and free_axes(n) != free_axes(e))
    largest = max((math.prod(a.extent for a in free_axes(n)) for n in of), default=0)
    return is_float(e.dtype) and bool(reductions(e)) and size > largest


def _holding(groups: Groups, e: Expr, dtype: str, name: str, results: Collection[str]) -> Groups:
    """`groups` with a load of `e`, under whatever names of its axes, and before them what stores it.

    What else would store the same for these kernels gives way to it.
    """
    order = sorted(free_axes(e), key=lambda a: (a.extent, a.name))
    own = {a: Axis(f"x{n}", a.extent) for n, a in enumerate(order)}
    stored = Output(name, tuple(own.values()), dtype, substitute(e, {a: index(b) for a, b in own.items()}))

    def loading(o: Output) -> Output:
        held: dict[Expr, Expr] = {}
        for n in walk(o.expr):
            place = renaming(n, e) if _is_like(n, e) else None
            if place is not None:
                held[n] = load(name, tuple(index(place[a]) for a in order), dtype)
        return replace(o, expr=substitute(o.expr, {}, held))

    # In front of the first that loads it, and so after all that it reads itself.
    rest = [Fused(tuple(map(loading, g.outputs))) for g in groups]
    first = next(n for n, (g, before) in enumerate(zip(rest, groups, strict=True)) if g != before)
    return _without_copies((*rest[:first], Fused((stored,)), *rest[first:]), stored, results)


def _without_copies(groups: Groups, stored: Output, results: Collection[str]) -> Groups:
    """`groups` without what stores again, in another order perhaps, what `stored` is: the others load that."""
    copies: dict[str, tuple[Axis, ...]] = {}
    orders: dict[str, tuple[Expr, ...]] = {}
    for o in (o for g in groups for o in g.outputs if o.name not in results and o.dtype == stored.dtype):
        # (Where dimensions are axes flattened, others read it by those.)
        if not o.dims and isinstance(o.expr, Load) and o.expr.source == stored.name and free_axes(o.expr) == {*o.axes}:
            copies[o.name], orders[o.name] = o.axes, o.expr.index

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source not in copies:
            return n
        place = dict(zip(copies[n.source], n.index, strict=True))
        return load(stored.name, tuple(substitute(i, place) for i in orders[n.source]), n.dtype)

    kept = ([replace(o, expr=rewrite(o.expr, rule)) for o in g.outputs if o.name not in copies] for g in groups)
    return tuple(Fused(tuple(outputs)) for outputs in kept if outputs)


def _is_like(e: Expr, other: Expr) -> bool:
    """Whether two expressions may be the same but for the names of their axes."""
    if type(e) is not type(other) or getattr(e, "name", "") != getattr(other, "name", ""):
        return False
    return e.dtype == other.dtype and len(loads(e)) == len(loads(other))
