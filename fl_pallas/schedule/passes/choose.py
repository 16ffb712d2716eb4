"""Choices: how wide the tiled axes are, warps, stages. Proposed by a model of what must fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Set

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Reduce, free_axes, index, loads, reductions, walk
from ..inner import (
    MAX_WHOLE,
    PARTS_BYTES,
    as_product,
    as_sheared,
    as_shifted,
    is_matrix_product,
    is_product_of_loop,
    is_sequential,
    multiplied_in,
    power_of_two,
)
from ..plan import Accumulator, Choices, Loop, Store, stored_in
from ..scan import BLOCK
from ..target import Target
from .in_parts import are_in_parts
from .registers import is_intricate, largest_tile, pressure
from .roles import MAX_FEATURES, Roles, is_of_computed_rows
from .shared import shared, with_windows

MIN_TILE, WARP = 16, 32


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
# For float32 in parts, and where none of these fit (by both passes of 2048 queries and keys, on an H200).
IN_PARTS = ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 16, 4, 2))
# For kernels that store in a loop, and have one side of its pairs whole. (90 keys of 64 features: four warps take 113
# us, eight 175.)
WHOLE = ((64, 64, 4, 3), (128, 32, 4, 3), *PREFERRED, (128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2))
# For several loops, one after another.
SEVERAL = ((64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), *NARROW)
# (row, other, loop, warps), for sums of elements that a thread takes by itself: by what is compiled of them.
BY_THREAD = ((32, 64, 4, 4), (64, 64, 4, 8), (16, 64, 8, 4), (32, 32, 8, 4))
# (row, loop), for sums of rows that a thread takes by itself.
ROWS_BY_THREAD = ((128, 8), (256, 8), (128, 4), (64, 8))
# Elements of a tile that gives its warps enough to do; what is so many times smaller is small; and there are programs
# to spare if each processor has so many.
FULL, SMALL, FEW = 8192, 4, 16
# How far over the registers, or shared memory, the model may find a choice that is still compiled, to see whether it
# fits.
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
    """Tile sides, warps and stages worth trying for a kernel, best first; none where one that stores in loops spills.

    Models leave out what cannot fit registers and shared memory; what nearly does is for the compiler to say
    (kernels/fit.py).

    Args:
      kinds: the parallel axes by role.
      bytes_: size of the widest multiplied element.
      target: the device to fit.
      scanned: axes along which running sums go, of which a tile has whole blocks.
    """

    # Wide features are better halved than the tile of rows, although each half computes the weights again.
    halved = _with_features(kinds, loops, stores, MAX_FEATURES // 2) if _can_halve(stores) else None
    whole = _with_features(kinds, loops, stores, MAX_FEATURES)
    sides = [halved, whole] if halved is not None and halved != whole else [whole]
    # In turn, for tuning tries the first few.
    ways = itertools.zip_longest(*(_fitting(fixed, kinds, loops, stores, bytes_, target, scanned) for fixed in sides))
    found: list[Choices] = []
    for c in (c for way in ways for c in way if c is not None):
        for wider in _widened(c, kinds, loops, stores, target, bool(scanned)):
            if pressure(wider, kinds, loops, stores, bytes_, target) <= SLACK:
                found.append(wider)
        found.append(c)
    own = [] if scanned else _by_thread(kinds, loops) or _rows_by_thread(kinds, loops)
    if found and not loops and not scanned:
        own += _sums_at_once(found[0], stores, target)
    return tuple(dict.fromkeys((*own, *found)))


def _sums_at_once(pick: Choices, stores: tuple[Store, ...], target: Target) -> list[Choices]:
    """A choice for a kernel that only adds up, one index at a time, in fewer programs than there are processors: runs
    of what lies side by side, each sum at once. (512 sums of 256 in one program take 119 us on an H200, where one step
    waits for the last.)"""
    sums = {n for s in stores for n in walk(s.expr) if isinstance(n, Reduce)}
    programs = math.prod(-(-a.extent // n) for a, n in pick.tiles)
    if not pick.tiles or programs >= target.processors or not any(is_sequential(r, pick.tiled) for r in sums):
        return []
    longest = max(power_of_two(r.axis.extent) for r in sums)
    if longest > MAX_WHOLE or any(is_matrix_product(r.body, r.axis, pick.tiled | {r.axis}) for r in sums):
        return []
    last = {n.index[-1] for r in sums for n in loads(r) if n.index}
    along = max((a for a, _ in pick.tiles), key=lambda a: (index(a) in last, a.extent, a.name))
    side = min(power_of_two(along.extent), FULL // longest)
    return [Choices(tuple((a, side if a == along else 1) for a, _ in pick.tiles), pick.warps, pick.stages)]


def _rows_by_thread(kinds: Roles, loops: tuple[Loop, ...]) -> list[Choices]:
    """Choices for a loop that sums elements of rows alone: few indices of it in a tile, so that a thread has the sum of
    a row to itself, and what it loads is the same for all threads."""
    if len(loops) != 1 or kinds.row is None or not is_of_computed_rows(loops[0], kinds):
        return []
    fixed = dict.fromkeys(kinds.batch, 1) | {a: power_of_two(a.extent) for a in kinds.features}
    most = power_of_two(kinds.row.extent)
    ways = ((row, step) for row, step in ROWS_BY_THREAD if row <= most)
    return [
        Choices(tuple((fixed | {kinds.row: row, loops[0].axis: step}).items()), min(4, row // WARP), 1)
        for row, step in ways
    ]


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
    tiles, tiled = dict(c.tiles), c.tiled
    updates = [(s.update, loop.axis) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    exprs = [*(s.expr for s in stores), *(e for e, _ in updates)]
    programs = math.prod(-(-a.extent // n) for a, n in c.tiles if all(a != loop.axis for loop in loops))
    room = min(FULL // max(largest_tile(e, tiles, tiled) for e in exprs), int(programs / (FEW * target.processors)))
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


def _with_features(kinds: Roles, loops: tuple[Loop, ...], stores: tuple[Store, ...], most: int) -> dict[Axis, int]:
    """Tiles of the batch axes, and of the features: at most so many along each."""
    along = [a for a in (kinds.row, kinds.column, *(loop.axis for loop in loops)) if a is not None]
    tiled = frozenset((*kinds.features, *along))
    sums = [(s.update, loop.axis) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    # Of loops that add up elements, features are no side of a product (the coordinates of a point's gradient).
    alone = bool(sums) and not any(is_product_of_loop(e, axis, tiled) or reductions(e) for e, axis in sums)
    fixed: dict[Axis, int] = {a: 1 for a in kinds.batch}
    for a in kinds.features:
        fixed[a] = min(power_of_two(a.extent), most)
    for store in stores:
        own = [a for a in store.axes if a in kinds.features]
        if own and not alone:
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
    inside = any(stored_in(loop, stores) for loop in loops)
    parts = bytes_ == PARTS_BYTES and not is_intricate(loops)
    if parts:
        ways = (*IN_PARTS, *NARROW)
    elif bytes_ > 2 or is_intricate(loops):
        ways = NARROW
    else:
        ways = SEVERAL if len(loops) > 1 else WHOLE if inside else PREFERRED
    fitting, too_wide, tight = [], [], []
    for n, (row, column, warps, stages) in enumerate(ways):
        if parts and n >= len(IN_PARTS) and fitting:
            break
        tiles = dict(fixed)
        if kinds.row is not None:
            tiles[kinds.row] = min(row, max(MIN_TILE, power_of_two(kinds.row.extent)))
        if kinds.column is not None:
            tiles[kinds.column] = min(column, max(MIN_TILE, power_of_two(kinds.column.extent)))
        for loop in loops:
            along = min(column, max(MIN_TILE, power_of_two(loop.axis.extent)))
            tiles[loop.axis] = 1 if kinds.one_by_one else along
        for a in scanned & tiles.keys():
            tiles[a] = max(tiles[a], min(BLOCK, power_of_two(a.extent)))
        choices = Choices(tuple(tiles.items()), warps, stages)
        wanted = pressure(choices, kinds, loops, stores, bytes_, target)
        taken = max(shared(loops, choices) * max(bytes_ / 4, 1), with_windows(loops, choices))
        room = taken <= SLACK * target.shared_bytes
        (fitting if wanted <= SLACK and room else too_wide).append(choices)
        if SLACK < wanted <= TIGHT and warps == 4 and room:
            tight.append(choices)
    if fitting and all(c.warps > 4 for c in fitting):
        fitting = [*tight[-1:], *fitting]
    # Two kernels as one are no gain if they spill.
    last = [] if inside else too_wide[-1:]
    return _busier(
        _together(list(dict.fromkeys(fitting or last)), loops, target), {loop.axis for loop in loops}, target
    )


def _together(ways: list[Choices], loops: tuple[Loop, ...], target: Target) -> list[Choices]:
    """Where products over windows leave a processor's shared memory to one program, and to two if its loops had fewer
    stages, those are the pick: a program waits for its windows. (A Conformer's scores, 8 × 4 × 1024²: 56 us on an H100,
    with a stage more 82; the gradients, of which a processor has one program either way, take 1.07 to 1.25 times as
    long with a stage less.)"""
    if not ways or not with_windows(loops, ways[0]):
        return ways
    pick = ways[0]

    def has_room(c: Choices) -> bool:
        return 2 * with_windows(loops, c) <= target.shared_bytes

    fewer = [c for c in ways if (c.tiles, c.warps) == (pick.tiles, pick.warps) and c.stages < pick.stages]
    better = [c for c in fewer if has_room(c)] if not has_room(pick) else []
    return [*better, *(c for c in ways if c not in better)]


def _busier(ways: list[Choices], streamed: set[Axis], target: Target) -> list[Choices]:
    """The pick; if it leaves half of the processors idle, those of more programs next, for tuning tries few."""

    def programs(c: Choices) -> int:
        return math.prod(-(-a.extent // n) for a, n in c.tiles if a not in streamed)

    if not ways:
        return []
    pick, *others = ways
    if 2 * programs(pick) >= target.processors:
        return ways
    return [pick, *sorted(others, key=lambda c: programs(c) <= programs(pick))]


def product_bytes(kinds: Roles, loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> int:
    """Size of an element of the widest matrix that is multiplied, bytes, with all of its parts; of what is loaded, if
    none is."""
    sides = [a for a in (kinds.row, kinds.column) if a is not None]
    tiled = frozenset((*kinds.features, *sides, *(loop.axis for loop in loops)))
    sums = [(s, loop.axis) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    exprs = [*(s.expr for s in stores), *(s.update for s, _ in sums)]
    found = [_multiplied(s.update, axis, tiled, s.dtype) for s, axis in sums if s.kind == "sum"]
    for r in {n for e in exprs for n in walk(e) if isinstance(n, Reduce) and n.kind == "sum"}:
        found.append(_multiplied(r.body, r.axis, tiled | {r.axis}, r.dtype))
    found = [dtype for dtype in found if dtype]
    loaded = [n.dtype for e in exprs for n in loads(e) if is_float(n.dtype)]
    widest = max(map(itemsize, found or loaded), default=4)
    if found and widest == 4 and are_in_parts(loops, tiled, sides, kinds.batch):
        return PARTS_BYTES
    return widest


def _multiplied(body: Expr, axis: Axis, tiled: frozenset[Axis], dtype: str) -> str:
    """The type in which the matrix units multiply the sides of a sum of type `dtype`; "" if they do not take it."""
    p = as_product(body, axis, tiled)
    if p is None:
        sheared = as_sheared(body, axis, tiled)
        p = None if sheared is None else sheared.product
    if p is None:
        return dtype if as_shifted(body, axis, tiled) is not None else ""
    return min(multiplied_in(p, dtype), key=itemsize)
