"""Region growth: which values are computed inside fused kernels, and what stays with PyTorch.

A *join* combines two values that each have an axis the other lacks (scores from queries and keys).
Where a join is larger than what it is made of, or something couples its elements before they are
reduced, it must not reach memory: a region grows from it, forward until every value in it has lost
one of the two sides, backward over what would be as large (masks, biases) or costs next to nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import replace

from ..build import op, substitute
from ..dtype import itemsize
from ..expr import Axis, Expr, Load, Op, divides, free_axes, index, load, loads, reductions, walk
from ..program import Program, Value, depends, enclosed
from .blow_ups import ends, given_or_returned, is_blow_up, is_coupled, is_larger, is_normalised, serves
from .epilogue import with_epilogue, with_sparing_epilogue
from .flatten import is_of_parts
from .joins import Seed, along_shared, indexing, is_long, is_outer, join, turned
from .projections import end_before_projections, large_results
from .region import Growth, Region, Rejected
from .resolve_views import inline_load, inlined, root_of
from .surround import AllSides, uses_division, with_prologue
from .told import told
from .weights import has_weight

RETURNED = (
    "the captured graph returns it, and its size is that of the blow-up"
    " (a graph break, as at a shape that depends on data, ends a graph early)"
)
PROJECTED = "a layer makes other features of each pair's, and products of that kind are quicker by themselves"

Group = tuple[set[str], AllSides]
Blocker = tuple[Value, str]
"""A value that stands in a region's way, and why."""


def grow_regions(program: Program) -> Growth:
    """Program with views resolved → regions, and the blow-ups that could not be fused with the reason."""
    seeds = [s for v in program.values if (s := join(program, v)) is not None]
    blown = [s for s in seeds if is_blow_up(program, s, seeds)]
    leading = [s for s in blown if not serves(program, s, blown)]
    chosen: list[Seed] = []
    for s in leading:
        # What another one's region ends with has no region of its own, which would end with a third.
        if not ends(program, s, chosen):
            chosen.append(s)
    grown: list[Seed] = []
    rejected: list[Rejected] = []
    tried: list[tuple[Seed, Blocker | None]] = []
    given = max((v.numel for v in program.given), default=0)
    for seed in chosen:
        blocker = _grow(program, seed)
        if (layer := _projected(program, seed)) is not None:
            if seed.value.numel > given:
                nbytes = seed.value.numel * itemsize(seed.value.dtype)
                rejected.append(Rejected(seed.value, layer, PROJECTED, nbytes))
            continue
        free = _narrowed(program, seed) if blocker else None
        tried.append((free, None) if free else (seed, blocker))
    tried = _up_to_layers(program, tried)
    products = [seed for seed, why in tried if why is None and not _is_of_layers(program, seed)]
    tried = [(seed, why) for seed, why in tried if not _is_led_into(program, seed, products)]
    covered: set[str] = set()
    for seed, blocker in tried:
        if blocker is not None and seed.value.projection:
            continue
        if blocker is None:
            others = (other for other, why in tried if why is None and other is not seed)
            seed = next((found for other in others if (found := _up_to(program, seed, other))), seed)
        # Of two that cover each other (queries by keys, and decays, by channel) one is left.
        others = (other for other, _ in tried if other is not seed and other.value.name not in covered)
        if any(_covers(program, other, seed) for other in others):
            covered.add(seed.value.name)
            continue
        if blocker is None and (shorter := _narrowed(program, seed)) and len(shorter.large) < len(seed.large):
            seed = seed if _leaves_pairs(program, seed.large - shorter.large) else shorter
        if blocker is not None and blocker[1] is RETURNED and (other := turned(program, seed)) is not None:
            # What both sides share may be what is reduced: s[i, j] + v[j, d], by max over j.
            seed, blocker = (other, None) if _grow(program, other) is None else (seed, blocker)
        if blocker is not None and blocker[1] is RETURNED:
            if is_larger(program, seed) and _spares(program, seed):
                # It reaches memory in any case, but once, and what the region reduces is spared.
                end_before_projections(program, seed)
                blocker = None
            elif not is_larger(program, seed):
                free = next((other for other in along_shared(seed) if _grow(program, other) is None), None)
                seed, blocker = (free, None) if free is not None else (seed, blocker)
        elif blocker is not None:
            read = max((program.by_name[root_of(program, r)] for r in blocker[0].reads), key=lambda v: v.numel)
            smaller = read.numel < seed.value.numel
            stored = smaller and read.name in seed.large
            seed = _ended(program, seed, blocker[0].name) if stored else seed
            if (is_larger(program, seed) or smaller) and _spares(program, seed, stored):
                if read.numel > given:
                    why = f"{blocker[1]}; a kernel stores what it reads"
                    nbytes = read.numel * itemsize(read.dtype)
                    rejected.append(Rejected(read, blocker[0], why, nbytes, fused=True, join=seed.value))
                blocker = None
        if blocker is None and not large_results(program, seed):
            end_before_projections(program, seed, set[str]().union(*(other.large for other, _ in tried)))
        if blocker is None and _is_iterated(program, seed, given):
            continue
        if blocker is None:
            grown.append(seed)
        elif seed.rows and seed.cols and (blocker[1] is not RETURNED or seed.value.numel > given):
            v = seed.value
            rejected.append(Rejected(v, blocker[0], blocker[1], v.numel * itemsize(v.dtype)))
    groups = _united(program, _merge(grown))
    place = {v.name: n for n, v in enumerate(program.values)}
    taken = set().union(*(members for members, _ in groups))
    # Later regions first: what several of them feed can only be computed by the last.
    finished: list[Group] = []
    for members, sides in sorted(groups, key=lambda g: -max(place[m] for m in g[0])):
        barred = set[str]().union(*(_meeting(program, seed) for seed in grown if seed.members.keys() <= members))
        members = with_sparing_epilogue(program, members, taken - members | barred)
        taken |= members
        finished.insert(0, (members, sides))
    large = frozenset[str]().union(*(seed.large for seed in grown))
    regions = [
        replace(_region(program, members, every := with_prologue(program, members, sides, taken)), large=large & every)
        for members, sides in finished
    ]
    return Growth(tuple(regions), told(program, regions, rejected, given))


