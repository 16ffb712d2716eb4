"""Region growth: which values are computed inside fused kernels, and what stays with PyTorch.

A *join* combines two values that each have an axis the other lacks (scores from queries and keys).
Where a join is larger than what it is made of, or something couples its elements before they are
reduced, it must not reach memory: a region grows from it, forward until every value in it has lost
one of the two sides, backward over what would be as large (masks, biases) or costs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..build import substitute
from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Load, Op, const, free_axes, index, load, loads, reductions, walk
from ..program import Program, Value
from .resolve_views import inline_load, root_of

# A contraction with a weight longer than this is a projection even if its result is coupled.
MAX_WEIGHT_CONTRACTION = 256
# Float operations of a prologue that may be repeated in the loop (column side) or per row tile (row side).
MAX_COLUMN_OPS, MAX_ROW_OPS = 3, 12

RETURNED = (
    "the captured graph returns it, and its size is that of the blow-up"
    " (a graph break, as at a shape that depends on data, ends a graph early)"
)


@dataclass(frozen=True)
class Region:
    """Values computed by fused kernels: `members` in program order, `outputs` those needed outside.

    Attributes:
      large: the members that have both sides of a join.
    """

    members: tuple[str, ...]
    outputs: tuple[str, ...]
    large: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rejected:
    """A blow-up that stays with PyTorch.

    Attributes:
      value: the value that will be materialised.
      blocker: the value whose operation stands in the way.
      why: the reason.
      nbytes: size of what is materialised, in bytes.
      fused: whether kernels compute it all the same, and store a part of that size between them.
    """

    value: Value
    blocker: Value
    why: str
    nbytes: int
    fused: bool = False


@dataclass(frozen=True)
class Growth:
    regions: tuple[Region, ...]
    rejected: tuple[Rejected, ...]


Sides = tuple[frozenset[Axis], frozenset[Axis]]
AllSides = dict[str, tuple[Sides, ...]]
Group = tuple[set[str], AllSides]
Blocker = tuple[Value, str]
"""A value that stands in a region's way, and why."""


@dataclass
class _Seed:
    """A join, and the region grown from it.

    Attributes:
      rows, cols: the axes of the join that only the one side, or only the other, has.
      members: the region's values, written in terms of the join.
      sides: each member's axes along rows and columns.
      large: the members that have both.
    """

    value: Value
    rows: frozenset[Axis]
    cols: frozenset[Axis]
    members: dict[str, Value] = field(default_factory=dict)
    sides: dict[str, Sides] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)


def grow_regions(program: Program) -> Growth:
    """Program with views resolved → regions, and the blow-ups that could not be fused with the reason."""
    seeds = [s for v in program.values if (s := _join(program, v)) is not None]
    blown = [s for s in seeds if _is_blow_up(program, s, seeds)]
    chosen = [s for s in blown if not _serves(program, s, blown) and not _ends(program, s, blown)]
    grown: list[_Seed] = []
    rejected: list[Rejected] = []
    tried: list[tuple[_Seed, Blocker | None]] = []
    for seed in chosen:
        blocker = _grow(program, seed)
        free = _narrowed(program, seed) if blocker else None
        tried.append((free, None) if free else (seed, blocker))
    for seed, blocker in tried:
        if any(_covers(program, other, seed) for other, _ in tried if other is not seed):
            continue
        if blocker is None and (shorter := _narrowed(program, seed)) and len(shorter.large) < len(seed.large):
            seed = shorter
        if blocker is not None and blocker[1] is RETURNED and (other := _turned(program, seed)) is not None:
            # What both sides share may be what is reduced: s[i, j] + v[j, d], by max over j.
            seed, blocker = (other, None) if _grow(program, other) is None else (seed, blocker)
        if blocker is not None and _is_larger(program, seed) and _spares(program, seed):
            # It reaches memory in any case, but once, and what the region reduces is spared.
            if blocker[1] is not RETURNED:
                read = max((program.by_name[root_of(program, r)] for r in blocker[0].reads), key=lambda v: v.numel)
                why = f"{blocker[1]}; a kernel stores what it reads"
                rejected.append(Rejected(read, blocker[0], why, read.numel * itemsize(read.dtype), fused=True))
            else:
                _end_before_projections(program, seed)
            blocker = None
        if blocker is None:
            grown.append(seed)
        elif seed.rows and seed.cols:
            v = seed.value
            rejected.append(Rejected(v, blocker[0], blocker[1], v.numel * itemsize(v.dtype)))
    groups = _united(program, _merge(grown))
    place = {v.name: n for n, v in enumerate(program.values)}
    taken = set().union(*(members for members, _ in groups))
    # Later regions first: what several of them feed can only be computed by the last.
    finished: list[Group] = []
    for members, sides in sorted(groups, key=lambda g: -max(place[m] for m in g[0])):
        members = _with_epilogue(program, members, taken - members)
        taken |= members
        finished.insert(0, (members, sides))
    large = frozenset[str]().union(*(seed.large for seed in grown))
    regions = [
        replace(_region(program, members, every := _with_prologue(program, members, sides, taken)), large=large & every)
        for members, sides in finished
    ]
    for region in regions:
        largest = max(program.by_name[m].numel for m in region.members)
        for v in program.values:
            # As large as the blow-up, and PyTorch makes it (the mask of a dropout): the kernel is no help there.
            if v.expr is None and v.why and v.numel >= largest and set(program.users[v.name]) & set(region.members):
                rejected.append(Rejected(v, v, f"{v.why}; a kernel reads it", v.numel * itemsize(v.dtype)))
    fused = {name for r in regions for name in r.members}
    return Growth(tuple(regions), tuple(r for r in rejected if r.fused or r.value.name not in fused))


