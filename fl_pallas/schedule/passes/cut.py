"""Kernel cuts: a reduction that a loop would recompute at every step gets a kernel of its own."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from ..build import rewrite, substitute
from ..dtype import compute_dtype, is_float
from ..expr import (
    Axis,
    Expr,
    Load,
    Op,
    Reduce,
    free_axes,
    index,
    load,
    loads,
    outermost,
    reductions,
    ref,
    sources,
    walk,
)
from ..integer import bounds
from ..program import Value
from ..remember import remembered
from .covered import MAX_COVERED, streamed
from .fuse import Fused, Output, join_group, labels
from .powers import POWERS, as_power, read_unsummed
from .share import renaming
from .stream import parallel_axes

# A part of a sum is stored, and not computed again, where it is up to so many times as large as what it reads: that of
# each position of a table, for each row, where rows have fewer features.
MAX_GROWTH = 8
# Results are stored in the user's 16 bits where there are more of them than one for so many elements of an operand.
LARGE = 2
# How many times as long as what outputs share may the rest of their sums take.
MAX_APART = 64


@dataclass(frozen=True)
class _Cut:
    """What is stored, over `axes`; and the names of the outputs that load it, or None if all do."""

    node: Expr
    axes: tuple[Axis, ...]
    outputs: frozenset[str] | None = None


def cut(fused: Fused, name: str) -> tuple[Fused, ...]:
    """Before: one kernel with `sum[i](… max[j](s(i, j)) …)`. After: a kernel storing max[j](s(i, j))
    for each i, and one that loads it.

    Such a reduction depends on an axis bound outside it (so it is no value of the program's parallel
    axes) but not on every axis of the work around it, which would repeat it. It is linear in size.
    """
    kernels: list[Fused] = []
    made: dict[str, Expr] = {}
    while True:
        found = _repeated(fused)
        if not found:
            return (*kernels, fused)
        shape = found[0].axes
        together = [c for c in found if c.axes == shape or _is_of_these_rows(c, found[0])]
        outputs, replaced = [], {}
        for c in together:
            label = f"{name}_t{sum(len(k.outputs) for k in kernels) + len(outputs)}"
            own = {a: Axis(f"x{n}", a.extent) for n, a in enumerate(shape)}
            # A maximum and the sum about it have to agree, and part of a longer sum is kept as that sum is: in 32 bits
            # at least, but for what is as large as an operand. So is a score, about a normaliser of 32 bits, where not
            # the weights are stored that are made of both; and what a row's mean is taken from.
            small = not _is_larger_than_read(c.node, 1 / LARGE)
            exact = small or _is_part(fused, c.node) or _is_exponent(fused, c.node)
            exact = exact or _is_centred(fused, c.node, made)
            dtype = compute_dtype([c.node.dtype]) if exact and is_float(c.node.dtype) else c.node.dtype
            power = as_power(fused, c.node) if not small and exact else None
            node, dtype = (power.node, power.dtype) if power else (c.node, dtype)
            stored, made[label] = load(label, tuple(index(a) for a in c.axes), dtype), c.node
            axes = tuple(own[a] for a in c.axes)
            outputs.append(Output(label, axes, dtype, substitute(node, {a: index(own[a]) for a in own})))
            replaced[c.node] = power.loading(stored) if power else {c.node: stored}
        kernels += cut(Fused(tuple(outputs)), f"{name}_c{len(kernels)}")
        loaded = [{n: e for c in together if _loads(o, c) for n, e in replaced[c.node].items()} for o in fused.outputs]
        with_loads = (substitute(o.expr, {}, held) for o, held in zip(fused.outputs, loaded, strict=True))
        fused = Fused(tuple(replace(o, expr=e) for o, e in zip(fused.outputs, with_loads, strict=True)))


def _is_of_these_rows(c: _Cut, other: _Cut) -> bool:
    """Whether `c` is a sum for each row of which `other` has features, of as many indices: a table's normaliser, which
    is no part of it."""
    beside = {*other.axes} - {*c.axes}
    return (
        isinstance(c.node, Reduce)
        and isinstance(other.node, Reduce)
        and c.node.axis.extent == other.node.axis.extent
        and c.node not in reductions(other.node)
        and {*c.axes} < {*other.axes}
        and math.prod(a.extent for a in beside) <= MAX_COVERED
    )


def _loads(o: Output, c: _Cut) -> bool:
    """Whether an output loads what is cut."""
    return c.outputs is None or o.name in c.outputs


def _is_part(fused: Fused, node: Expr) -> bool:
    """Whether `node` is itself what a sum adds up."""
    is_other = isinstance(node, Reduce) and node.kind != "sum"
    return not is_other and any(s.kind == "sum" and s.body is node for o in fused.outputs for s in reductions(o.expr))


def _is_exponent(fused: Fused, node: Expr) -> bool:
    """Whether `node` is raised to a power with no sum in between."""
    powers = [n for o in fused.outputs for n in walk(o.expr) if isinstance(n, Op) and n.name in POWERS]
    return any(node in read_unsummed(p) for p in powers)


def _is_centred(fused: Fused, node: Expr, made: Mapping[str, Expr]) -> bool:
    """Whether something is taken off `node` that some of its axes share, and that is no sum of it as it is stored (of
    weights' gradients, their mean in a row, by another way): rounding would be a larger part of what is left.

    Args:
      made: what is stored already, by name.
    """
    own = {*sources(node)}

    def is_sum(taken_off: Expr) -> bool:
        return any(own <= {*sources(e)} for e in (taken_off, *(made[s] for s in sources(taken_off) if s in made)))

    differences = [n for o in fused.outputs for n in walk(o.expr) if isinstance(n, Op) and n.name == "sub"]
    return any(
        node in read_unsummed(taken_from) and free_axes(taken_off) and free_axes(taken_off) < free_axes(node)
        for n in differences
        for taken_from, taken_off in (n.args, n.args[::-1])
        if not is_sum(taken_off)
    )


@remembered
def cut_apart(groups: tuple[Fused, ...], name: str) -> tuple[Fused, ...]:
    """`cut` for all kernels of a region, in an order in which they can run.

    What is cut from one joins another that computes the same reductions (the row sums of a gradient of all rows join
    the gradient of the queries), and an output that nothing is left to share with gets a kernel of its own. One that
    runs later loads the sums that it would have to make again.
    """
    kernels: list[list[Output]] = []
    pieces: list[list[Output]] = []
    for n, group in enumerate(groups):
        *early, last = cut(group, f"{name}_{n}" if n else name)
        pieces += [[*k.outputs] for k in early]
        kernels += _sharing(last.outputs)
    pieces, kernels = _once(pieces, kernels)
    for n, piece in enumerate(pieces):
        ways = ((k, both) for k in kernels if (both := _joined(piece, k)) is not None)
        joined = ([both if other is k else other for other in kernels] for k, both in ways)
        kernels = next((way for way in joined if _ordered([*way, *pieces[n + 1 :]])), [*kernels, piece])
    # What two results wait for, each of which waits for the other's kernel, is made apart.
    return _loading(_ordered(kernels) or _ordered([[o] for kernel in kernels for o in kernel]) or ())


def _once(pieces: list[list[Output]], kernels: list[list[Output]]) -> tuple[list[list[Output]], list[list[Output]]]:
    """Pieces and kernels without what an earlier piece stores already, its axes in another order perhaps."""
    kept: list[Output] = []
    found: dict[str, tuple[str, tuple[int, ...]]] = {}

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source not in found:
            return n
        name, order = found[n.source]
        return load(name, tuple(n.index[k] for k in order), n.dtype)

    def is_new(o: Output) -> bool:
        for other in (k for k in kept if k.dtype == o.dtype):
            place = renaming(o.expr, other.expr)
            if place is not None and {*place} == {*other.axes}:
                found[o.name] = other.name, tuple(o.axes.index(place[a]) for a in other.axes)
                return False
        kept.append(o)
        return True

    def told(outputs: list[Output]) -> list[Output]:
        return [replace(o, expr=rewrite(o.expr, rule)) for o in outputs]

    # A piece reads what is stored by earlier ones.
    new = [[o for o in told(piece) if is_new(o)] for piece in pieces]
    return [piece for piece in new if piece], [told(kernel) for kernel in kernels]


def _loading(kernels: tuple[Fused, ...]) -> tuple[Fused, ...]:
    """Kernels that load the sums that earlier ones store, and take no other pass to make them (a row's sum, of the
    gradient of its scores)."""
    known: list[Output] = []
    made: list[Fused] = []
    for kernel in kernels:
        made.append(Fused(tuple(_with_loads(o, known) for o in kernel.outputs)))
        known += (o for o in kernel.outputs if isinstance(o.expr, Reduce) and free_axes(o.expr) == {*o.axes})
    return tuple(made)


def _with_loads(o: Output, known: list[Output]) -> Output:
    """`o` with loads of the sums inside of it that are known."""
    held: dict[Expr, Expr] = {}
    for r in (r for r in reductions(o.expr) if r is not o.expr):
        for other in known:
            place = renaming(r, other.expr)
            if place is not None:
                # A dimension may be several of the axes, flattened.
                at = {a: index(b) for a, b in place.items()}
                held[r] = load(other.name, tuple(substitute(i, at) for i in other.index), other.dtype)
                break
    return replace(o, expr=substitute(o.expr, {}, held)) if held else o


def _sharing(outputs: tuple[Output, ...]) -> list[list[Output]]:
    """Outputs that have reductions in common, together; and rows with features and no reductions, with those rows."""
    kernels: list[tuple[set[Reduce], list[Output]]] = []
    for o in outputs:
        own = set(reductions(o.expr))
        for found, kernel in kernels:
            rows = kernel[0].axes
            begun = o.axes[: len(rows)] == rows and all(a.extent <= MAX_COVERED for a in o.axes[len(rows) :])
            if _is_shared(o, own, found, rows) or not own and begun:
                found |= own
                kernel.append(o)
                break
        else:
            kernels.append((own, [o]))
    return [kernel for _, kernel in kernels]


def _is_shared(o: Output, own: set[Reduce], found: set[Reduce], rows: tuple[Axis, ...]) -> bool:
    """Whether an output's reductions are a kernel's too: enough of them, if it has axes that the kernel's rows have not
    (a matrix of all pairs is no row with features for having a norm of each row in it); or they count by labels that
    the kernel has."""
    asked = labels(o.expr)
    if asked and {*o.axes} <= {*rows} and {*asked} <= {n for r in found for n in loads(r)}:
        return True
    apart = MAX_APART if {*o.axes} - {*rows} else math.inf
    return bool(found & own) and _terms(own - found) <= apart * _terms(found & own)


def _terms(sums: set[Reduce]) -> int:
    """How many terms reductions have together, each taken for all of its axes."""
    return sum(math.prod(a.extent for a in free_axes(r)) * r.axis.extent for r in sums)


def _joined(piece: list[Output], kernel: list[Output]) -> list[Output] | None:
    """`kernel` with the outputs of `piece`; None if it does not compute the reductions that they need."""
    both = [*kernel]
    for o in piece:
        renamed = join_group(Value(o.name, o.axes, o.dtype, o.expr), both)
        if renamed is None:
            return None
        both.append(renamed)
    return both


def _reads(kernel: list[Output]) -> set[str]:
    return {name for o in kernel for name in sources(o.expr)}


def _ordered(kernels: list[list[Output]]) -> tuple[Fused, ...] | None:
    """Each kernel after those whose results it reads; None if they wait for each other."""
    ordered: list[list[Output]] = []
    left = kernels
    while left:
        unmade = {o.name for k in left for o in k}
        ready = [k for k in left if not unmade & _reads(k)]
        if not ready:
            return None
        ordered += ready
        left = [k for k in left if not any(k is r for r in ready)]
    return tuple(Fused(tuple(k)) for k in ordered)


@remembered
def _repeated(fused: Fused) -> tuple[_Cut, ...]:
    parallel = frozenset(parallel_axes(fused))
    found: dict[Reduce, set[str] | None] = {}
    loops = {s for o in fused.outputs for s in streamed(o.expr, tuple(parallel))}
    for o in fused.outputs:
        for r in reductions(o.expr):
            bound = free_axes(r) - parallel
            large = r.axis.extent > 2 * MAX_COVERED or bool(reductions(r.body)) and not _is_short_and_wide(r)
            if bound:
                again = bool(_around(o.expr, r) - free_axes(r)) or _is_summed(o.expr, r)
            else:
                again = _is_spread(o, r, parallel) or r in loops and _is_of_no_row(o, r, loops)
            if large and again:
                # For a matrix alone: outputs that have a loop of their own for the same rows go on with that.
                wide = None if bound else found.get(r, set())
                found[r] = None if wide is None else wide | {o.name}
    found = {r: names for r, names in found.items() if not _is_of_stored_rows(r, found)}
    whole = _reduced_whole(fused, found)
    if whole:
        return tuple(_Cut(e, _laid(e, parallel, False)) for e in whole)
    # Outer reductions contain inner ones: the outermost leads, with what else has its shape.
    ordered = sorted(found, key=lambda r: sum(r in reductions(s) for s in found))
    # What has the axes of another lies as that does: one kernel makes both.
    whole = {free_axes(r) for r in found if not _is_part(fused, r)}
    named = {r: names if names is None else frozenset(names) for r, names in found.items()}
    return tuple(_Cut(r, _laid(r, parallel, free_axes(r) not in whole), named[r]) for r in ordered)


def _is_of_stored_rows(r: Reduce, found: Container[Reduce]) -> bool:
    """Whether `r`, a product of features for each pair, is larger than what it reads and than the sums inside of it,
    which are stored in its place: rows that a softmax has averaged, and that the next softmax of them multiplies."""
    inner = {n for n in reductions(r.body) if n in found}
    if not inner or r.kind != "sum" or r.axis.extent > MAX_COVERED or not _is_larger_than_read(r):
        return False
    size = math.prod(a.extent for a in free_axes(r))
    held = {n: ref("%stored", tuple(free_axes(n)), n.dtype) for n in inner}
    return not reductions(substitute(r.body, {}, {**held})) and all(
        math.prod(a.extent for a in free_axes(n)) < size for n in inner
    )


def _reduced_whole(fused: Fused, found: Container[Reduce]) -> list[Expr]:
    """What is reduced (the loss of a row) of which something is found that has all of its axes (the row's maximum): it
    is stored rather than all of these, by the kernel that makes them."""
    bodies = dict.fromkeys(r.body for o in fused.outputs for r in reductions(o.expr) if not isinstance(r.body, Reduce))
    small = (e for e in bodies if not _is_larger_than_read(e))
    return [e for e in small if any(r in found and free_axes(r) == free_axes(e) for r in reductions(e))]


def _laid(r: Expr, parallel: frozenset[Axis], summed: bool) -> tuple[Axis, ...]:
    """The axes of what is stored: what a loop goes along last; a short sum first, so that it is one of whole rows, and
    matrices of pairs, of which there are few (heads), one after another."""
    pairs = sum(a.extent > MAX_COVERED for a in free_axes(r)) > 1

    def place(a: Axis) -> int:
        return 1 if a in parallel else 0 if (summed or pairs) and a.extent <= MAX_COVERED else 2

    return tuple(sorted(free_axes(r), key=lambda a: (place(a), a.name)))


def _is_summed(e: Expr, r: Reduce) -> bool:
    """Whether what is around `r` is but a sum of it, or the maximum of such maxima (of all scores), and it is no larger
    than what it reads, or not by much."""
    others = [s for s in reductions(e) if s is not r]
    summed = any(s.kind == "sum" and r in reductions(s.body) for s in others)
    summed = summed or r.kind in ("max", "min") and any(s.kind == r.kind and s.body is r for s in others)
    return summed and not _is_larger_than_read(r, MAX_GROWTH)


def _is_short_and_wide(r: Reduce) -> bool:
    """Whether `r`, of few terms, is sooner computed again than stored (heads mixed in a matrix of scores)."""
    return r.axis.extent * max(n.axis.extent for n in reductions(r.body)) <= MAX_COVERED and _is_larger_than_read(r)


def _is_larger_than_read(r: Expr, times: float = 1) -> bool:
    return is_larger_than(r, loads(r), times)


def is_larger_than(r: Expr, read: list[Load], times: float = 1) -> bool:
    """Whether an expression has more results than so many times the elements of each of the loads."""
    most = max((math.prod(map(_places, n.index)) for n in read), default=0)
    return math.prod(a.extent for a in free_axes(r)) > times * most


def _places(i: Expr) -> int:
    """How many places an index takes, a sum of two taken for pairs: blocks of 32 are fewer than what they are of."""
    every = math.prod(a.extent for a in free_axes(i))
    known = bounds(i) if isinstance(i, Op) and i.name == "floordiv" else None
    return every if known is None else min(every, known[1] - known[0] + 1)


def _is_spread(o: Output, r: Reduce, parallel: frozenset[Axis]) -> bool:
    """Whether `o` is a matrix along an axis of which its loops, `r` among them, know nothing.

    They would be run for each tile of that axis (weights that are returned, normalised by their sum).
    """
    loops = streamed(o.expr, tuple(parallel))
    inside = {n for s in loops for n in reductions(s.body)}
    if r not in loops or r in inside:
        return False
    known = frozenset().union(*map(free_axes, loops))
    outer = [free_axes(n) for n in reductions(o.expr) if n not in inside and n not in loops]
    return any(axes & known and (axes & parallel) - known for axes in outer)


def _is_of_no_row(o: Output, r: Reduce, loops: set[Reduce]) -> bool:
    """Whether the loop of `r` would be run for each tile of a long axis of `o` (its rows), although nothing that may be
    summed in it is another along that (of the one feature that is 1 in all rows)."""
    known = frozenset[Axis]().union(*(free_axes(s) for s in loops if s.axis.extent == r.axis.extent))
    return any(a.extent > MAX_COVERED for a in {*o.axes} - known)


def _around(e: Expr, r: Reduce) -> frozenset[Axis]:
    """Axes of the inner reductions that remain when `r` is known: the work that would repeat it."""
    holding: set[Reduce] = {r}
    for n in reductions(e):
        if not holding.isdisjoint(outermost(n.body)):
            holding.add(n)
    rest, stack = {r}, [*outermost(e)]
    while stack:
        n = stack.pop()
        if n not in rest:
            rest.add(n)
            stack += outermost(n.body)
    return frozenset().union(*(free_axes(n) for n in rest - holding if free_axes(n) & free_axes(r)))