def _narrowed(program: Program, seed: Seed) -> Seed | None:
    """The seed, grown, with one axis alone of a side that has several; None if there is none that is not blocked.

    The others are a batch's (of keys, where its members share their queries), or rows beside columns (of distances,
    which each head has its decay for): nothing reduces them.
    """
    narrow = [(seed.rows, frozenset((a,))) for a in seed.cols if len(seed.cols) > 1]
    narrow += [(frozenset((a,)), seed.cols) for a in seed.rows if len(seed.rows) > 1]
    found = [s for s in (Seed(seed.value, *sides) for sides in narrow) if _grow(program, s) is None]
    return min(found, key=lambda s: len(s.large), default=None)


def _up_to_layers(program: Program, tried: list[tuple[Seed, Blocker | None]]) -> list[tuple[Seed, Blocker | None]]:
    """The seeds, grown, without the large values of another whose join waits for a layer of what they reduce to.

    So scores of a layer are stored for the next one's, which they are added to, and a layer's part of the gradient of a
    bias that all of them share is where another's is added.
    """
    barred: list[set[str]] = []
    for seed, _ in tried:
        others = (s for s, _ in tried if s is not seed and not is_outer(s.value))
        later = (s for s in others if not seed.large.isdisjoint(s.large) and _waits(program, s.value, seed))
        barred.append(set[str]().union(*(s.large for s in later)))
    return [
        (seed, _grow(program, seed, names) if names else why) for (seed, why), names in zip(tried, barred, strict=True)
    ]


