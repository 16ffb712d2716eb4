"""Which reductions need a loop: all but those that a tile has whole, or takes one index at a time."""

from __future__ import annotations

from ..expr import Axis, Expr, Reduce, free_axes, reductions
from ..inner import as_product, as_sheared, factors
from ..remember import remembered

# Reductions up to this extent that contain no other are taken whole, without a loop.
MAX_COVERED = 256


def streamed(e: Expr, parallel: tuple[Axis, ...]) -> list[Reduce]:
    """The reductions of `e` that need a loop, inner first: one value per index of the parallel axes."""
    own = frozenset(parallel)
    return [r for r in reductions(e) if free_axes(r) <= own and not is_covered(r)]


def is_covered(r: Reduce) -> bool:
    """Whether a reduction is small and plain enough to be taken whole, or is taken one index at a time."""
    return r.axis.extent <= MAX_COVERED and not reductions(r.body) or is_batch_sum(r)


@remembered
def is_batch_sum(r: Reduce) -> bool:
    """Whether `r` sums products of matrices, each of whose factors is another for each index: it is no side of them,
    and a tile of the products is summed over it (the gradient of a bias that a batch shares). Other sums are the same
    for all of it."""
    inner = reductions(r.body)
    varying = [[free_axes(f) for f in factors(c.body) if c.axis in free_axes(f)] for c in inner]
    shared = [free_axes(c.body).intersection(*sides) for c, sides in zip(inner, varying)]
    return (
        r.kind == "sum"
        and all(is_covered(c) and (r.axis in axes or r.axis not in free_axes(c)) for c, axes in zip(inner, shared))
        and any(r.axis in axes and _is_of_matrices(c, axes, r.axis) for c, axes in zip(inner, shared))
    )


def _is_of_matrices(c: Reduce, shared: frozenset[Axis], batch: Axis) -> bool:
    """Whether `c` is a product of matrices, or of one with the diagonals of another (rows are a side of both then)."""
    own = free_axes(c.body) - shared
    if as_product(c.body, c.axis, own) is not None:
        return True
    return any(as_sheared(c.body, c.axis, own | {row, c.axis}) is not None for row in shared - {batch, c.axis})
