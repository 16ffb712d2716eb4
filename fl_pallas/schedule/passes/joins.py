"""Joins: values that combine two others, each with an axis the other lacks (scores from queries and keys)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..build import substitute
from ..dtype import is_float, is_int
from ..expr import Axis, Expr, Index, Load, Op, free_axes, loads, reductions, walk
from ..program import Program, Value
from .resolve_views import inline_load
from .whole import is_in_floats

# Elements of a set that each pair of a row and a column asks something of.
MAX_COUNTED = 64
# Sums of more terms are left to matrix units.
LONG = 16

Sides = tuple[frozenset[Axis], frozenset[Axis]]


@dataclass
class Seed:
    """A join, and the region grown from it.

    Attributes:
      rows, cols: the axes of the join that only the one side, or only the other, has.
      members: the region's values; what they load of the join, directly or not, in place of what they are.
      sides: each member's axes along rows and columns.
      large: the members that have both.
    """

    value: Value
    rows: frozenset[Axis]
    cols: frozenset[Axis]
    members: dict[str, Value] = field(default_factory=dict)
    sides: dict[str, Sides] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)


def join(program: Program, v: Value) -> Seed | None:
    """The two sides of `v` if it joins values that each have an axis the other lacks."""
    if v.expr is None or v.is_view:
        return None
    counted = None if is_float(v.dtype) or is_in_floats(v.expr) else _counted(program, v)
    if counted is not None and not counted:
        return None
    seed = _sides(program, v, v.expr)
    # What both sides share may be what is counted: whether a row sees anything, of a mask and each batch's padding.
    return seed if seed is None or counted is None or not counted.isdisjoint(seed.rows | seed.cols) else None


def _sides(program: Program, v: Value, e: Expr) -> Seed | None:
    found = _operands(program, e)
    own = frozenset(v.axes)
    # A product of which an extent is 1 has lost an axis to look for, but it has no further axis either.
    wide = {x for x in own if x.extent > 1}
    whole = [r for r in reductions(e) if free_axes(r) >= wide]
    # What has an operand of its own size changes that one alone: a norm, with its means and weights.
    changed = any(is_float(n.dtype) and axes_of(n) >= wide for n in found)
    short: Seed | None = None
    pairs = [(a, b) for n, a in enumerate(found) for b in found[n + 1 :]]
    contracted = {p for p in pairs if any(r.kind == "sum" and {*p} <= {*loads(r.body)} for r in whole)}
    # The sides of a product come before those of a bias that is added to it.
    for a, b in sorted(pairs, key=lambda p: p not in contracted):
        rows, cols = axes_of(a) & own - axes_of(b), axes_of(b) & own - axes_of(a)
        if rows and cols and ((a, b) in contracted or not changed):
            return Seed(v, rows, cols)
        if short is None and (a, b) in contracted and is_float(a.dtype) and is_float(b.dtype) and 1 in v.shape:
            short = Seed(v, rows, cols)  # of a row by itself (a norm among distances), where no other pair has both
    # Numbers of rows that meet positions, and not how far two of those are apart.
    places = frozenset(_positions(e)) & own
    for n in [n for n in found if is_float(n.dtype)] if places and not (whole or changed) else []:
        rows, cols = axes_of(n) & own, places - axes_of(n)
        if rows and len(cols) == 1:
            return Seed(v, rows, cols)
    return short or _placed(v, found)


def _operands(program: Program, e: Expr) -> list[Load]:
    """The loads of `e` that are its operands: what a table is read at (token ids) is none. Integers that are made of
    data element by element (times apart) stand for that."""

    def is_made(u: Value) -> bool:
        return is_int(u.dtype) and u.expr is not None and not reductions(u.expr) and not is_of_positions(program, u)

    while opened := {n: inline_load(n, u) for n in loads(e) if is_made(u := program.by_name[n.source])}:
        e = substitute(e, {}, dict(opened))
    indices = {m for n in loads(e) for i in n.index for m in loads(i)}
    return [n for n in loads(e) if n not in indices]


def _positions(e: Expr) -> Iterator[Axis]:
    """The axes along which `e` is made of positions, other than by what it loads and what it asks."""
    if isinstance(e, Index):
        yield e.axis
    elif isinstance(e, Op):
        for a in e.args if e.dtype != "bool" else ():
            yield from _positions(a)


def _counted(program: Program, v: Value) -> frozenset[Axis]:
    """The axes along which the pairs of a mask are summed, with nothing larger than rows but positions (a row's
    positives): scores that it masks are no such sum, nor is what two sets of a row and of a column have in common."""
    if v.dtype != "bool" or not is_outer(v):
        return frozenset()
    own, pairs = {v.name}, v.numel
    for u in program.values:
        if u.expr is None or own.isdisjoint(u.reads):
            continue
        others = [o for r in u.reads if r not in own and (o := program.by_name[r]).numel >= pairs]
        if not all(is_of_positions(program, o) for o in others):
            continue
        if found := reductions(u.expr):
            if not is_of_small_sets(program, u):
                read = [(r, n) for r in found for n in loads(r.body) if n.source in own and len(n.index) == len(v.axes)]
                return frozenset(a for r, n in read for i, a in zip(n.index, v.axes) if r.axis in free_axes(i))
            pairs = min(pairs, u.numel)
        own.add(u.name)
    return frozenset()


def is_of_small_sets(program: Program, v: Value) -> bool:
    """Whether `v` counts, over a short axis, what is asked element by element of integers that are few (tags that two
    tokens share), or is the largest of such (coordinates' distances)."""
    assert v.expr is not None
    if is_float(v.dtype) and not all(r.kind in ("max", "min") for r in reductions(v.expr)):
        return False
    counted = math.prod(r.axis.extent for r in reductions(v.expr))
    given, stack = set[str](), [*v.reads]
    while stack:
        u = program.by_name[stack.pop()]
        found = reductions(u.expr) if u.expr is not None else ()
        alone = u.expr is not None and u.numel >= v.numel and len(program.users[u.name]) == 1
        if alone and (is_float(v.dtype) and not found or not is_float(u.dtype)):
            counted *= math.prod(r.axis.extent for r in found)
            stack += u.reads
        else:
            given.add(u.name)
    return counted <= MAX_COUNTED and v.numel > sum(program.by_name[r].numel for r in given)


def _placed(v: Value, found: list[Load]) -> Seed | None:
    """The two sides of `v` if it is what each row has at a position that is read, and 0 elsewhere: the gradient of a
    maximum, `select(a1 == place[a0], g[a0], 0)`."""
    assert v.expr is not None
    for test in (n for n in walk(v.expr) if isinstance(n, Op) and n.name == "eq"):
        for along, place in (test.args, test.args[::-1]):
            rows = frozenset(v.axes) & free_axes(place)
            if isinstance(along, Index) and rows and loads(place) and not any(along.axis in axes_of(n) for n in found):
                return Seed(v, rows, frozenset((along.axis,)))
    return None


def is_outer(v: Value) -> bool:
    """Whether `v` is made, element by element, of tensors that each lack one of its axes, or of positions alone."""
    if v.expr is None or v.is_view or reductions(v.expr):
        return False
    wide = {a for a in v.axes if a.extent > 1}
    touched = [axes_of(n) & wide for n in loads(v.expr)]
    return len(wide) > 1 and all(t < wide for t in touched)


def is_long(v: Value) -> bool:
    """Whether `v` is a product of matrices, with a sum that only matrix units take quickly."""
    return v.expr is not None and any(r.kind == "sum" and r.axis.extent > LONG for r in reductions(v.expr))


def turned(program: Program, seed: Seed) -> Seed | None:
    """The seed with the axes that its operands share, and its users reduce, for columns; None if there are none, or
    they are a batch of products."""
    if is_long(seed.value):
        return None
    moving = frozenset(a for a in shared_axes(seed) if any(_reduces(program, seed.value, a)))
    return Seed(seed.value, seed.rows, moving) if moving else None


def along_shared(seed: Seed) -> list[Seed]:
    """The seed with one axis that its operands share for rows: queries, where each pair with a key has features, and no
    batch of products."""
    if is_long(seed.value):
        return []
    own = shared_axes(seed)
    return [Seed(seed.value, frozenset((a,)), seed.cols) for a in seed.value.axes if a in own and a.extent > 1]


def shared_axes(seed: Seed) -> frozenset[Axis]:
    """The axes that both operands have: all that are put together, or that a product multiplies."""
    e = seed.value.expr
    assert e is not None
    multiplied = [n for r in reductions(e) for n in loads(r.body)]
    touched = [axes_of(n) for n in multiplied or loads(e)]
    return frozenset(seed.value.axes).intersection(*touched) - seed.rows - seed.cols


def _reduces(program: Program, v: Value, axis: Axis) -> Iterator[bool]:
    """For each reduction of a direct user of `v`, whether it runs over the axis of `v`."""
    for user in program.users[v.name]:
        e = program.by_name[user].expr
        for r in reductions(e) if e is not None else ():
            for node in (n for n in loads(r.body) if n.source == v.name):
                yield r.axis in free_axes(node.index[v.axes.index(axis)])


def axes_of(node: Load) -> frozenset[Axis]:
    """The axes that index a load."""
    return frozenset().union(*(free_axes(i) for i in node.index))


def indexing(node: Load, v: Value, side: frozenset[Axis]) -> frozenset[Axis]:
    """Axes that index the axes `side` of `v` in a load of it."""
    return frozenset().union(*(free_axes(i) for a, i in zip(v.axes, node.index, strict=True) if a in side))


def is_of_positions(program: Program, v: Value) -> bool:
    """Whether `v` is made of indices and constants alone."""
    stack, seen = [v.name], {v.name}
    while stack:
        u = program.by_name[stack.pop()]
        if u.expr is None:
            return False
        stack += set(u.reads) - seen
        seen.update(u.reads)
    return True