def _waits(program: Program, v: Value, seed: Seed) -> bool:
    """Whether a join depends on a product with a weight of what a region reduces."""
    if v.name in seed.large or not depends(program, {v.name}, seed.large):
        return False
    between = (u for u in program.values if u.name not in seed.large and depends(program, {v.name}, {u.name}))
    layers = (
        u for u in between if u.expr is not None and reductions(u.expr) and (u.projection or has_weight(program, u))
    )
    return any(depends(program, {u.name}, seed.large) for u in layers)


def _leaves_pairs(program: Program, left: set[str]) -> bool:
    """Whether a region without these leaves larger ones of them to memory than all that is given and returned (windows
    of rows by positions, of which each is a sum of several)."""
    return max(program.by_name[name].numel for name in left) > given_or_returned(program, program.saved)


def _is_iterated(program: Program, seed: Seed, given: int) -> bool:
    """Whether a region of nothing larger than an input multiplies matrices of its own by each other.

    So does the inverse of landmarks' scores, by iteration: kernels would compute each entry's whole past.
    """
    members = [program.by_name[m] for m in seed.members]
    if max(v.numel for v in members) > given:
        return False
    return any(seed.large >= {*v.reads} and join(program, v) for v in members)


def _up_to(program: Program, seed: Seed, other: Seed) -> Seed | None:
    """The seed with no more than what leads, element by element or by sums of its rows, to values of `other`; None
    unless all of it does, and `other` leaves results small that are large by this one's sides.

    So do scores of keys that all heads share, whose rows are queries and heads in one: added to each head's own, they
    make no values of a head and a key large.
    """
    if not other.rows and not other.cols:
        return None  # a number of each row (its positive's score), beside which others' scores stay as large
    apart = [program.by_name[m] for m in seed.large - other.large]
    stack, own, met, sums = [seed.value.name], {seed.value.name}, set[str](), set[str]()
    while stack:
        for user in program.users[stack.pop()]:
            u = program.by_name[user]
            if user in other.large:
                met.add(user)
                continue
            if u.expr is None or reductions(u.expr) and not _is_own_sum(program, seed, own, u):
                return None
            sums |= {user} if user not in seed.large else set()
            if user not in own:
                own.add(user)
                stack.append(user)
    extra = [v.numel for v in apart if v.name not in own]
    limit = max(v.numel for v in program.values if v.name not in seed.large | other.large)
    if not extra or max(extra) > limit or (own - sums) & {root_of(program, n) for n in program.outputs}:
        return None
    members = {m: v for m, v in seed.members.items() if m in own | met}
    sides = {m: seed.sides[m] for m in members}
    return replace(seed, members=members, sides=sides, large={*members} - sums)


def _is_own_sum(program: Program, seed: Seed, own: set[str], u: Value) -> bool:
    """Whether `u` reduces one side of the seed, of nothing but its own values (the sum of a row of decays, which they
    are divided by)."""
    return u.name in seed.members and u.name not in seed.large and all(root_of(program, r) in own for r in u.reads)


def _spares(program: Program, seed: Seed, summed: bool = False) -> bool:
    """Whether the region, with what lies between its members, reduces what it grew from at all: one of its sides, or
    what else it has before it is returned (the gradient of a bias that a batch shares, weights averaged over heads).

    Args:
      summed: whether it has been, before PyTorch reads it (the features of a pair's bound, which pages are chosen by).
    """
    returned = large_results(program, seed)
    summed |= bool(returned) and max(program.by_name[n].numel for n in returned) < seed.value.numel
    return bool(seed.large < seed.members.keys() or summed) and _close(program, seed) is None


