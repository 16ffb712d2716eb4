"""Blow-ups: which of the joins a region grows from, and which serve those or end them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..dtype import is_float
from ..expr import Expr, Load, Op, free_axes, loads, outer_loads, reductions, walk
from ..program import Program, Value, depends, reading, reads_of
from .joins import LONG, Seed, axes_of, indexing, is_of_positions, is_outer, join, shared_axes
from .resolve_views import root_of
from .weights import has_weight, is_weight, operand_names, rank_of

# A contraction with a weight longer than this is a projection even if its result is coupled.
MAX_WEIGHT_CONTRACTION = 256
# So few of each of more tokens, in no softmax, are streams that are mixed, and no pairs.
FEW = 8


def is_larger(program: Program, seed: Seed) -> bool:
    """Whether a join is larger than each of its operands: of a product, those that are multiplied. What it is repeated
    along (`x.expand(…)`) makes it none.
    """
    v = seed.value
    if v.expr is None or not seed.rows or not seed.cols:
        return False
    size = math.prod(a.extent for a in free_axes(v.expr))
    return all(size > program.by_name[r].numel for r in operand_names(v))


def is_coupled(program: Program, v: Value) -> bool:
    """Whether something more than linear, or a statistic of `v` alone, lies between `v` and what reduces it."""
    return _path(program, v)[0]


def is_blow_up(program: Program, seed: Seed, seeds: list[Seed]) -> bool:
    """Whether a region grows from this join.

    Joins with a weight are projections unless they are larger than their sources, and normalised as exponentials are
    (learned keys; the features of a norm are none) or searched (codes). Others must be larger than their sources and be
    reduced later, those of elements also larger than all inputs, or normalised; a shorter one (short sequences) must be
    coupled, and not merely lead to another join of that kind.
    """
    v = seed.value
    assert v.expr is not None
    readers = [program.by_name[u] for u in program.users[v.name]]
    if _is_table(program, v) or (reductions(v.expr) and is_picked_often(program, v, readers)):
        return False
    if v.projection and not _is_normalised_power(program, seed):
        return False
    coupled, followed = _path(program, v)
    larger = is_larger(program, seed)
    if has_weight(program, v) and not _is_measured(program, seed):
        contraction = max((r.axis.extent for r in reductions(v.expr)), default=1)
        # What a gate of one number hands on to all features is no score, whatever that number is multiplied by.
        scored = contraction > 1 or is_exponent(program, v)
        asked = followed and larger and scored and contraction <= MAX_WEIGHT_CONTRACTION
        return asked and (_is_normalised_power(program, seed) or is_searched(program, v))
    if is_of_streams(program, seed) and not is_exponent(program, v) and not _branches(program, seed):
        return False
    if larger:
        # Angles, positions by frequencies: a table that is smaller than what it turns.
        given = max((i.numel for i in program.given), default=0)
        table = is_outer(v) and (v.numel <= given or _is_added(program, v, seeds))
        return followed and (not table or is_normalised(program, seed))
    if not followed or not (coupled or _decays(program, seed)):
        return False
    if _is_normalised_power(program, seed):
        return True
    later = (s.value for s in seeds if s is not seed and _feeds(program, v.name, s.value.name))
    return not any(not has_weight(program, s) and _asks_again(program, s) for s in later)


def is_of_streams(program: Program, seed: Seed) -> bool:
    """Whether a join is a product with few elements of each of more tokens (streams that a token mixes, experts that it
    weighs), and makes no more of them than so many of all that is given.

    Both sides come last; a sum is of about as many terms as there are streams, or its results are few (the gradient of
    what these are mixed by). Queries and keys share their features, or a sum over them.
    """
    v = seed.value
    assert v.expr is not None
    few, many = _lengths(seed)
    wide = [a for a in v.axes if a.extent > 1]
    if few > FEW + 1 or v.numel <= few * few * many or not wide or wide[-1] not in seed.rows | seed.cols:
        return False
    found = reductions(v.expr)
    multiplied = all(_is_product(r.body) for r in found) if found else _is_product(v.expr)
    short = many <= FEW + 1 or all(abs(r.axis.extent - few) <= 1 for r in found)
    return multiplied and short and v.numel <= (FEW + 1) * given_or_returned(program, program.saved)


def _is_product(e: Expr) -> bool:
    return isinstance(e, Op) and e.name == "mul" and e.args[0] is not e.args[1]


def _branches(program: Program, seed: Seed) -> bool:
    """Whether a join multiplies another one, or another multiplies it (the levels of a tree, each by its branches)."""
    v = seed.value
    around = (program.by_name[name] for name in (*v.reads, *program.users[v.name]))
    return any(u.expr is not None and _is_product(u.expr) and join(program, u) is not None for u in around)


def _lengths(seed: Seed) -> tuple[int, int]:
    """Elements of a join along its shorter side, and along the other."""
    short, long = sorted(math.prod(a.extent for a in side) for side in (seed.rows, seed.cols))
    return short, long


def _is_added(program: Program, v: Value, seeds: list[Seed]) -> bool:
    """Whether `v` is put together with something as large to which no other join leads: positions by row and column,
    with the tokens that a layer makes."""
    joins = [s.value.name for s in seeds if s.value is not v and not has_weight(program, s.value)]
    others = (o for o in beside(program, v) if not _is_of_pairs(program, o))
    return any(o.name not in joins and not any(_feeds(program, n, o.name) for n in joins) for o in others)


def _is_of_pairs(program: Program, v: Value) -> bool:
    """Whether `v` is made, element by element, of what is outer, if it is no seed: a mask of pairs."""
    stack, seen = [v], {v.name}
    while stack:
        u = stack.pop()
        if u.expr is None or reductions(u.expr):
            continue
        if is_outer(u):
            return True
        made = [program.by_name[name] for name in u.reads if name not in seen]
        seen.update(m.name for m in made)
        stack += [m for m in made if m.numel >= u.numel]
    return False


def beside(program: Program, v: Value) -> Iterator[Value]:
    """What is as large as `v`, is not made of it, and is put together with it element by element."""
    readers = (program.by_name[name] for name in program.users[v.name])
    pointwise = (u for u in readers if u.expr is not None and not reductions(u.expr))
    others = (program.by_name[name] for u in pointwise for name in u.reads if name != v.name)
    return (o for o in others if o.numel >= v.numel and not depends(program, {o.name}, {v.name}))


def _is_normalised_power(program: Program, seed: Seed) -> bool:
    """Whether exponentials are taken of the join's elements, or of what is made of them, and these meet a reduction of
    themselves."""
    return is_exponent(program, seed.value) and is_normalised(program, seed)


def is_normalised(program: Program, seed: Seed) -> bool:
    """Whether elements of the join meet a reduction of themselves again, as in a softmax.

    In a backward pass that is an input, a number for each index of one side, the other being of extent 1 (and not what
    a batch of one leads with), and which the join is not made of. The gradient of a bias only sums.
    """
    v = seed.value
    sizes = [v.numel // math.prod(a.extent for a in side) for side in (seed.rows, seed.cols)]
    inputs = (i for i in program.given if i.numel in sizes and is_float(i.dtype))
    numbers = (i.name for i in inputs if 1 in i.shape[_leading(i.shape) :])
    kept = {name for name in numbers if not depends(program, {v.name}, {name})}
    own, statistics, both = {v.name}, kept, {v.name, *kept}
    for u in reading(program, both):
        if u.expr is None:
            continue
        found = reductions(u.expr)
        alone = any(len(set(loads(r.body))) == 1 and loads(r.body)[0].source in own for r in found)
        if not own.isdisjoint(u.reads) and (not statistics.isdisjoint(u.reads) or alone and u.numel == v.numel):
            return True
        if alone or not (found or statistics.isdisjoint(u.reads)):
            statistics.add(u.name)
            both.add(u.name)
        elif not found:
            own.add(u.name)
            both.add(u.name)
    return False


def _is_measured(program: Program, seed: Seed) -> bool:
    """Whether what elements of two tensors make of each other is summed, or its largest taken, along what both have:
    points and centres, by features. A layer's product sums by itself, and a bias is no pair of anything."""
    v = seed.value
    if v.expr is None or reductions(v.expr):
        return False
    along = {v.name: shared_axes(seed)}
    for u in program.values:
        if u.expr is None:
            continue
        for node in (n for n in loads(u.expr) if n.source in along):
            axes = indexing(node, program.by_name[node.source], along[node.source])
            if any(r.axis in axes for r in reductions(u.expr)):
                return True
            along[u.name] = along.get(u.name, frozenset()) | axes & frozenset(u.axes)
    return False


