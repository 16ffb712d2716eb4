"""Shared memory: what a kernel's matrices take of it under its choices, by a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ..dtype import itemsize
from ..expr import Axis, Expr, Load, free_axes, loads, reductions
from ..inner import CHUNK, MAX_PARTS, MAX_WHOLE, Product, Sheared, as_product, as_sheared, covering_tile
from ..plan import Accumulator, Choices, Loop
from ..remember import remembered


def shared(loops: Sequence[Loop], choices: Choices) -> int:
    """Bytes for what matrix products take as it lies in memory: of a program's rows, which stay, and of all stages of a
    loop.

    Of sixteen kernels for a head of 256 features, compiled for sm_90, it is what the compiler took, to a kilobyte.
    """
    tiled = choices.tiled
    most = 0
    for loop in loops:
        own = sides(tuple(s.update for s in loop.steps if isinstance(s, Accumulator)), loop.axis, tiled)
        still, moving = (
            # Of other sums around a product, one index is taken at a time.
            {_matrix(n, {a: _at_once(n, a) if a == axis else 1 for a in free_axes(n)} | dict(choices.tiles))
             for n, axis in own if (loop.axis in free_axes(n)) is along}
            for along in (False, True)
        )  # fmt: skip
        most = max(most, sum(size for *_, size in still) + choices.stages * sum(size for *_, size in moving))
    return most


def _at_once(n: Load, axis: Axis) -> int:
    """How much of an axis a product of what is loaded takes at once, where that is all that sums over it."""
    return covering_tile(axis) if axis.extent <= (MAX_PARTS if n.dtype == "f32" else MAX_WHOLE) else CHUNK


def with_windows(loops: Sequence[Loop], choices: Choices) -> int:
    """Bytes of a kernel with products over windows of positions: of all stages, of rows' own sides, which stay, and of
    a product on the way to its elements' places (`kernels/skew.py`); 0 without any.

    Of a Conformer's four kernels, compiled for sm_90, it is what the compiler took, to a kilobyte.
    """
    tiles, most, window = dict(choices.tiles), 0, 0
    for loop in loops:
        products, sheared = _products(tuple(s.update for s in loop.steps if isinstance(s, Accumulator)), choices.tiled)
        for s in sheared:
            kept, gone = (tiles.get(a, covering_tile(a)) for a in (s.kept, s.gone))
            window = max(window, 4 * kept * s.width(kept, gone))
        own = {side for p in (*products, *(s.product for s in sheared)) for side in (p.left, p.right)}
        moving = {loop.axis, *(s.window for s in sheared)}
        still = (side for side in own if not any(free_axes(f) & moving for f in side))
        most = max(most, sum(_bytes(side, tiles) for side in still))
    return most + staged(loops, choices) + window if window else 0


def _bytes(side: tuple[Expr, ...], tiles: Mapping[Axis, int]) -> int:
    """Of one side of a product, in the type of what is loaded for it."""
    axes = frozenset[Axis]().union(*map(free_axes, side))
    widest = max((itemsize(n.dtype) for f in side for n in loads(f) if len(free_axes(n)) > 1), default=4)
    return math.prod(tiles.get(a, covering_tile(a)) for a in axes) * widest


@remembered
def _products(updates: tuple[Expr, ...], tiled: frozenset[Axis]) -> tuple[frozenset[Product], frozenset[Sheared]]:
    """Products inside of updates; and those over windows of positions."""
    sums = [(r.body, r.axis) for e in updates for r in reductions(e) if r.kind == "sum"]
    plain = {(body, a): as_product(body, a, tiled | {a}) for body, a in sums}
    over = (as_sheared(body, a, tiled | {a}) for (body, a), p in plain.items() if p is None)
    return frozenset(p for p in plain.values() if p is not None), frozenset(s for s in over if s is not None)


def staged(loops: Sequence[Loop], choices: Choices) -> int:
    """Bytes for all matrices that the stages of a loop hold, whatever becomes of them."""
    most = 0
    for loop in loops:
        found = {n for s in loop.steps if isinstance(s, Accumulator) for n in loads(s.update)}
        matrices = {
            _matrix(n, {a: covering_tile(a) for a in free_axes(n)} | dict(choices.tiles))
            for n in found
            if loop.axis in free_axes(n)
        }
        most = max(most, sum(size for *_, size in matrices))
    return choices.stages * most


Matrix = tuple[str, tuple[int, ...], int]


def _matrix(n: Load, sides: Mapping[Axis, int]) -> Matrix:
    """What is loaded, the sides of its tile, and its bytes; 0 if it has one side alone.

    One matrix serves all of its uses: in the product that makes weights, and in one that they are a side of. What is
    read at the sum of two indices is as wide as both of their tiles together; one index may be read at in parts, by its
    quotient and its remainder.
    """
    wide = [a for a in free_axes(n) if sides[a] > 1]
    dims = tuple(max(1, sum(sides[a] for a in free_axes(i) if a in wide)) for i in n.index)
    elements = min(math.prod(dims), math.prod(sides[a] for a in wide))
    return n.source, tuple(sorted(dims)), elements * itemsize(n.dtype) if len(wide) > 1 else 0


@remembered
def sides(updates: tuple[Expr, ...], axis: Axis, tiled: frozenset[Axis]) -> frozenset[tuple[Load, Axis]]:
    """What is a side of a matrix product by itself, of those inside of updates and of updates along a loop's axis; and
    what the product sums over."""
    sums: Iterable[tuple[Expr, Axis]] = [
        *((e, axis) for e in updates),
        *((r.body, r.axis) for e in updates for r in reductions(e) if r.kind == "sum"),
    ]
    found: set[tuple[Load, Axis]] = set()
    for body, over in sums:
        p = as_product(body, over, tiled | {over})
        for side in (p.left, p.right) if p is not None else ():
            # What has more sides is put together in registers.
            found |= {(n, over) for n in side if isinstance(n, Load) and len(side) == 1}
    return frozenset((n, over) for n, over in found if len(free_axes(n) & (tiled | {over})) < 3)