def _join(program: Program, v: Value) -> _Seed | None:
    """The two sides of `v` if it joins values that each have an axis the other lacks."""
    if v.expr is None or v.is_view or not is_float(v.dtype):
        return None
    indices = {m for n in loads(v.expr) for i in n.index for m in loads(i)}
    found = [n for n in loads(v.expr) if n not in indices]  # what a table is read at (token ids) is no operand
    own = frozenset(v.axes)
    # A product of which an extent is 1 has lost an axis to look for, but it has no further axis either.
    wide = {x for x in own if x.extent > 1}
    whole = [r for r in reductions(v.expr) if free_axes(r) >= wide]
    # What has an operand of its own size changes that one alone: a norm, with its means and weights.
    changed = any(is_float(n.dtype) and _touched(n) >= wide for n in found)
    for n, a in enumerate(found):
        for b in found[n + 1 :]:
            rows, cols = _touched(a) & own - _touched(b), _touched(b) & own - _touched(a)
            contracted = any(r.kind == "sum" and a in loads(r.body) and b in loads(r.body) for r in whole)
            if rows and cols and (contracted or not changed):
                return _Seed(v, rows, cols)
            if contracted and is_float(a.dtype) and is_float(b.dtype) and 1 in v.shape:
                return _Seed(v, rows, cols)
    return None


def _turned(program: Program, seed: _Seed) -> _Seed | None:
    """The seed with the axes that its operands share for columns; None if they share none."""
    assert seed.value.expr is not None
    touched = [_touched(n) for n in loads(seed.value.expr)]
    shared = frozenset(seed.value.axes).intersection(*touched) - seed.rows - seed.cols
    moving = frozenset(a for a in shared if any(_reduces(program, seed.value, a)))
    return _Seed(seed.value, seed.rows, moving) if moving else None


def _narrowed(program: Program, seed: _Seed) -> _Seed | None:
    """The seed, grown, with one axis alone of a side that has several; None if there is none that is not blocked.

    The others are a batch's (of keys, where its members share their queries), or rows beside columns (of distances,
    which each head has its decay for): nothing reduces them.
    """
    narrow = [(seed.rows, frozenset((a,))) for a in seed.cols if len(seed.cols) > 1]
    narrow += [(frozenset((a,)), seed.cols) for a in seed.rows if len(seed.rows) > 1]
    found = [s for s in (_Seed(seed.value, *sides) for sides in narrow) if _grow(program, s) is None]
    return min(found, key=lambda s: len(s.large), default=None)


