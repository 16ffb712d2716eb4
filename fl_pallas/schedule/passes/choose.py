"""Choices: which axes are tiled and how wide, warps, stages. Proposed by a model of what must fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Set
from dataclasses import dataclass

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Load, Op, Reduce, Ref, free_axes, index, loads, reductions, walk
from ..inner import (
    Sheared,
    as_product,
    as_sheared,
    as_shifted,
    covering_tile,
    factors,
    is_matrix_product,
    is_product_of_loop,
    is_sequential,
    power_of_two,
)
from ..plan import Accumulator, Anchor, Choices, Loop, Store
from ..remember import remembered
from ..scan import BLOCK, RUNNING, scanned_axes
from ..target import Target

MIN_TILE = 16
# Rows that have nothing in common, and are summed each by itself, are taken several at once where there are so many.
MANY_ROWS = 16384
MAX_FEATURES = 256


@dataclass(frozen=True)
class Roles:
    """Parallel axes by what becomes of them.

    Attributes:
      features: taken whole by each program, for the expensive part of the loop does not depend on them.
      row: the axis that is tiled, because what the loop loads does not depend on it; None if none is.
      batch: taken one index at a time.
      column: the other side of a product with the row, where no loop runs over it; None if there is none.
    """

    features: tuple[Axis, ...]
    row: Axis | None
    batch: tuple[Axis, ...]
    column: Axis | None = None


@remembered
def roles(parallel: tuple[Axis, ...], loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> Roles:
    """Sort the parallel axes of a kernel into features, row and batch."""
    axes = [a for a in parallel if a.extent > 1]
    scanned = set() if loops else scanned_axes([s.expr for s in stores])
    if scanned:
        # Running sums of what is stored, of many rows at once.
        column = max(scanned, key=lambda a: (a.extent, a.name))
        others = [a for a in axes if a != column]
        row = max(others, key=lambda a: (a.extent, axes.index(a)), default=None)
        return Roles((), row, tuple(a for a in others if a != row), column)
    updates = [s.update for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    bodies = updates or [s.expr for s in stores]
    heavy = [n for e in bodies for n in walk(e) if isinstance(n, Reduce) or isinstance(n, Op) and n.name in HEAVY]
    # What is made of one tensor, element by element, is a side of a product: as a gate that goes to its features.
    costly = set().union(*map(free_axes, [n for n in heavy if not _is_of_one(n)] or heavy))
    if not costly:
        costly = set().union(*(free_axes(n) for e in bodies for n in loads(e)[:1]))
    if not loops:
        # Where nothing is computed for several of them at once: as memory lies.
        last = {s.axes[-1] for s in stores if s.axes and s.axes[-1].extent <= MAX_FEATURES}
        plain = not any(isinstance(n, Reduce) for e in bodies for n in walk(e))
        costly -= {a for a in last if plain or all(_runs_along(n, a, costly) for e in bodies for n in loads(e))}
    features = [a for a in axes if a not in costly]
    for store in stores:
        own = [a for a in store.axes if a in features]
        while len(own) > 1 and math.prod(power_of_two(a.extent) for a in own) > MAX_FEATURES:
            features.remove(own.pop(0))
    rest = [a for a in axes if a not in features]
    every = {n for e in bodies for n in loads(e)}
    along = {loop.axis for loop in loops}
    numbers = {n for n in every if is_float(n.dtype)}
    # Labels, where pairs are counted.
    found = numbers if any(not loops or free_axes(n) & along for n in numbers) else every
    inner = [n for n in found if not loops or free_axes(n) & along and not _is_table(n)]

    others = {*rest, *along}

    def elements(n: Load) -> int:
        """Of an index of the loop and of each parallel axis."""
        return math.prod(b.extent for b in free_axes(n) - others)

    def reuse(a: Axis) -> tuple[int, int, int]:
        return sum(elements(n) for n in inner if a not in free_axes(n)), a.extent, axes.index(a)

    row = max(rest, key=reuse, default=None)
    if row is not None and loops and reuse(row)[0] == 0:
        few = math.prod(a.extent for a in rest) < MANY_ROWS
        row = None if few or any(isinstance(n, Reduce) for e in bodies for n in walk(e)) else _innermost(found, rest)
    column = None if loops else _other_side(row, rest, stores)
    return Roles(tuple(features), row, tuple(a for a in rest if a not in (row, column)), column)


def _innermost(found: set[Load], rest: list[Axis]) -> Axis | None:
    """The axis of `rest` along which neighbours of the largest loads lie closest together."""

    def depth(a: Axis) -> tuple[int, int]:
        places = [len(n.index) - n.index.index(index(a)) for n in found if index(a) in n.index]
        return -min(places, default=99), a.extent

    return max(rest, key=depth, default=None)


def _runs_along(n: Load, a: Axis, axes: set[Axis]) -> bool:
    """Whether a load has all of `axes`, and neighbours along `a` lie side by side (a sum of heads' parts)."""
    return axes <= free_axes(n) and n.index[-1] is index(a)


def _is_table(n: Load) -> bool:
    """Whether a load is of a place that is computed, by more than views compute, from several axes: of no side of a
    product."""
    return any(
        len(free_axes(i)) > 1 and any(isinstance(m, Op) and m.name not in _VIEW for m in walk(i)) for i in n.index
    )


_VIEW = ("add", "sub", "mul", "neg", "floordiv", "mod")
HEAVY = ("exp", "tanh", "sigmoid", "log", "select")


def _is_of_one(e: Expr) -> bool:
    """Whether an expression has no sums, no references, and no axis that one of its loads has not."""
    nodes = list(walk(e))
    if any(isinstance(n, Reduce | Ref) for n in nodes):
        return False
    return any(free_axes(e) <= free_axes(n) for n in nodes if isinstance(n, Load) and is_float(n.dtype))


def _other_side(row: Axis | None, rest: list[Axis], stores: tuple[Store, ...]) -> Axis | None:
    """The axis of `rest` that the products with `row` have on their other side."""
    products = [n for s in stores for n in walk(s.expr) if isinstance(n, Reduce) and n.kind == "sum"]
    found: set[Axis] = set()
    for r in products:
        sides = [free_axes(f) for f in factors(r.body) if r.axis in free_axes(f)]
        if any(row in s for s in sides):
            found |= {a for a in rest if any(a in s for s in sides) and not any({a, row} <= s for s in sides)}
    return max(found, key=lambda a: (a.extent, a.name), default=None)


def width(n: Load) -> int:
    """Dimensions of a load that are more than one index."""
    return sum(1 for i in n.index if free_axes(i))


# (row, column, warps, stages), best first, as measured on an H200 by benchmarks/probe_tiles.py.
PREFERRED = (
    (64, 64, 4, 3),
    (128, 64, 8, 3),
    (64, 64, 4, 2),
    (256, 64, 8, 3),
    (128, 64, 4, 2),
    (128, 128, 8, 3),
    (64, 128, 4, 2),
    (128, 64, 4, 3),
    (64, 32, 4, 3),
    (128, 32, 4, 3),
    (64, 64, 8, 2),
    (64, 32, 8, 3),
    (32, 64, 4, 3),
    (32, 32, 4, 3),
    (32, 32, 8, 3),
    (16, 64, 4, 3),
    (16, 32, 4, 3),
    (16, 16, 4, 3),
    (16, 16, 8, 3),
)
# For float32, whose operands are twice as wide, and for sums that are shifted.
NARROW = (
    (64, 32, 4, 2),
    (64, 32, 8, 2),
    (32, 32, 4, 2),
    (32, 32, 8, 2),
    (16, 32, 4, 2),
    (16, 16, 4, 2),
    (16, 16, 8, 2),
)
# For several loops, one after another.
SEVERAL = ((64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), *NARROW)


# (row, other, loop, warps), for sums of elements that a thread takes by itself: by what is compiled of them.
BY_THREAD = ((32, 64, 4, 4), (64, 64, 4, 8), (16, 64, 8, 4), (32, 32, 8, 4))


# Elements of a tile that gives its warps enough to do; what is so many times smaller is small; and there are programs
# to spare if each processor has so many.
FULL, SMALL, FEW = 8192, 4, 16
# How far over the registers the model may find a choice that is still compiled, to see whether it fits.
SLACK = 1.1
# The same, where nothing fits four warps: the narrowest tiles of those, of three dimensions, take half of the time of
# eight warps if they fit after all.
TIGHT = 1.6


def choose(
    kinds: Roles,
    loops: tuple[Loop, ...],
    stores: tuple[Store, ...],
    bytes_: int,
    target: Target,
    scanned: Set[Axis] = frozenset(),
) -> tuple[Choices, ...]:
    """Tile sides, warps and stages worth trying for a kernel, best first.

    The model leaves out what cannot fit the registers; what nearly does is for the compiler to say (kernels/fit.py).

    Args:
      kinds: the parallel axes by role.
      bytes_: size of the widest multiplied element.
      target: the device to fit.
      scanned: axes along which running sums go, of which a tile has whole blocks.
    """

    # Wide features are better halved than the tile of rows, although each half computes the weights again.
    halved = _with_features(kinds, stores, MAX_FEATURES // 2) if _can_halve(stores) else None
    whole = _with_features(kinds, stores, MAX_FEATURES)
    sides = [halved, whole] if halved is not None and halved != whole else [whole]
    # In turn, for tuning tries the first few.
    ways = itertools.zip_longest(*(_fitting(fixed, kinds, loops, stores, bytes_, target, scanned) for fixed in sides))
    found: list[Choices] = []
    for c in (c for way in ways for c in way if c is not None):
        for wider in _widened(c, kinds, loops, stores, target, bool(scanned)):
            if pressure(wider, kinds, loops, stores, bytes_, target) <= SLACK:
                found.append(wider)
        found.append(c)
    return tuple(dict.fromkeys((*([] if scanned else _by_thread(kinds, loops)), *found)))


def _by_thread(kinds: Roles, loops: tuple[Loop, ...]) -> list[Choices]:
    """Choices for a loop that sums elements of two parallel axes and its own, and multiplies no matrices (gradients of
    additive scores): a tile has both, so that what lacks one of them is loaded once for many, and few indices of the
    loop, so that a thread has a sum of its own.
    """
    if len(loops) != 1 or kinds.row is None or len(kinds.features) > 1:
        return []
    (loop,) = loops
    updates = [s.update for s in loop.steps if isinstance(s, Accumulator) and not reductions(s.update)]
    if len(updates) < len(loop.steps) or loop.axis.extent < MIN_TILE or kinds.row.extent < MIN_TILE:
        return []
    wide = {kinds.row, loop.axis}
    others = [a for a in kinds.features or kinds.batch if all(wide | {a} <= free_axes(e) for e in updates)]
    # Neighbours lie side by side in memory.
    last = {n.index[-1] for e in updates for n in loads(e) if n.index}
    along = [a for a in others if a.extent >= MIN_TILE and index(a) in last]
    if not along or any(is_product_of_loop(e, loop.axis, frozenset(wide | {along[-1]})) for e in updates):
        return []
    fixed: dict[Axis, int] = {a: 1 for a in kinds.batch}
    ways = []
    for row, other, step, warps in BY_THREAD:
        sides = {along[-1]: min(other, power_of_two(along[-1].extent)), kinds.row: row, loop.axis: step}
        ways.append(Choices(tuple((fixed | sides).items()), warps, 1))
    return ways


def _widened(
    c: Choices, kinds: Roles, loops: tuple[Loop, ...], stores: tuple[Store, ...], target: Target, scanned: bool
) -> list[Choices]:
    """`c` with several indices of a batch axis in a tile, where programs are many and each has little to do (heads that
    are mixed, for one row of queries at a time); none if no axis allows it.

    One that does goes with another along one side of a product, and is in no other sums but a loop's. Running sums take
    registers that no model knows, so that half as many may be more.
    """
    tiles, tiled = dict(c.tiles), frozenset(a for a, n in c.tiles if n > 1)
    updates = [(s.update, loop.axis) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    exprs = [*(s.expr for s in stores), *(e for e, _ in updates)]
    programs = math.prod(-(-a.extent // n) for a, n in c.tiles if all(a != loop.axis for loop in loops))
    room = min(FULL // max(_largest(e, tiles, tiled) for e in exprs), int(programs / (FEW * target.processors)))
    sums = {n for e in exprs for n in walk(e) if isinstance(n, Reduce)}
    products = any(is_product_of_loop(e, axis, tiled) for e, axis in updates)

    def allows(a: Axis) -> bool:
        if not sums and not products:
            return True
        own = [as_product(r.body, r.axis, tiled | {a, r.axis}) for r in sums if a in free_axes(r.body)]
        sides = [side for p in own if p for side in (p.left, p.right) if any(a in free_axes(f) for f in side)]
        # By itself it may be too narrow for a side.
        shared = (any(free_axes(f) & tiled & {*tiles} for f in side) for side in sides)
        return bool(own) and None not in own and all(shared)

    ways = [a for a in kinds.batch if a.extent > 1 and allows(a)] if room >= SMALL else []
    if not ways:
        return []
    widest = max(ways, key=lambda a: (a.extent, a.name))
    side = min(1 << (room.bit_length() - 1), power_of_two(widest.extent))
    sides = (side, side // 2) if scanned and side > 2 else (side,)
    return [Choices(tuple((a, s if a == widest else n) for a, n in c.tiles), c.warps, c.stages) for s in sides]


def _can_halve(stores: tuple[Store, ...]) -> bool:
    """Whether no output needs all features of a row at once."""
    return not any(isinstance(n, Reduce) for s in stores for n in walk(s.expr))


def _with_features(kinds: Roles, stores: tuple[Store, ...], most: int) -> dict[Axis, int]:
    """Tiles of the batch axes, and of the features: at most so many along each."""
    fixed: dict[Axis, int] = {a: 1 for a in kinds.batch}
    for a in kinds.features:
        fixed[a] = min(power_of_two(a.extent), most)
    for store in stores:
        own = [a for a in store.axes if a in kinds.features]
        if own:
            # Together they are a side of a matrix product.
            others = math.prod(fixed[a] for a in own[:-1])
            fixed[own[-1]] = max(fixed[own[-1]], MIN_TILE // others)
    return fixed


def _fitting(
    fixed: dict[Axis, int],
    kinds: Roles,
    loops: tuple[Loop, ...],
    stores: tuple[Store, ...],
    bytes_: int,
    target: Target,
    scanned: Set[Axis],
) -> list[Choices]:
    """The choices of rows, columns, warps and stages that may fit with these tiles of the other axes."""
    narrow = bytes_ > 2 or _is_intricate(loops)
    fitting, too_wide, tight = [], [], []
    for row, column, warps, stages in NARROW if narrow else SEVERAL if len(loops) > 1 else PREFERRED:
        tiles = dict(fixed)
        if kinds.row is not None:
            tiles[kinds.row] = min(row, max(MIN_TILE, power_of_two(kinds.row.extent)))
        if kinds.column is not None:
            tiles[kinds.column] = min(column, max(MIN_TILE, power_of_two(kinds.column.extent)))
        for loop in loops:
            tiles[loop.axis] = min(column, max(MIN_TILE, power_of_two(loop.axis.extent)))
        for a in scanned & tiles.keys():
            tiles[a] = max(tiles[a], min(BLOCK, power_of_two(a.extent)))
        choices = Choices(tuple(tiles.items()), warps, stages)
        wanted = pressure(choices, kinds, loops, stores, bytes_, target)
        (fitting if wanted <= SLACK else too_wide).append(choices)
        if SLACK < wanted <= TIGHT and warps == 4:
            tight.append(choices)
    if fitting and all(c.warps > 4 for c in fitting):
        fitting = [*tight[-1:], *fitting]
    return _busier(list(dict.fromkeys(fitting or too_wide[-1:])), {loop.axis for loop in loops}, target)


def _is_intricate(loops: tuple[Loop, ...]) -> bool:
    """Whether corrections of shifted sums take registers beside those of their values."""
    return any(isinstance(s, Anchor) for loop in loops for s in loop.steps)


def pressure(
    choices: Choices, kinds: Roles, loops: tuple[Loop, ...], stores: tuple[Store, ...], bytes_: int, target: Target
) -> float:
    """The registers that a kernel wants under these choices, over those that its threads have."""
    # float32 operands are split in two and multiplied three times.
    weight = 2.5 if bytes_ > 2 or _is_intricate(loops) else 1
    wanted = weight * _registers(dict(choices.tiles), loops, stores, frozenset(kinds.features))
    return wanted / (target.registers * 32 * choices.warps)


def _busier(ways: list[Choices], streamed: set[Axis], target: Target) -> list[Choices]:
    """The pick; if it leaves half of the processors idle, those of more programs next, for tuning tries few."""

    def programs(c: Choices) -> int:
        return math.prod(-(-a.extent // n) for a, n in c.tiles if a not in streamed)

    pick, *others = ways
    if 2 * programs(pick) >= target.processors:
        return ways
    return [pick, *sorted(others, key=lambda c: programs(c) <= programs(pick))]


def _registers(
    tiles: dict[Axis, int], loops: tuple[Loop, ...], stores: tuple[Store, ...], features: frozenset[Axis]
) -> int:
    """32-bit registers of a program: what loops carry, and what is alive in the body of one."""
    tiled = frozenset(a for a, n in tiles.items() if n > 1)
    held = sum(_size(frozenset(s.axes), tiles) for loop in loops for s in loop.steps)
    body = max((_live(loop, tiles, tiled, features) for loop in loops), default=0)
    if len(loops) == 1:
        body = max(body, _products(loops[0], tiles, tiled))
    final = max((_largest(s.expr, tiles, tiled) for s in stores), default=0)
    if loops:
        final = max(final, held + max((_loaded_last(s.expr, tiles, features) for s in stores), default=0))
    return max(held + body, final)


def _loaded_last(e: Expr, tiles: dict[Axis, int], features: frozenset[Axis]) -> int:
    """Registers of the tiles of rows by features that an output takes from memory: as they come, and in the layout of
    what the loop has summed.
    """
    wide = [n for n in loads(e) if is_float(n.dtype) and free_axes(n) & features]
    return sum(math.ceil(_size(free_axes(n), tiles) * (1 + itemsize(n.dtype) / 4)) for n in wide)


def _live(loop: Loop, tiles: dict[Axis, int], tiled: frozenset[Axis], features: frozenset[Axis]) -> int:
    """The widest tile of a loop's body, times what is alive of its size at once.

    Matrices that are only multiplied, along features, lie in shared memory.
    """
    updates = [s.update for s in loop.steps if isinstance(s, Accumulator)]
    widest = max(_largest(e, tiles, tiled) for e in updates)
    nodes = {n for e in updates for n in walk(e)}
    references = sum(isinstance(s, Accumulator) and s.kind == "max" for s in loop.steps)
    costly = any(isinstance(n, Op) and n.name in COSTLY and loop.axis in free_axes(n) for n in nodes)
    sequential = any(isinstance(n, Reduce) and is_sequential(n, tiled | {n.axis}) for n in nodes)
    return widest * (max(1, references) + costly + sequential) + sum(
        _loaded(n, tiles) for n in nodes if isinstance(n, Load) and not free_axes(n) & features
    )


def _products(loop: Loop, tiles: dict[Axis, int], tiled: frozenset[Axis]) -> int:
    """The products that a loop's body makes, and a tile more."""
    nodes = {n for s in loop.steps if isinstance(s, Accumulator) for n in walk(s.update) if isinstance(n, Reduce)}
    # One at a time, where a sum goes through them one by one (heads that are mixed).
    tiles = {**tiles, **{n.axis: 1 for n in nodes if is_sequential(n, tiled | {n.axis})}}
    made = [
        _size(free_axes(n), tiles)
        for n in nodes
        if loop.axis in free_axes(n) and is_matrix_product(n.body, n.axis, tiled | {n.axis})
    ]
    return sum(made) + max(made, default=0)


# Operations that take a dozen instructions, and registers for them.
COSTLY = (
    "exp", "tanh", "sigmoid", "log", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "pow", "erf", "log1p",
    "expm1", *RUNNING,
)  # fmt: skip


def _loaded(n: Load, tiles: dict[Axis, int]) -> int:
    """Registers of a load of a row-by-column tile; a gathered one keeps its addresses too."""
    wide = [a for a in free_axes(n) if tiles.get(a, 1) > 1]
    if len(wide) < 2:
        return 0
    gathered = any(loads(i) for i in n.index)
    return _size(frozenset(wide), tiles) * (2 if gathered else 1)


@dataclass(frozen=True)
class _Tiles:
    """The tiles that an expression is evaluated by, whatever the sides of those.

    Attributes:
      sequential: axes that are taken one index at a time.
      over: the axes of each tile.
      shifted: a product whose rows move to their places, if the expression is one.
      sheared: products by position inside reductions.
    """

    sequential: tuple[Axis, ...]
    over: tuple[frozenset[Axis], ...]
    shifted: Sheared | None
    sheared: tuple[Sheared, ...]


def _largest(e: Expr, tiles: dict[Axis, int], tiled: frozenset[Axis]) -> int:
    """Elements of the largest tile needed to evaluate `e`."""
    of = _tiles_of(e, tiled)
    tiles = {**tiles, **dict.fromkeys(of.sequential, 1)}
    sizes = [_size(axes, tiles) for axes in of.over]
    sides = ([tiles.get(a, covering_tile(a)) for a in (s.kept, s.gone)] for s in of.sheared)
    sizes += [kept * s.width(kept, gone) for s, (kept, gone) in zip(of.sheared, sides, strict=True)]
    if of.shifted is not None:
        # In its place, and in 16 bits.
        kept, gone = (tiles.get(a, covering_tile(a)) for a in (of.shifted.kept, of.shifted.gone))
        sizes.append(kept * of.shifted.width(kept, gone) // 2)
    return max(sizes, default=0)


@remembered
def _tiles_of(e: Expr, tiled: frozenset[Axis]) -> _Tiles:
    """What is asked for each choice of sides; the factors of a product are never multiplied out."""
    over, sides = [free_axes(e)], factors(e)
    shifted = None
    if isinstance(e, Op) and any(as_product(e, axis, tiled) is not None for axis in free_axes(e)):
        over = []
    elif isinstance(e, Op) and (shifted := next((s for a in free_axes(e) if (s := as_shifted(e, a, tiled))), None)):
        over, sides = [], [*shifted.product.left]
    inside = reductions(e)
    over += [free_axes(f) for f in (*sides, *inside)]
    sheared = []
    for r in inside:
        own = tiled | {r.axis}
        if (product := as_sheared(r.body, r.axis, own)) is not None:
            sheared.append(product)
        elif as_product(r.body, r.axis, own) is None and not is_sequential(r, tiled - {r.axis}):
            over.append(free_axes(r.body))
    sequential = tuple(r.axis for r in inside if is_sequential(r, tiled))
    return _Tiles(sequential, tuple(dict.fromkeys(over)), shifted, tuple(sheared))


def _size(axes: frozenset[Axis], tiles: dict[Axis, int]) -> int:
    return math.prod(tiles.get(a, covering_tile(a)) for a in axes)


def product_bytes(kinds: Roles, loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> int:
    """Size of an element of the widest matrix that is multiplied, bytes; of what is loaded, if none is."""
    sides = [a for a in (kinds.row, kinds.column) if a is not None]
    tiled = frozenset((*kinds.features, *sides, *(loop.axis for loop in loops)))
    sums = [(s, loop.axis) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    exprs = [*(s.expr for s in stores), *(s.update for s, _ in sums)]
    found = [s.dtype for s, axis in sums if s.kind == "sum" and is_product_of_loop(s.update, axis, tiled)]
    for r in {n for e in exprs for n in walk(e) if isinstance(n, Reduce) and n.kind == "sum"}:
        if is_matrix_product(r.body, r.axis, tiled | {r.axis}):
            found.append(r.dtype)
    loaded = [n.dtype for e in exprs for n in loads(e) if is_float(n.dtype)]
    return max(map(itemsize, found or loaded), default=4)