def is_searched(program: Program, v: Value) -> bool:
    """Whether nothing becomes of a product with a weight but its extremes along all that the weight brings, or their
    places: the code next to a vector."""
    assert v.expr is not None
    rank = rank_of(program, v)
    weights = {r for r in v.reads if is_weight(program, program.by_name[r], rank)}
    touched = [(n.source in weights, axes_of(n)) for n in loads(v.expr)]
    along = {v.name: frozenset(v.axes).difference(*(t for weight, t in touched if not weight))}
    found = False
    for u in program.values:
        reads = () if u.expr is None else [n for n in loads(u.expr) if n.source in along]
        if u.expr is None and not along.keys().isdisjoint(u.reads):
            return False
        if not reads:
            continue
        own = frozenset(u.axes) & frozenset().union(
            *(indexing(n, program.by_name[n.source], along[n.source]) for n in reads)
        )
        kinds = {r.kind for r in reductions(u.expr)} if u.expr is not None else set()
        if kinds - {"max", "min"} or bool(own) == bool(kinds):
            return False
        if own:
            along[u.name] = own
        found |= bool(kinds)
    return found and bool(along[v.name])


def is_exponent(program: Program, v: Value) -> bool:
    """Whether an exponential is taken of `v`, or of what is made of it element by element: scores, and no features that
    are normalised by their mean.
    """
    stack, seen = [v.name], {v.name}
    while stack:
        for user in set(program.users[stack.pop()]) - seen:
            e = program.by_name[user].expr
            seen.add(user)
            if e is not None and any(isinstance(n, Op) and n.name == "exp" for n in walk(e)):
                return True
            if e is not None and not reductions(e):
                stack.append(user)
    return False


