"""From streamed loops to a KernelPlan: grid, covered axes, bounds, choices."""

from __future__ import annotations

from ...errors import Unsupported
from ..expr import Axis, Expr, free_axes
from ..plan import Accumulator, KernelPlan, Loop, Store, reduced_over, stored_in
from ..remember import remembered
from ..scan import scanned_axes
from ..target import Target
from .bound_loops import bound_loop
from .choose import choose, product_bytes
from .roles import roles


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
    ways = tuple(c for c in ways if all((c.tile(a) or 1) >= a.extent for a in whole))
    if not ways:
        raise Unsupported("a kernel", "no tile holds an axis that is summed over at each step of a loop")
    choices, *others = ways
    tiled = frozenset(a for c in (choices, *others) for a, n in c.tiles if n > 1)
    used = frozenset().union(*(free_axes(e) for e in exprs), *(s.axes for s in stores))
    grid = tuple(a for a in parallel if a.extent > 1 and a in used)
    # What a loop stores it has to go through.
    bounded = tuple(loop if stored_in(loop, stores) else bound_loop(loop, tiled) for loop in loops)
    return KernelPlan(
        "", grid, kinds.features, bounded, stores, compute, choices, tuple(others), tuple(dict.fromkeys(notes))
    )