def _projected(program: Program, seed: Seed) -> Value | None:
    """The layer that makes other features of each pair's, where the seed is a product of matrices (the mean of outer
    products): no kernel takes both together, PyTorch's are as good by themselves, and what follows is of pairs as well.

    So it is where pairs are put together of tokens, and products of two of them follow (triangles' edges).
    """
    made = [program.by_name[m] for m in seed.large - {seed.value.name}]
    if is_outer(seed.value):
        if not any(is_long(v) and len(seed.large.intersection(v.reads)) > 1 and join(program, v) for v in made):
            return None
    elif not is_long(seed.value) or is_coupled(program, seed.value) or is_normalised(program, seed):
        return None
    layers = (v for v in made if is_long(v) and has_weight(program, v))
    return min(layers, key=lambda v: program.places[v.name], default=None)


def _ended(program: Program, seed: Seed, blocker: str) -> Seed:
    """The seed without what depends on an operation of PyTorch's (the pages that are chosen by their bounds, compared
    with the least of these)."""
    members = {m: v for m, v in seed.members.items() if not depends(program, {m}, {blocker})}
    return replace(seed, members=members, sides={m: seed.sides[m] for m in members}, large=seed.large & members.keys())


def _covers(program: Program, seed: Seed, other: Seed) -> bool:
    """Whether `other` comes to the values of `seed` element by element, with both sides of `seed` along one of its own.

    So do the slopes of heads times distances. That region takes it like a mask, and ends before heads are summed.
    What `other` reduces by itself, before that, asks for a region of its own.
    """
    met = seed.large & other.large
    if not any(_are_along_one(seed, other, m) for m in met):
        return False
    apart = (program.by_name[m] for m in other.members.keys() - seed.members.keys())
    alone = {v.name for v in apart if v.expr is not None and reductions(v.expr)}
    return all(depends(program, {m}, {seed.value.name}) for m in alone)


def _are_along_one(seed: Seed, other: Seed, name: str) -> bool:
    """Whether a large value of both has both sides of `seed` along one side of `other`."""
    return any(all(side & own for own in seed.sides[name]) for side in other.sides[name])


def _is_led_into(program: Program, seed: Seed, products: list[Seed]) -> bool:
    """Whether `seed`, of tensors put together element by element or of a layer, comes that way to large values of
    products, and to nothing else: their regions take it like a mask, each by itself.

    So does a bias of a table and of padding, which several layers add, or one that a layer makes of features of theirs
    (pairs, which the product with its weight has along one side).
    """
    if not _is_of_layers(program, seed):
        return False
    large = set[str]().union(*(s.large for s in products))
    if not is_outer(seed.value):
        shared = ((s, name) for s in products for name in s.large & seed.large)
        if seed.value.name in large or not all(_are_along_one(s, seed, name) for s, name in shared):
            return False
    stack, met = [seed.value.name], False
    while stack:
        name = stack.pop()
        if name in program.outputs and name not in program.saved:
            return False
        for u in (program.by_name[user] for user in program.users[name]):
            if u.expr is None or reductions(u.expr):
                return False
            if u.name in large:
                met = True
            else:
                stack.append(u.name)
    return met


def _is_of_layers(program: Program, seed: Seed) -> bool:
    """Whether a seed multiplies no tokens by each other: outer, or a product with a weight."""
    return is_outer(seed.value) or has_weight(program, seed.value)