def _leading(shape: tuple[int, ...]) -> int:
    """How many dimensions of extent 1 a shape begins with."""
    return next((n for n, extent in enumerate(shape) if extent > 1), len(shape))


def _asks_again(program: Program, v: Value) -> bool:
    return all(_path(program, v))


def serves(program: Program, seed: Seed, seeds: list[Seed]) -> bool:
    """Whether the product that reduces `seed`, or a part of it, is itself a blow-up at least as large as that; or it
    reduces a larger one, and the seed is only a product, no larger than what is given or returned; or the seed is that
    of features (few, or of few), and put together with others to more pairs, element by element, than it has of either.

    Then `seed` is part of an operand (the angles of a rotary embedding, queries and keys that are normalised, values
    that each head makes of a token), which that region may compute or read. So are features that a layer makes, of
    whatever size, and a norm takes the means of.
    """
    own, exponent, layer = (
        is_normalised(program, seed),
        is_exponent(program, seed.value),
        has_weight(program, seed.value),
    )
    features = layer and not exponent

    def is_alike(s: Seed) -> bool:
        return is_normalised(program, s) and (is_exponent(program, s.value) or not exponent or layer)

    every = {s.value.name: s for s in seeds if s is not seed}

    def is_other(name: str) -> bool:
        # What reduces a softmax, and is none (a gradient of values that few queries ask for), is its end.
        return name in every and (not own or is_alike(every[name]))

    short = own and not is_larger(program, seed)

    def is_map(s: Seed) -> bool:
        if layer and has_weight(program, s.value):
            return True
        return short and not is_larger(program, s) and is_normalised(program, s)

    larger = _weighing(program, seed, seeds)
    least, _ = _lengths(seed)
    seen: set[str] = set()
    stack = [seed.value.name]
    while stack:
        part = program.by_name[stack.pop()]
        for user in set(program.users[part.name]) - seen:
            seen.add(user)
            u = program.by_name[user]
            if u.expr is not None and reductions(u.expr):
                large = (features or u.numel >= part.numel) and not _turns(seed, u)
                if large and is_other(user) or any(_feeds(program, name, user) for name in larger):
                    return True
                # But not what multiplies it by another: feature maps of queries and of keys.
                if user in every and large and any(_feeds(program, n, user) and is_map(s) for n, s in every.items()):
                    return True
                if u.numel == part.numel and (features or _is_of_itself(u)):
                    stack.append(user)
            elif u.numel > part.numel * least and is_other(user):
                return True
            elif u.expr is not None:
                stack.append(user)
    return False


def _turns(seed: Seed, v: Value) -> bool:
    """Whether a product is of a few numbers that each pair of the seed has (a difference of points, in a frame's own
    axes): it has all pairs, as the seed has."""
    found = reductions(v.expr) if v.expr is not None else []
    read = [n for r in found for n in loads(r.body) if n.source == seed.value.name]
    pair = [k for k, a in enumerate(seed.value.axes) if a in seed.rows | seed.cols]
    places = [free_axes(n.index[k]) for n in read for k in pair]
    whole = all(axes and axes <= {*v.axes} for axes in places)
    return bool(read) and bool(seed.rows and seed.cols) and whole and all(r.axis.extent < LONG for r in found)


def _is_of_itself(v: Value) -> bool:
    """Whether what a value reduces is one tensor in each case, as in a softmax: it multiplies no two."""
    assert v.expr is not None
    return all(len({*loads(r.body)}) == 1 for r in reductions(v.expr))


def _weighing(program: Program, seed: Seed, seeds: list[Seed]) -> list[str]:
    """The larger blow-ups that `seed` has no part in, if it is a product alone, no larger than what is given or
    returned."""
    size, name = seed.value.numel, seed.value.name
    if size > given_or_returned(program) or _path(program, seed.value)[0]:
        return []
    return [n for s in seeds if s.value.numel > size and not depends(program, {n := s.value.name}, {name})]


