"""Running sums on tiles: `running(x, j, before, n)` is `before`, of the block of j, and what that has of x up to j.

`running_back` is the same from the other end; `earlier` and `later` are without x at j itself, and so are `less` and
`less_back`, which are NaN where that is not finite, as a difference is. Of n elements in all, x has none beyond. Tiles
are whole blocks, and hold the axis of j in order: j is that axis, or the axis and whole blocks.
"""

from __future__ import annotations

from ..errors import Unsupported
from .expr import Axis, Expr, Index, Op, walk
from .integer import linear

# Indices of a block.
BLOCK = 32
RUNNING = ("running", "running_back", "earlier", "later", "less", "less_back")
# Those from the other end; those that have x at j itself; those that are differences.
BACK, WHOLE, LESS = ("running_back", "later", "less_back"), ("running", "running_back"), ("less", "less_back")


def place_of(e: Op) -> tuple[Axis, int] | None:
    """The axis along which a running sum runs, and by how much its place is beyond whole blocks and an index of that,
    from -1 on; None if its blocks are not those of one axis."""
    terms, constant = linear(e.args[1])
    along = [t for t, k in terms.items() if k == 1]
    if len(along) != 1 or not isinstance(along[0], Index) or any(k % BLOCK for k in terms.values() if k != 1):
        return None
    return along[0].axis, (constant + 1) % BLOCK - 1


def scanned_axis(e: Op) -> Axis:
    """The axis along which a running sum runs.

    Raises: Unsupported if its blocks are not those of one axis.
    """
    found = place_of(e)
    if found is None or found[1]:
        raise Unsupported("a running sum", "its elements are no longer in order")
    return found[0]


def scanned_axes(exprs: list[Expr]) -> set[Axis]:
    """The axes along which running sums inside of expressions run."""
    return {scanned_axis(n) for e in exprs for n in walk(e) if isinstance(n, Op) and n.name in RUNNING}