def _add_member(program: Program, v: Value, seed: Seed) -> bool:
    """Record a new member; whether it is as large as the seed.

    The member is looked at in terms of the seed, so that views in between leave no trace: it is large
    where one load of the seed still has an index along its rows and another along its columns. One
    axis stands for both only if it was flattened from them, which a division in the indices shows.
    What is reduced along one side is not large for an index that it has of the other (a relative shift), nor what is
    reduced along both at once, for the batch that such a side was flattened with (the gradient of keys there), if it
    has no more of one of them than that, nor what is reduced along a part of a side (the columns of a grid of keys) to
    no more than the seed's operands have together.
    """
    assert v.expr is not None
    pooled = v.numel <= sum(program.by_name[root_of(program, r)].numel for r in dict.fromkeys(seed.value.reads))
    found = {n: inline_load(n, seed.members[n.source]) for n in loads(v.expr) if n.source in seed.members}
    reads = [n for n in loads(substitute(v.expr, {}, dict(found))) if n.source == seed.value.name]
    # A sum of these stands for it: written out whole, members of a chain of reductions would double with each.
    seed.members[v.name] = replace(v, expr=functools.reduce(_beside, reads) if reads else v.expr)
    own = frozenset(v.axes)
    rows: frozenset[Axis] = frozenset()
    cols: frozenset[Axis] = frozenset()
    large = False
    for node in reads:
        every = [indexing(node, seed.value, side) for side in (seed.rows, seed.cols)]
        along_rows, along_cols = (own & axes for axes in every)
        rows, cols = rows | along_rows, cols | along_cols
        if seed.rows and seed.cols:
            reduced = (along_cols <= along_rows and every[1] - own) or (along_rows <= along_cols and every[0] - own)
            diagonal = len(along_rows | along_cols) == 1 and not divides(node)
            gone = (every[0] | every[1]) - own
            reduced = reduced or every[0] & every[1] - own
            apart = along_rows - every[1] and along_cols - every[0] or _are_parts(node, seed, along_rows & along_cols)
            reduced = reduced and not apart
            small = reduced or diagonal or pooled and gone
            large |= bool(along_rows and along_cols) and not small
        else:
            # A side of extent 1 leaves no axis to look for.
            large |= bool(along_rows | along_cols)
    seed.sides[v.name] = rows, cols
    return large


def _are_parts(node: Load, seed: Seed, axes: frozenset[Axis]) -> bool:
    """Whether one part of an axis indexes the rows of a load of the seed, and another part its columns: pairs laid in a
    row, and no batch, which is a part of both."""
    parts: list[set[Expr]] = []
    for side in (seed.rows, seed.cols):
        indices = (i for a, i in zip(seed.value.axes, node.index, strict=True) if a in side)
        cut = (n for i in indices for n in walk(i) if isinstance(n, Op) and n.name in ("floordiv", "mod"))
        parts.append({n for n in cut if free_axes(n) and free_axes(n) <= axes})
    return bool(parts[0] and parts[1]) and parts[0].isdisjoint(parts[1])


def _beside(a: Expr, b: Expr) -> Expr:
    return op("add", a, b, dtype=a.dtype)


def _grow(program: Program, seed: Seed, barred: Set[str] = frozenset()) -> Blocker | None:
    """Fill `seed.members`, with none that is barred; or the value that blocks it and why."""
    v = seed.value
    seed.members = {v.name: replace(v, expr=load(v.name, tuple(map(index, v.axes)), v.dtype))}
    seed.sides = {v.name: (seed.rows, seed.cols)}
    degenerate = not seed.rows and not seed.cols
    large = seed.large = {v.name}
    blocker: Blocker | None = None
    for v in program.values:
        if v.name in seed.members or v.name in barred or not seed.members.keys() & set(v.reads):
            continue
        if v.expr is None:
            blocking = large.intersection(root_of(program, r) for r in v.reads)
            if blocking and not degenerate and blocker is None:
                blocker = v, v.why or "it has no expression"
            continue
        if large.intersection(v.reads) and not (degenerate and reductions(v.expr)):
            if _add_member(program, v, seed) or degenerate:
                large.add(v.name)
        elif not degenerate and _sums_parts(program, v, seed):
            _add_member(program, v, seed)
    returned = (program.by_name[n] for n in program.outputs if root_of(program, n) in large and not degenerate)
    if blocker is None and (v := next(returned, None)) is not None:
        blocker = v, RETURNED
    return blocker or _close(program, seed)


def _sums_parts(program: Program, v: Value, seed: Seed) -> bool:
    """Whether `v` adds up what parts of the rows, or columns, make of the others (chunks of queries of the gradient of
    keys), and nothing else reads that."""
    read = [program.by_name[r] for r in v.reads]
    if v.expr is None or len(read) != 1 or read[0].expr is None or not seed.large.intersection(read[0].reads):
        return False
    if program.users[read[0].name] != (v.name,):
        return False
    return is_of_parts(inlined(v.expr, {m: program.by_name[m] for m in (*seed.large, read[0].name)}))