def given_or_returned(program: Program, apart: frozenset[str] = frozenset()) -> int:
    """Elements of the largest value that the program is given or returns, `apart` from some of its outputs.

    Of what is returned by halves and more (weights without those of a sink), all of it counts: it is stored as a whole.
    """
    around = [v.numel for v in program.given]
    for name in {*program.outputs} - apart:
        own, whole = (program.by_name[n].numel for n in (name, root_of(program, name)))
        around.append(whole if whole <= 2 * own else own)
    return max(around, default=0)


def ends(program: Program, seed: Seed, seeds: list[Seed]) -> bool:
    """Whether `seed`, no larger than its operands, reduces a larger blow-up, or is no softmax and reduces one: that
    one's region ends with it.

    What follows (a norm, a sum over the heads that share a key) is of linear size, and no part of it.
    """
    others = [s for s in seeds if s is not seed and _feeds(program, s.value.name, seed.value.name)]
    if is_larger(program, seed):
        if is_normalised(program, seed):
            return False
        return any(not is_larger(program, s) and is_normalised(program, s) for s in others)
    summing = not _is_normalised_power(program, seed)
    return any(is_larger(program, s) or summing and _is_normalised_power(program, s) for s in others)


def _is_table(program: Program, v: Value) -> bool:
    """Whether `v` is made of indices and constants alone, and no larger than an input."""
    given = [i.numel for i in program.given if is_float(i.dtype)]
    return v.numel <= max(given, default=0) and is_of_positions(program, v)


def is_picked_often(program: Program, v: Value, readers: Sequence[Value]) -> bool:
    """Whether elements of `v` are read at places that data decides alone, and more often than there are any, or as
    often, if not by rows and columns in another order: sums for each of these would be made again and again."""

    def is_by_data(n: Load) -> bool:
        return any(not is_of_positions(program, program.by_name[m.source]) for i in n.index for m in loads(i))

    def is_ordered(n: Load) -> bool:
        found = [a for i in n.index for a in free_axes(i)]
        by_data = [free_axes(i) for i in n.index if loads(i)]
        return all(len(axes) == 1 and found.count(*axes) == 1 for axes in by_data)

    def is_often(n: Load, reader: Value) -> bool:
        return reader.numel > v.numel or reader.numel == v.numel and not is_ordered(n)

    reads = [(n, reader) for reader in readers if reader.expr is not None for n in loads(reader.expr)]
    own = [(n, reader) for n, reader in reads if n.source == v.name]
    return bool(own) and all(is_by_data(n) and is_often(n, reader) for n, reader in own)


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


def _decays(program: Program, seed: Seed) -> bool:
    """Whether elements of a join are multiplied by a mask of pairs, which has both of its sides: a decay by distance,
    after which the product that reduces them cannot be taken first."""
    v = seed.value
    sides = math.prod(a.extent for a in seed.rows | seed.cols)
    stack, seen = [v.name], {v.name}
    while stack:
        for u in (program.by_name[name] for name in program.users[stack.pop()]):
            if u.name in seen or u.expr is None or reductions(u.expr) or u.numel < v.numel:
                continue
            others = (program.by_name[r] for n in walk(u.expr) if _is_product(n) for r in reads_of(n))
            if any(o.name not in seen and o.numel >= sides and _is_of_pairs(program, o) for o in others):
                return True
            seen.add(u.name)
            stack.append(u.name)
    return False


def _meets(program: Program, u: Value, path: set[str]) -> bool:
    """Whether a sum over values of `path` is put together with one of them again (the gradient of a bias is not)."""
    assert u.expr is not None
    if any(n.source in path for n in outer_loads(u.expr)):
        return True
    below = {u.name}
    for value in program.values:
        if below & set(value.reads):
            if path & set(value.reads):
                return True
            below.add(value.name)
    return False


def _couples(n: Op) -> bool:
    """Whether an operation is more than linear in what it reads, as a mask or a square is; what puts pieces side by
    side is not."""
    if n.name == "select" and not loads(n.args[0]) and len(free_axes(n.args[0])) < 2:
        return False
    if n.name == "mul" and n.args[0] == n.args[1]:
        return bool(loads(n))
    return n.name not in _LINEAR and n.dtype != "bool"


_LINEAR = ("mul", "div", "add", "sub", "neg", "cast", "floordiv", "mod")


def _feeds(program: Program, source: str, target: str) -> bool:
    """Whether `target` reads `source`, or heads of it that are as large as `target`, through pointwise values only."""
    least = min(program.by_name[source].numel, program.by_name[target].numel)
    stack, seen = [source], {source}
    while stack:
        for user in program.users[stack.pop()]:
            u = program.by_name[user]
            if user == target:
                return True
            if user in seen or not depends(program, {target}, {user}):
                continue
            if u.expr is not None and u.numel >= least:
                seen.add(user)
                stack.append(user)
    return False
