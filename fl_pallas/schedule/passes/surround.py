"""What comes before a region: producers that are as large, or cost little."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Load, Op, divides, free_axes, loads, reductions, walk
from ..inner import over_distances
from ..program import Program, Value, depends, read_by
from ..remember import remembered
from ..target import HOPPER
from .blow_ups import FEW, is_picked_often
from .joins import Sides, is_of_positions, is_of_small_sets
from .registers import COSTLY
from .resolve_views import inlined, root_of
from .weigh import ISSUED, LAUNCH, MOVED, POWERS
from .weights import has_weight

# Float operations of a prologue that may be repeated in the loop (column side) or per row tile (row side).
MAX_COLUMN_OPS, MAX_ROW_OPS = 3, 12
# Terms of a sum that each distance has, and operations that lead to them.
MAX_SUMMED, MAX_STEPS = 256, 32
# Rows of a tile; and instructions for an element that goes through registers to the matrix units, where what is loaded
# as it is goes there straight.
ROWS, THROUGH_REGISTERS = 128, 8
# Instructions of a function that a library has: a sine, whose argument may be large.
CALLED = 100
# Scores that one thread of a matrix instruction has in a column.
SHARED_BY = 2
# Cycles that are worth the trouble.
WORTH = LAUNCH / 4

AllSides = dict[str, tuple[Sides, ...]]


def uses_division(e: Expr) -> bool:
    return any(divides(node) for node in loads(e))


def with_prologue(program: Program, members: set[str], sides: AllSides, taken: set[str]) -> set[str]:
    """Add producers that would be as large as the blow-up, or are cheap enough to repeat; none that a region has."""
    own, members, sides = members, set(members), dict(sides)
    others = taken - members
    longer: set[str] = set()
    tiles = max((math.prod(a.extent for a in rows) for own in sides.values() for rows, _ in own), default=1) // ROWS
    chosen_by, made = _choosing(program, members), functools.cache(functools.partial(_made, program, own))
    returned = {root_of(program, name) for name in program.outputs}
    whole = max((program.by_name[m].numel for m in own), default=0)
    loops: dict[str, frozenset[Axis]] = {}
    computed: dict[str, int] = {}
    for v in read_by(program, members):
        if v.name in members or v.name in others or v.expr is None or v.is_view:
            continue
        readers = [program.by_name[u] for u in program.users[v.name] if u in members]
        rows, cols, two_sided = _read_along(v, readers, sides)
        loops[v.name] = cols if _is_costly_side(program, v) else cols | rows & _summed(v, readers, loops)
        sides[v.name] = ((rows, cols),)
        expands = v.numel > sum(program.by_name[r].numel for r in v.reads)
        expands &= not reductions(v.expr) or not _is_of_all(v, v.expr)
        expands |= two_sided and v.numel >= whole and _is_of_features(program, v)
        two_sided |= expands and all(_finishes(u, v, sides) for u in readers)
        computed[v.name] = _computed(v, readers, sides, computed)
        if v.name in chosen_by and not is_of_positions(program, v):
            # PyTorch makes it in any case, and not to the last bit as a kernel does: what it is compared with is of
            # PyTorch's.
            fits = False
        elif reductions(v.expr) and is_picked_often(program, v, readers):
            fits = False
        elif (
            not two_sided and (not cols or is_of_positions(program, v)) and _is_made_over(program, v, computed[v.name])
        ):
            fits = False
        elif two_sided or (expands and (not reductions(v.expr) or len(v.reads) == 1)) or _is_distance(program, v):
            fits = (
                not reductions(v.expr)
                or expands
                and not _is_layer(program, v, members)
                or is_of_small_sets(program, v)
                or _is_of_pairs(program, v)
                or _is_by_distance(program, v, rows, cols)
            )
        elif _is_statistic(program, v):
            fits = True
        elif reductions(v.expr) or v.projection or (is_float(v.dtype) and _read_across(v, readers)):
            fits = False
        elif v.name in returned and is_rounded(program, v, members):
            fits = False  # so is what another pass makes of it
        elif _is_rounding(v.expr):
            fits = False  # a cast that is no view is PyTorch's
        elif _is_summed_up(program, v, members):
            fits = False  # a softmax's sum, say, is of what PyTorch rounds
        elif loops[v.name] and _takes_longer(program, v, made, tiles, loops[v.name]):
            fits = False
            longer.add(v.name)
        else:
            fits = _cost(v.expr) <= (MAX_COLUMN_OPS if cols else MAX_ROW_OPS)
        if fits:
            members.add(v.name)
    return members - _going_on(program, members - own, longer, loops)


def _is_of_features(program: Program, v: Value) -> bool:
    """Whether `v` is a product along features, and of no weight: what a region has many of, and its backward pass more
    (the gradients of weights, where rows are shorter than features)."""
    assert v.expr is not None
    short = all(r.kind == "sum" and r.axis.extent <= MAX_SUMMED for r in reductions(v.expr))
    return short and not has_weight(program, v)


def _finishes(reader: Value, v: Value, sides: AllSides) -> bool:
    """Whether a member that no join led to takes each element of `v` for one of its own: a product that is added to
    what a kernel stores in any case."""
    assert reader.expr is not None
    return reader.name not in sides and reader.numel == v.numel and not reductions(reader.expr)


def _is_of_pairs(program: Program, v: Value) -> bool:
    """Whether `v` reduces rows of a table that a query and a key choose together: PyTorch would store a row a pair."""
    assert v.expr is not None
    around = sum(program.by_name[r].numel for r in v.reads) + v.numel
    return any(
        _is_gather(n) and math.prod(a.extent for a in free_axes(n)) > around
        for r in reductions(v.expr)
        for n in loads(r.body)
    )


def _is_statistic(program: Program, v: Value) -> bool:
    """Whether `v` sums up, along one side, pairs that are computed of less, and not read: decays, which a row's total
    divides. PyTorch would store them."""
    assert v.expr is not None
    long = [r for r in reductions(v.expr) if r.axis.extent > FEW]
    found = [(r, n) for r in long for n in loads(r.body) if r.axis in free_axes(n)]
    return bool(found) and all(_is_computed_of_less(program, program.by_name[n.source]) for _, n in found)


def _is_computed_of_less(program: Program, v: Value) -> bool:
    """Whether `v` is made, element by element, of what has fewer elements all together."""
    made = _pointwise(program, v)
    if v.expr is None or reductions(v.expr) or len(made) > MAX_STEPS:
        return False
    e = inlined(v.expr, made)
    return sum(program.by_name[n].numel for n in {n.source for n in loads(e)}) < v.numel and not _is_of_all(v, e)


def _is_of_all(v: Value, e: Expr) -> bool:
    """Whether `e`, what `v` is, loads something by all axes of `v`: keys that several heads share are no pairs."""
    return any(free_axes(n).issuperset(a for a in v.axes if a.extent > 1) for n in loads(e))


def _pointwise(program: Program, v: Value) -> dict[str, Value]:
    """What `v` is made of element by element, and what that is."""
    found: dict[str, Value] = {}
    stack = [*v.reads]
    while stack:
        u = program.by_name[stack.pop()]
        if u.name not in found and u.expr is not None and not reductions(u.expr):
            found[u.name] = u
            stack += u.reads
    return found


def _is_by_distance(program: Program, v: Value, rows: frozenset[Axis], cols: frozenset[Axis]) -> bool:
    """Whether `v` is a short sum of what distances decide (waves, or hats of a learned bias): one for each of these is
    stored, and not one for each pair."""
    assert v.expr is not None
    if math.prod(r.axis.extent for r in reductions(v.expr)) > MAX_SUMMED:
        return False
    pointwise = _pointwise(program, v)
    if len(pointwise) > MAX_STEPS:
        return False
    e = inlined(v.expr, pointwise)
    return any(over_distances(e, i, j) is not None for i in rows for j in cols - {i})


def _is_gather(node: Load) -> bool:
    """Whether a load is from a position that is read."""
    return any(isinstance(m, Load) for i in node.index for m in walk(i))


def _is_layer(program: Program, v: Value, members: set[str]) -> bool:
    """Whether `v` is a product with a weight, and an operand of products, with a bias added or a scale perhaps: keys
    and values from one matrix, of which each head reads its own."""
    assert v.expr is not None
    if not reductions(v.expr) or not has_weight(program, v):
        return False
    stack, seen = [v.name], {v.name}
    while stack:
        name = stack.pop()
        for u in (program.by_name[user] for user in program.users[name] if user in members - seen):
            assert u.expr is not None
            found = reductions(u.expr)
            if any(n.source == name and not any(r.axis in free_axes(n) for r in found) for n in loads(u.expr)):
                if found:
                    return False
                seen.add(u.name)
                stack.append(u.name)
    return True


def _going_on(program: Program, added: set[str], longer: set[str], loops: Mapping[str, frozenset[Axis]]) -> set[str]:
    """Those of `added` that PyTorch had better go on with where it makes `longer`: what a loop takes, and is no larger
    (a norm's weights); and what nothing but these needed.
    """
    gone: set[str] = set()
    for v in program.values:
        if v.name in added and loops.get(v.name) and v.expr is not None and not reductions(v.expr):
            read = [program.by_name[r] for r in v.reads if r in longer | gone]
            if any(v.numel <= r.numel for r in read):
                gone.add(v.name)
    for v in reversed(program.values):
        if v.name in added and gone.issuperset(u := program.users[v.name]) and u:
            gone.add(v.name)
    return gone


def _is_rounding(e: Expr) -> bool:
    """Whether `e` is a load, in fewer bits."""
    if not isinstance(e, Op) or e.name != "cast" or not isinstance(e.args[0], Load):
        return False
    return is_float(e.dtype) and is_float(e.args[0].dtype)


def _takes_longer(program: Program, v: Value, made: Callable[[], set[str]], tiles: int, loop: frozenset[Axis]) -> bool:
    """Whether so many tiles of rows, which each compute `v` in their loop, take longer than PyTorch does once.

    Rotated keys, say. Factors alone leave a product of matrices, but for one that is loaded as it is: what scales keys
    scales scores then, and each thread computes it for all columns of its scores.

    Args:
      made: what PyTorch has a kernel for that could go on with `v`.
      loop: the axes that a loop takes.
    """
    assert v.expr is not None
    own = _factors(v.expr)
    wide = [f for f in own if not _is_narrow(f, v)]
    if all(isinstance(f, Load) for f in wide) and len(wide) <= 1:
        scales = [f for f in own if f not in wide and free_axes(f) & loop]
        each = ((math.prod(a.extent for a in free_axes(f)), 1 + _issued(program, f) / SHARED_BY) for f in scales)
        work = sum(columns * ROWS * cost for columns, cost in each)
    else:
        work = v.numel * (_cost(v.expr) + THROUGH_REGISTERS)
    longer = tiles * work / (ISSUED * HOPPER.processors) - 2 * v.numel * itemsize(v.dtype) / MOVED
    return longer > WORTH and (longer > LAUNCH or not made().isdisjoint(v.reads))


def _computed(v: Value, readers: list[Value], sides: AllSides, computed: Mapping[str, int]) -> int:
    """Elements of `v` that a kernel computes: anew along each axis that a reader, which reduces nothing, has ahead of
    its own, columns left out (a program has all of them).

    Args:
      computed: the same of values behind `v`; what is not in it is computed once.
    """
    found = 0
    for reader in readers:
        assert reader.expr is not None
        repeated = computed.get(reader.name, reader.numel) // reader.numel
        columns = {a for _, cols in sides.get(reader.name, ()) for a in cols}
        for own in (free_axes(n) for n in loads(reader.expr) if n.source == v.name):
            last = max((n for n, a in enumerate(reader.axes) if a in own), default=0)
            every = own if reductions(reader.expr) else own | ({*reader.axes[:last]} - columns)
            found = max(found, repeated * math.prod(a.extent for a in every))
    return found


def _is_made_over(program: Program, v: Value, computed: int) -> bool:
    """Whether kernels would take longer to compute so many elements than PyTorch each once: the sines of a rotation,
    which all heads share."""
    assert v.expr is not None
    if reductions(v.expr) or computed <= v.numel:
        return False
    more = (computed - v.numel) * _issued(program, v.expr) / (ISSUED * HOPPER.processors)
    return more > LAUNCH + 2 * v.numel * itemsize(v.dtype) / MOVED


def _issued(program: Program, e: Expr) -> int:
    """Instructions for one element, of what is no reduction, and of what is computed for it, each once."""
    issued, behind, seen = 0, [e], {e}
    while behind:
        made = behind.pop()
        issued += _own_issued(made)
        for source in (program.by_name[n.source].expr for n in loads(made)):
            if source is None or reductions(source):
                issued += 1
            elif source not in seen:
                seen.add(source)
                behind.append(source)
    return issued


@remembered
def _own_issued(e: Expr) -> int:
    """The same of `e` alone: an instruction of the unit of exponentials counts for its share."""
    ops = [n for n in walk(e) if isinstance(n, Op) and is_float(n.dtype)]
    return sum(CALLED if n.name in _CALLS else ISSUED // POWERS if n.name in (*COSTLY, *_ROOTS) else 1 for n in ops)


def _made(program: Program, members: set[str]) -> set[str]:
    """What PyTorch makes, or makes of something, in a kernel of its own, which can go on with it."""
    made: set[str] = set()
    for v in program.values:
        if v.expr is None or v.projection or v.name in members:
            continue
        found = reductions(v.expr)
        own = bool(found) or _cost(v.expr) > MAX_COLUMN_OPS
        if all(len(loads(r.body)) == 1 for r in found) if own else not made.isdisjoint(v.reads):
            made.add(v.name)
    return made


def _is_costly_side(program: Program, v: Value) -> bool:
    """Whether `v` is a side of products in 16 bits that takes costly operations, which one kernel stores for another
    (tabulate)."""
    around = [v, *(program.by_name[r] for r in v.reads)]
    nodes = (n for u in around if u.expr is not None and not reductions(u.expr) for n in walk(u.expr))
    return itemsize(v.dtype) == 2 and any(isinstance(n, Op) and n.name in COSTLY for n in nodes)


def _factors(e: Expr) -> list[Expr]:
    """The factors of products and quotients, but for signs."""
    if isinstance(e, Op) and e.name in ("mul", "div", "neg"):
        return [f for a in e.args for f in _factors(a)]
    return [e]


def _is_narrow(e: Expr, v: Value) -> bool:
    """Whether `e` is the same along an axis of `v`: a scale of rows, or of features."""
    return any(a.extent > 1 and a not in free_axes(e) for a in v.axes)


def is_rounded(program: Program, v: Value, readers: set[str]) -> bool:
    """Whether `readers` take `v` in 16 bits."""
    found = (program.by_name[u] for u in program.users[v.name] if u in readers)
    return is_float(v.dtype) and any(itemsize(t.dtype) == 2 and is_float(t.dtype) for u in found for t in (v, u))


def _is_summed_up(program: Program, v: Value, members: set[str]) -> bool:
    """Whether PyTorch makes `v` in 16 bits, and reduces it to something that members read."""
    if itemsize(v.dtype) != 2 or not is_float(v.dtype):
        return False
    users = (program.by_name[u] for u in program.users[v.name] if u not in members)
    sums = {u.name for u in users if u.expr is not None and reductions(u.expr) and u.numel < v.numel}
    return bool(sums) and depends(program, members, sums)


def _choosing(program: Program, members: set[str]) -> set[str]:
    """The floats from which PyTorch finds, by operations that kernels know nothing of, what a region reads: the k-th
    largest, say."""
    found: set[str] = set()
    read: set[str] = {r for m in members for r in program.by_name[m].reads} - members
    for v in reversed(program.values):
        if v.name in found or (v.name in read and v.expr is None):
            found.update(v.reads)
        if v.name in read:
            read.update(v.reads)
    return {name for name in found if is_float(program.by_name[name].dtype)}


def _is_distance(program: Program, v: Value) -> bool:
    """Whether `v` is a table of two positions or more, and made of nothing else."""
    return sum(a.extent > 1 for a in v.axes) > 1 and is_of_positions(program, v)


def _read_across(v: Value, readers: list[Value]) -> bool:
    """Whether a reader's reduction runs over several axes of `v` at once: its tiles would not be contiguous. (Those of
    what lies in pages, found by a table, are no further apart than pages.)"""
    assert v.expr is not None
    return not any(map(_is_gather, loads(v.expr))) and any(
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
                apart = len(along_rows | along_cols) > 1 or divides(node)
                large &= bool(along_rows and along_cols) and apart
                rows |= along_rows
                cols |= along_cols
            two_sided |= large
    return frozenset(rows), frozenset(cols), two_sided


def _summed(v: Value, readers: list[Value], loops: dict[str, frozenset[Axis]]) -> frozenset[Axis]:
    """Axes of `v` that readers sum over (those of their loops, or of features), or others that read these.

    Args:
      loops: such axes of values before `v`.
    """
    found: set[Axis] = set()
    for reader in readers:
        assert reader.expr is not None
        reduced = frozenset(r.axis for r in reductions(reader.expr)) | loops.get(reader.name, frozenset())
        for node in (n for n in loads(reader.expr) if n.source == v.name):
            found |= {a for a, i in zip(v.axes, node.index, strict=True) if free_axes(i) & reduced}
    return frozenset(found)


_ROOTS = ("sqrt", "rsqrt", "div")
_CALLS = ("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "pow")
_COSTS = {
    "select": 4, "exp": 2, "log": 2, "tanh": 4, "sigmoid": 3, "sin": 4, "cos": 4, "tan": 4, "asin": 4,
    "acos": 4, "atan": 4, "atan2": 4, "pow": 4, "erf": 4, "uniform": 20,
}  # fmt: skip


def _cost(e: Expr) -> int:
    """Float operations of one element, a gather counted as two."""
    ops = sum(_COSTS.get(n.name, 1) for n in walk(e) if isinstance(n, Op) and is_float(n.dtype))
    return ops + sum(2 for n in loads(e) if _is_gather(n))