def grown_from(program: Program, v: Value) -> set[str]:
    """Names of what is as large as the join `v` and made of it; none if it is no join."""
    seed = join(program, v)
    if seed is None:
        return set()
    _grow(program, seed)
    return seed.large


def _close(program: Program, seed: Seed) -> Blocker | None:
    """Add what lies between members, so that no value outside both depends on and feeds the region."""
    between = enclosed(program, seed.members.keys())
    for v in program.values:
        if v.name in between and v.name not in seed.members:
            if v.expr is None:
                return v, v.why or "it has no expression"
            _add_member(program, v, seed)
    return None


def _merge(grown: list[Seed]) -> list[Group]:
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
            own, other = with_epilogue(program, members, others), with_epilogue(program, others, members)
            if not own & other or depends(program, members, others) or depends(program, others, members):
                continue
            if all(_is_of_other_rows(program, program.by_name[name], sides, theirs) for name in own & other):
                continue
            both = {name: sides.get(name, ()) + theirs.get(name, ()) for name in sides.keys() | theirs.keys()}
            rest = [g for k, g in enumerate(groups) if k not in (n, m)]
            return _united(program, [*rest, (members | others, both)])
    return groups


def _is_of_other_rows(program: Program, v: Value, sides: AllSides, theirs: AllSides) -> bool:
    """Whether what `v` finishes is kept for a backward pass in any case, and has rows along one axis of `v` in the one
    group and along another in the other (attention along rows and along columns): no loop could make both, and the
    group that finishes it may as well load what the other has stored."""
    assert v.expr is not None
    rows: list[frozenset[Axis]] = []
    for group in (sides, theirs):
        found = [n for n in loads(v.expr) if n.source in group]
        if not all(n.source in program.saved for n in found):
            return False
        along = (
            free_axes(i)
            for n in found
            for i, a in zip(n.index, program.by_name[n.source].axes, strict=True)
            if any(a in own for own, _ in group[n.source])
        )
        rows.append(frozenset().union(*along))
    return bool(rows[0] and rows[1]) and not rows[0] & rows[1]


def _meeting(program: Program, seed: Seed) -> set[str]:
    """Pointwise values in which what is left of rows meets what is left of columns, where both are of the same axis of
    positions (the gradient of what a score has of the query's position and of the key's, sums of decays): a kernel of
    two loops would compute all scores twice for them, which other kernels of rows, and of columns, have at hand.
    """
    sides, found = {**seed.sides}, set[str]()
    for v in program.values:
        if v.name in seed.members or v.expr is None or reductions(v.expr):
            continue
        read = [n for n in loads(v.expr) if n.source in sides]
        every = [tuple(indexing(n, program.by_name[n.source], side) for side in sides[n.source]) for n in read]
        rows, cols = (frozenset[Axis]().union(*(own[k] for own in every)) for k in (0, 1))
        if rows & cols and not any(r & c for r, c in every):
            others = [sides[m] for m in seed.members.keys() - seed.large - {n.source for n in read}]
            if any(r and not c for r, c in others) and any(c and not r for r, c in others):
                found.add(v.name)
        elif read:
            sides[v.name] = rows, cols
    return found


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
    """The view through which alone the outside sees `name`, where it keeps every axis whole and lies in the order of
    its axes, as kernels store it."""
    stored = name
    while True:
        users = [u for u in program.users[name] if u not in members]
        if name in program.outputs or len(users) != 1:
            return stored
        view = program.by_name[users[0]]
        if not view.is_view or view.numel != program.by_name[name].numel:
            return stored
        assert view.expr is not None
        if uses_division(view.expr):
            return stored
        name = view.name
        stored = stored if view.turned else name
