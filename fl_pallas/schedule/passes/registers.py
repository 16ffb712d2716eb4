"""Registers: what a kernel wants of them under its choices, by a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Load, Op, Reduce, free_axes, loads, reductions, walk
from ..inner import (
    PARTS_BYTES,
    Sheared,
    as_product,
    as_sheared,
    as_shifted,
    covering_tile,
    factors,
    is_matrix_product,
    is_product_of_loop,
    is_sequential,
)
from ..plan import Accumulator, Anchor, Choices, Loop, Store, evaluated_in, stored_in, stored_last
from ..remember import remembered
from ..scan import RUNNING
from ..target import Target
from .roles import Roles


def is_intricate(loops: tuple[Loop, ...]) -> bool:
    """Whether corrections of shifted sums take registers beside those of their values."""
    return any(isinstance(s, Anchor) for loop in loops for s in loop.steps)


def pressure(
    choices: Choices, kinds: Roles, loops: tuple[Loop, ...], stores: tuple[Store, ...], bytes_: int, target: Target
) -> float:
    """The registers that a kernel wants under these choices, over those that its threads have."""
    # float32 operands are split in two, and multiplied three times; what they lie in memory as is not, but weights are.
    parts = bytes_ == PARTS_BYTES and not is_intricate(loops)
    weight = 1.5 if parts else 2.5 if bytes_ > 2 or is_intricate(loops) else 1
    wanted = weight * _registers(dict(choices.tiles), loops, stores, frozenset(kinds.features))
    return wanted / (target.registers * 32 * choices.warps)


def _registers(
    tiles: dict[Axis, int], loops: tuple[Loop, ...], stores: tuple[Store, ...], features: frozenset[Axis]
) -> int:
    """32-bit registers of a program: what loops carry, and what is alive in the body of one."""
    tiled = frozenset(a for a, n in tiles.items() if n > 1)
    held = sum(_size(frozenset(s.axes), tiles) for loop in loops for s in loop.steps)
    body = max((_live(loop, stores, tiles, tiled, features) for loop in loops), default=0)
    if len(loops) == 1:
        body = max(body, _products(loops[0], stores, tiles, tiled))
    stores = stored_last(loops, stores)
    final = max((largest_tile(s.expr, tiles, tiled) for s in stores), default=0)
    if loops:
        final = max(final, held + max((_loaded_last(s.expr, tiles, features) for s in stores), default=0))
    return max(held + body, final)


def _loaded_last(e: Expr, tiles: dict[Axis, int], features: frozenset[Axis]) -> int:
    """Registers of the tiles of rows by features that an output takes from memory: as they come, and in the layout of
    what the loop has summed.
    """
    wide = [n for n in loads(e) if is_float(n.dtype) and free_axes(n) & features]
    return sum(math.ceil(_size(free_axes(n), tiles) * (1 + itemsize(n.dtype) / 4)) for n in wide)


def _live(
    loop: Loop,
    stores: tuple[Store, ...],
    tiles: dict[Axis, int],
    tiled: frozenset[Axis],
    features: frozenset[Axis],
) -> int:
    """The widest tile of a loop's body, times what is alive of its size at once.

    Matrices that are only multiplied, along features, lie in shared memory.
    """
    widest = max(largest_tile(e, tiles, tiled) for e in evaluated_in(loop, stores))
    times, loaded = _alive(loop, stored_in(loop, stores), tiled, features)
    return widest * times + sum(_loaded(n, tiles) for n in loaded)


@remembered
def _alive(
    loop: Loop, stores: tuple[Store, ...], tiled: frozenset[Axis], features: frozenset[Axis]
) -> tuple[int, tuple[Load, ...]]:
    """How many of the widest tiles of a loop's body are alive at once, and the loads that are beside those."""
    nodes = {n for e in evaluated_in(loop, stores) for n in walk(e)}
    references = sum(isinstance(s, Accumulator) and s.kind == "max" for s in loop.steps)
    costly = any(isinstance(n, Op) and n.name in COSTLY and loop.axis in free_axes(n) for n in nodes)
    sequential = any(isinstance(n, Reduce) and is_sequential(n, tiled) for n in nodes)
    loaded = tuple(n for n in nodes if isinstance(n, Load) and not free_axes(n) & features)
    return max(1, references) + costly + sequential, loaded


def _products(loop: Loop, stores: tuple[Store, ...], tiles: dict[Axis, int], tiled: frozenset[Axis]) -> int:
    """The products that a loop's body makes, and a tile more."""
    sequential, made = _made(loop, stored_in(loop, stores), tiled)
    # One at a time, where a sum goes through them one by one (heads that are mixed).
    tiles = {**tiles, **dict.fromkeys(sequential, 1)}
    sizes = [_size(axes, tiles) for axes in made]
    return sum(sizes) + max(sizes, default=0)


@remembered
def _made(
    loop: Loop, stores: tuple[Store, ...], tiled: frozenset[Axis]
) -> tuple[tuple[Axis, ...], tuple[frozenset[Axis], ...]]:
    """The axes that sums in a loop's body go along one index at a time, and the axes of each product that it makes."""
    nodes = {n for e in evaluated_in(loop, stores) for n in walk(e) if isinstance(n, Reduce)}
    sequential = tuple(n.axis for n in nodes if is_sequential(n, tiled))
    products = (n for n in nodes if is_matrix_product(n.body, n.axis, tiled | {n.axis}))
    return sequential, tuple(free_axes(n) for n in products if loop.axis in free_axes(n))


def products_in(loop: Loop, stores: tuple[Store, ...], tiled: frozenset[Axis]) -> float:
    """How many products of matrices an iteration of a loop makes, with those that it stores; no end of them, where sums
    go through them one by one (heads that are mixed)."""
    sequential, made = _made(loop, stores, tiled)
    updates = [s.update for s in loop.steps if isinstance(s, Accumulator)]
    return math.inf if sequential else len(made) + sum(is_product_of_loop(e, loop.axis, tiled) for e in updates)


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


def largest_tile(e: Expr, tiles: dict[Axis, int], tiled: frozenset[Axis]) -> int:
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
        elif as_product(r.body, r.axis, own) is None and not is_sequential(r, tiled):
            over.append(free_axes(r.body))
    sequential = tuple(r.axis for r in inside if is_sequential(r, tiled))
    return _Tiles(sequential, tuple(dict.fromkeys(over)), shifted, tuple(sheared))


def _size(axes: frozenset[Axis], tiles: dict[Axis, int]) -> int:
    return math.prod(tiles.get(a, covering_tile(a)) for a in axes)