def _reduces(program: Program, v: Value, axis: Axis) -> Iterator[bool]:
    """For each reduction of a direct user of `v`, whether it runs over the axis of `v`."""
    for user in program.users[v.name]:
        e = program.by_name[user].expr
        for r in reductions(e) if e is not None else ():
            for node in (n for n in loads(r.body) if n.source == v.name):
                yield r.axis in free_axes(node.index[v.axes.index(axis)])


def _touched(node: Load) -> frozenset[Axis]:
    return frozenset().union(*(free_axes(i) for i in node.index))


def _is_larger(program: Program, seed: _Seed) -> bool:
    """Whether a join is larger than each of its operands."""
    v = seed.value
    return bool(seed.rows and seed.cols) and all(v.numel > program.by_name[r].numel for r in v.reads)


def _spares(program: Program, seed: _Seed) -> bool:
    """Whether the region, with what lies between its members, reduces what it grew from at all."""
    return seed.large < seed.members.keys() and _close(program, seed) is None


def _end_before_projections(program: Program, seed: _Seed) -> None:
    """Leave out of a region, of which something large is returned, what a product with a weight makes of a large value
    that is no larger than its result, if all that is returned comes from it: storing the one or the other is as good.

    So a bias's gradient is stored, and that of the pairs and the weights from which a linear layer made the bias are
    PyTorch's.
    """
    returned = {root_of(program, n) for n in program.outputs} & seed.large
    for v in [v for v in program.values if v.name in seed.large and v.name != seed.value.name]:
        stored = [program.by_name[r] for r in v.reads if r in seed.large]
        if v.expr is None or not reductions(v.expr) or not _has_weight(program, v) or len(stored) != 1:
            continue
        (kept,) = stored
        after = {v.name} | {m for m in seed.members if _meets_as_large(program, program.by_name[m], kept, seed)}
        for u in program.values:
            if u.name in seed.members and after.intersection(u.reads):
                after.add(u.name)
        others = {r for name in after for r in program.by_name[name].reads if r in seed.large} - after
        if kept.numel <= v.numel and returned <= after and others <= {kept.name}:
            for name in after:
                del seed.members[name]
            seed.large -= after
            return


def _meets_as_large(program: Program, v: Value, kept: Value, seed: _Seed) -> bool:
    """Whether `v` reduces the product of a large value and of another of that size, from outside of the region."""
    others = (program.by_name[r] for r in v.reads if r not in seed.members)
    return v.name not in seed.large and kept.name in v.reads and any(o.numel >= kept.numel for o in others)


def _is_blow_up(program: Program, seed: _Seed, seeds: list[_Seed]) -> bool:
    """Whether a region grows from this join.

    Joins with a weight are projections unless they are normalised (learned keys) and larger than
    their sources. Others must be larger than their sources and be reduced later; a shorter one
    (short sequences) must be coupled, and not merely lead to another join of that kind.
    """
    v = seed.value
    assert v.expr is not None
    if v.projection or _is_table(program, v):
        return False
    coupled, followed = _path(program, v)
    larger = _is_larger(program, seed)
    if _has_weight(program, v):
        contraction = max((r.axis.extent for r in reductions(v.expr)), default=1)
        return followed and larger and contraction <= MAX_WEIGHT_CONTRACTION and _is_normalised(program, seed)
    if larger:
        return followed
    later = (s.value for s in seeds if s is not seed and _feeds(program, v.name, s.value.name))
    return coupled and followed and not any(not _has_weight(program, s) and _asks_again(program, s) for s in later)


