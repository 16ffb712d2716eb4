"""From streamed loops to a KernelPlan: grid, covered axes, bounds, choices."""

from __future__ import annotations

import math
from collections.abc import Set

from ...errors import Unsupported
from ..expr import Axis, Expr, free_axes
from ..inner import PARTS_BYTES
from ..plan import Accumulator, Choices, KernelPlan, Loop, Store, reduced_over, stored_in
from ..remember import remembered
from ..scan import scanned_axes
from ..target import Target
from .bound_loops import bound_loop
from .choose import choose, product_bytes
from .registers import products_in
from .roles import roles

# Products of matrices times the side of the tile that these have whole. (Eight of 128, of two softmaxes, take 249 us
# where they take 119 apart, whatever the model says of their registers; five of 128 gain.)
MOST_PRODUCTS = 6 * 128


@remembered
def build_plan(
    parallel: tuple[Axis, ...],
    loops: tuple[Loop, ...],
    stores: tuple[Store, ...],
    notes: tuple[str, ...],
    compute: str,
    target: Target,
) -> KernelPlan:
    """Accumulators and stores → the plan of one kernel, without a name.

    Axes whose tile covers them whole (features, head dimensions) are no loops and take no grid
    dimension: the paper's tiling-aware dimension elimination.

    Raises: Unsupported if tiles do not hold an axis along which a running sum goes, or over which stores of loops are
      reduced, or where those multiply matrices of float32.
    """
    exprs: list[Expr] = [s.expr for s in stores]
    exprs += [s.update for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    kinds = roles(parallel, loops, stores)
    scanned = scanned_axes(exprs)
    if scanned & {*kinds.batch}:
        raise Unsupported("a kernel", "a running sum goes along an axis that is taken one index at a time")
    whole, bytes_ = reduced_over(parallel, loops, stores), product_bytes(kinds, loops, stores)
    if whole and bytes_ > 2:
        # (They spill: 64 queries and keys take 125 us for 134 apart, on an H200.)
        raise Unsupported(
            "a kernel", "the parts of float32 operands of so many products take more registers than it has"
        )
    ways = choose(kinds, loops, stores, bytes_, target, scanned)
    if whole:
        ways = tuple(c for c in ways if _holds(c, whole, loops, stores))
    if not ways:
        raise Unsupported("a kernel", "no tile holds an axis that is summed over at each step of a loop")
    choices, *others = ways
    tiled = frozenset(a for c in (choices, *others) for a, n in c.tiles if n > 1)
    used = frozenset().union(*(free_axes(e) for e in exprs), *(s.axes for s in stores))
    grid = tuple(a for a in parallel if a.extent > 1 and a in used)
    # What a loop stores it has to go through.
    bounded = tuple(loop if stored_in(loop, stores) else bound_loop(loop, tiled) for loop in loops)
    notes, parts = tuple(dict.fromkeys(notes)), bytes_ == PARTS_BYTES
    return KernelPlan("", grid, kinds.features, bounded, stores, compute, choices, tuple(others), notes, parts=parts)


def _holds(choices: Choices, whole: Set[Axis], loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> bool:
    """Whether a tile has these axes whole, and a program room for all products of matrices that it makes of that."""
    tiled = choices.tiled
    products = sum(products_in(loop, stored_in(loop, stores), tiled) for loop in loops)
    side = math.prod(choices.tile(a) or 1 for a in whole)
    return all((choices.tile(a) or 1) >= a.extent for a in whole) and products * side <= MOST_PRODUCTS