def _is_normalised(program: Program, seed: _Seed) -> bool:
    """Whether elements of the join meet a reduction of themselves again, as in a softmax.

    In a backward pass that is an input, a number for each index of one side. The gradient of a bias only sums.
    """
    v = seed.value
    sizes = [v.numel // math.prod(a.extent for a in side) for side in (seed.rows, seed.cols)]
    inputs = (i for i in program.values if i.op == "input" and is_float(i.dtype))
    kept = {i.name for i in inputs if i.numel in sizes and len(i.axes) > 1 == i.axes[-1].extent}
    own, statistics = {v.name}, kept
    for u in program.values:
        if u.expr is None or own.isdisjoint(u.reads) and statistics.isdisjoint(u.reads):
            continue
        found = reductions(u.expr)
        alone = any(len(set(loads(r.body))) == 1 and loads(r.body)[0].source in own for r in found)
        if not own.isdisjoint(u.reads) and (not statistics.isdisjoint(u.reads) or alone and u.numel == v.numel):
            return True
        if alone or not (found or statistics.isdisjoint(u.reads)):
            statistics.add(u.name)
        elif not found:
            own.add(u.name)
    return False


def _asks_again(program: Program, v: Value) -> bool:
    return all(_path(program, v))


def _serves(program: Program, seed: _Seed, seeds: list[_Seed]) -> bool:
    """Whether the product that reduces `seed` is itself a blow-up at least as large.

    Then `seed` is part of an operand (the angles of a rotary embedding), which that region may compute or read.
    """
    v, larger = seed.value, {s.value.name for s in seeds if s is not seed and s.value.numel >= seed.value.numel}
    seen: set[str] = set()
    stack = [v.name]
    while stack:
        for user in set(program.users[stack.pop()]) - seen:
            seen.add(user)
            u = program.by_name[user]
            if u.expr is not None and reductions(u.expr):
                if user in larger:
                    return True
            elif u.expr is not None:
                stack.append(user)
    return False


def _ends(program: Program, seed: _Seed, seeds: list[_Seed]) -> bool:
    """Whether `seed`, no larger than its operands, reduces a larger blow-up: that one's region ends with it.

    What follows (a norm, a sum over the heads that share a key) is of linear size, and no part of it.
    """
    if _is_larger(program, seed):
        return False
    larger = (s.value.name for s in seeds if s is not seed and _is_larger(program, s))
    return any(_feeds(program, name, seed.value.name) for name in larger)


def _covers(program: Program, seed: _Seed, other: _Seed) -> bool:
    """Whether `other` comes to the values of `seed` element by element, with both sides of `seed` along one of its own.

    So do the slopes of heads times distances. That region takes it like a mask, and ends before heads are summed.
    What `other` reduces by itself, before that, asks for a region of its own.
    """
    met = seed.large & other.large
    if not any(all(side & own for own in seed.sides[m]) for m in met for side in other.sides[m]):
        return False
    apart = (program.by_name[m] for m in other.members.keys() - seed.members.keys())
    alone = {v.name for v in apart if v.expr is not None and reductions(v.expr)}
    return all(_depends(program, {m}, {seed.value.name}) for m in alone)


def _is_table(program: Program, v: Value) -> bool:
    """Whether `v` is made of indices and constants alone, and no larger than an input."""
    given = [i.numel for i in program.values if i.op == "input" and is_float(i.dtype)]
    if v.numel > max(given, default=0):
        return False
    stack, seen = [v.name], {v.name}
    while stack:
        u = program.by_name[stack.pop()]
        if u.expr is None:
            return False
        stack += set(u.reads) - seen
        seen.update(u.reads)
    return True


def _has_weight(program: Program, v: Value) -> bool:
    """Whether an operand of the product is a parameter, or a matrix where the other has batch axes."""
    sources = [program.by_name[r] for r in v.reads if is_float(program.by_name[r].dtype)]
    rank = max((len(s.axes) for s in sources), default=0)
    return any(s.op == "parameter" or (s.op == "input" and len(s.axes) == 2 and rank > 2) for s in sources)


def _path(program: Program, v: Value) -> tuple[bool, bool]:
    """What lies between `v` and the product that reduces it.

    (some step is not linear or some statistic is of `v` alone, some reduction consumes it)
    """
    seen, stack, coupled, followed = set(), [v.name], False, False
    path, sums = {v.name}, []
    while stack:
        name = stack.pop()
        for user in program.users[name]:
            u = program.by_name[user]
            if user in seen:
                continue
            seen.add(user)
            if u.expr is None:
                # Whatever it does, it reads all of `v`, which is then in its way.
                followed = True
                continue
            found = reductions(u.expr)
            followed |= bool(found)
            alone = {r.kind for r in found if len(set(loads(r.body))) == 1}
            sums += [u] if "sum" in alone else []
            coupled |= bool(alone - {"sum"}) or any(isinstance(n, Op) and _couples(n) for n in walk(u.expr))
            if not found or len(u.axes) == len(v.axes) and u.numel == v.numel:
                stack.append(user)
                path.add(user)
    return coupled or any(_meets(program, u, path) for u in sums), followed


def _meets(program: Program, u: Value, path: set[str]) -> bool:
    """Whether a sum over values of `path` is put together with one of them again (the gradient of a bias is not)."""
    assert u.expr is not None
    rest = substitute(u.expr, {}, {r: const(0, r.dtype) for r in reductions(u.expr)})
    if any(n.source in path for n in loads(rest)):
        return True
    below = {u.name}
    for value in program.values:
        if below & set(value.reads):
            if path & set(value.reads):
                return True
            below.add(value.name)
    return False


def _couples(n: Op) -> bool:
    """Whether an operation is more than linear in what it reads, as a mask is; what puts pieces side by side is not."""
    if n.name == "select" and not loads(n.args[0]) and len(free_axes(n.args[0])) < 2:
        return False
    return n.name not in _LINEAR and n.dtype != "bool"


_LINEAR = ("mul", "div", "add", "sub", "neg", "cast", "floordiv", "mod")


def _feeds(program: Program, source: str, target: str) -> bool:
    """Whether `target` reads `source` through pointwise values only."""
    stack, seen = [source], {source}
    while stack:
        for user in program.users[stack.pop()]:
            u = program.by_name[user]
            if user == target:
                return True
            if user not in seen and u.expr is not None and u.numel >= program.by_name[source].numel:
                seen.add(user)
                stack.append(user)
    return False


def _add_member(program: Program, v: Value, seed: _Seed) -> bool:
    """Record a new member; whether it is as large as the seed.

    The member is written in terms of the seed, so that views in between leave no trace: it is large
    where one load of the seed still has an index along its rows and another along its columns. One
    axis stands for both only if it was flattened from them, which a division in the indices shows.
    """
    assert v.expr is not None
    found = {n: inline_load(n, seed.members[n.source]) for n in loads(v.expr) if n.source in seed.members}
    member = replace(v, expr=substitute(v.expr, {}, dict(found)))
    seed.members[v.name] = member
    own = frozenset(v.axes)
    rows: frozenset[Axis] = frozenset()
    cols: frozenset[Axis] = frozenset()
    large = False
    for node in loads(member.expr):  # type: ignore
        if node.source == seed.value.name:
            along_rows, along_cols = (own & _indexing(node, seed.value, side) for side in (seed.rows, seed.cols))
            rows, cols = rows | along_rows, cols | along_cols
            if seed.rows and seed.cols:
                large |= bool(along_rows and along_cols) and (len(along_rows | along_cols) > 1 or _divides(node))
            else:
                # A side of extent 1 leaves no axis to look for.
                large |= bool(along_rows | along_cols)
    seed.sides[v.name] = rows, cols
    return large


def _indexing(node: Load, v: Value, side: frozenset[Axis]) -> frozenset[Axis]:
    """Axes that index the axes `side` of `v` in a load of it."""
    return frozenset().union(*(free_axes(i) for a, i in zip(v.axes, node.index, strict=True) if a in side))


def _grow(program: Program, seed: _Seed) -> Blocker | None:
    """Fill `seed.members`; or the value that blocks it and why."""
    v = seed.value
    seed.members = {v.name: replace(v, expr=load(v.name, tuple(map(index, v.axes)), v.dtype))}
    seed.sides = {v.name: (seed.rows, seed.cols)}
    degenerate = not seed.rows and not seed.cols
    large = seed.large = {v.name}
    blocker: Blocker | None = None
    for v in program.values:
        if v.name in seed.members or not seed.members.keys() & set(v.reads):
            continue
        if v.expr is None:
            blocking = large.intersection(root_of(program, r) for r in v.reads)
            if blocking and not degenerate and blocker is None:
                blocker = v, v.why or "it has no expression"
            continue
        if large.intersection(v.reads) and not (degenerate and reductions(v.expr)):
            if _add_member(program, v, seed) or degenerate:
                large.add(v.name)
    returned = (program.by_name[n] for n in program.outputs if root_of(program, n) in large and not degenerate)
    if blocker is None and (v := next(returned, None)) is not None:
        blocker = v, RETURNED
    return blocker or _close(program, seed)


def _close(program: Program, seed: _Seed) -> Blocker | None:
    """Add what lies between members, so that no value outside both depends on and feeds the region."""
    below: set[str] = set()
    for v in program.values:
        if any(r in seed.members or r in below for r in v.reads):
            below.add(v.name)
    above: set[str] = set()
    for v in reversed(program.values):
        if v.name in seed.members or v.name in above:
            above.update(v.reads)
    for v in program.values:
        if v.name in below and v.name in above and v.name not in seed.members:
            if v.expr is None:
                return v, v.why or "it has no expression"
            _add_member(program, v, seed)
    return None


def _merge(grown: list[_Seed]) -> list[Group]:
    """Members of the regions and their sides in each seed's terms; those that share a value united."""
    groups: list[Group] = []
    for seed in grown:
        members = set(seed.members)
        touching = [g for g in groups if g[0] & members]
        sides: AllSides = {name: (own,) for name, own in seed.sides.items()}
        for _, other in touching:
            for name, theirs in other.items():
                sides[name] = theirs + sides.get(name, ())
        groups = [g for g in groups if g not in touching]
        groups.append((members.union(*(m for m, _ in touching)), sides))
    return groups


def _united(program: Program, groups: list[Group]) -> list[Group]:
    """Groups that the same pointwise value finishes become one, unless one of them feeds another."""
    for n, (members, sides) in enumerate(groups):
        for m, (others, theirs) in enumerate(groups[:n]):
            ends, other_ends = _with_epilogue(program, members, others), _with_epilogue(program, others, members)
            if not ends & other_ends or _depends(program, members, others) or _depends(program, others, members):
                continue
            both = {name: sides.get(name, ()) + theirs.get(name, ()) for name in sides.keys() | theirs.keys()}
            rest = [g for k, g in enumerate(groups) if k not in (n, m)]
            return _united(program, [*rest, (members | others, both)])
    return groups


def _depends(program: Program, targets: set[str], sources: set[str]) -> bool:
    """Whether a value of `targets` depends on one of `sources`."""
    reach = set(sources)
    for v in program.values:
        if any(r in reach for r in v.reads):
            reach.add(v.name)
    return bool((targets - sources) & reach)


def _with_epilogue(program: Program, members: set[str], others: set[str]) -> set[str]:
    """Add pointwise values that only finish what the region returns (gates, scalings, differences)."""
    members = set(members)
    for v in program.values:
        if v.name in members | others or v.expr is None or v.is_view or v.projection or not is_float(v.dtype):
            continue
        inner = [r for r in v.reads if r in members]
        if not inner or reductions(v.expr) or _uses_division(v.expr):
            continue
        same_size = v.numel == max(program.by_name[r].numel for r in inner)
        if same_size and not _depends(program, set(v.reads) - members, members):
            members.add(v.name)
    return members


def _uses_division(e: Expr) -> bool:
    return any(_divides(node) for node in loads(e))


def _divides(node: Load) -> bool:
    """Whether an index of a load divides: a view that cuts or joins axes."""
    return any(isinstance(n, Op) and n.name in ("floordiv", "mod") for i in node.index for n in walk(i))


def _with_prologue(program: Program, members: set[str], sides: AllSides, taken: set[str]) -> set[str]:
    """Add producers that would be as large as the blow-up, or are cheap enough to repeat; none that a region has."""
    members, sides = set(members), dict(sides)
    others = taken - members
    for v in reversed(program.values):
        readers = [program.by_name[u] for u in program.users[v.name] if u in members]
        if v.name in members | others or v.expr is None or v.is_view or not readers:
            continue
        rows, cols, two_sided = _read_along(v, readers, sides)
        sides[v.name] = ((rows, cols),)
        expands = v.numel > sum(program.by_name[r].numel for r in v.reads)
        if two_sided or (expands and (not reductions(v.expr) or len(v.reads) == 1)):
            fits = expands or not reductions(v.expr)
        elif reductions(v.expr) or v.projection or (is_float(v.dtype) and _read_across(v, readers)):
            fits = False
        else:
            fits = _cost(v.expr) <= (MAX_COLUMN_OPS if cols else MAX_ROW_OPS)
        if fits:
            members.add(v.name)
    return members


def _read_across(v: Value, readers: list[Value]) -> bool:
    """Whether a reader's reduction runs over several axes of `v` at once: its tiles would not be contiguous."""
    return any(
        isinstance(n, Op) and n.name in ("floordiv", "mod") and r.axis in free_axes(n)
        for reader in readers
        if reader.expr is not None
        for r in reductions(reader.expr)
        for node in loads(r.body)
        if node.source == v.name
        for i in node.index
        for n in walk(i)
    )


def _read_along(v: Value, readers: list[Value], sides: AllSides) -> tuple[frozenset[Axis], frozenset[Axis], bool]:
    """Axes of `v` that the readers index along their rows and columns; whether one read has both, apart.

    A reader that grew from several joins has rows and columns in the terms of each; `v` is as large as the
    blow-up only if it is so in all of them.
    """
    rows: set[Axis] = set()
    cols: set[Axis] = set()
    two_sided = False
    for reader in readers:
        assert reader.expr is not None
        reduced = frozenset(r.axis for r in reductions(reader.expr))
        for node in (n for n in loads(reader.expr) if n.source == v.name):
            large = True
            for reader_rows, reader_cols in sides.get(reader.name, ((frozenset(), frozenset()),)):
                # What a member without columns reduces over runs along them.
                along_rows, along_cols = (
                    {a for a, i in zip(v.axes, node.index, strict=True) if free_axes(i) & side}
                    for side in (reader_rows, reader_cols or reduced)
                )
                apart = len(along_rows | along_cols) > 1 or _divides(node)
                large &= bool(along_rows and along_cols) and apart
                rows |= along_rows
                cols |= along_cols
            two_sided |= large
    return frozenset(rows), frozenset(cols), two_sided


_COSTS = {
    "select": 4, "exp": 2, "log": 2, "tanh": 4, "sigmoid": 3, "sin": 4, "cos": 4, "pow": 4, "erf": 4, "uniform": 20,
}  # fmt: skip


def _cost(e: Expr) -> int:
    """Float operations of one element, a gather counted as two."""
    ops = sum(_COSTS.get(n.name, 1) for n in walk(e) if isinstance(n, Op) and is_float(n.dtype))
    return ops + sum(2 for n in loads(e) if any(isinstance(m, Load) for i in n.index for m in walk(i)))


def _region(program: Program, own: set[str], members: set[str]) -> Region:
    """Order the members and find which values, as the user views them, leave the region.

    Only values in `own` do: what else reads a value of the prologue has PyTorch, or a region, compute it again.
    """
    ordered = tuple(v.name for v in program.values if v.name in members)
    outputs: list[str] = []
    for name in ordered:
        v = program.by_name[name]
        if v.is_view and root_of(program, name) in members:
            continue
        if name in own and _leaves(program, name, members):
            outputs.append(_presented(program, name, members))
    return Region(ordered, tuple(dict.fromkeys(outputs)))


def _leaves(program: Program, name: str, members: set[str]) -> bool:
    """Whether `name` or a view of it is returned or read by a value outside the region."""
    if name in program.outputs:
        return True
    return any(
        (_leaves(program, u, members) if program.by_name[u].is_view else u not in members) for u in program.users[name]
    )


def _presented(program: Program, name: str, members: set[str]) -> str:
    """The view through which alone the outside sees `name`, where that view keeps every axis whole."""
    while True:
        users = [u for u in program.users[name] if u not in members]
        if name in program.outputs or len(users) != 1:
            return name
        view = program.by_name[users[0]]
        if not view.is_view or view.numel != program.by_name[name].numel:
            return name
        assert view.expr is not None
        if _uses_division(view.expr):
            return name
        name = view.name
