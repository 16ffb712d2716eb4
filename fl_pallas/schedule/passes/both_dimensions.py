"""Both dimensions: a sum over all columns of pairs in the kernel that sums over each dimension of these by itself.

Before: a kernel sums gradients of scores over rows of an image's keys, and over its columns (`both_sides`); another
sums, over all keys, what it weighs with them, and computes them again. After: the first adds that up, too.
"""

from __future__ import annotations

from dataclasses import replace

from ..build import op, reduce, substitute
from ..expr import Axis, Expr, const, free_axes, index, ref
from ..plan import Accumulator, Step, held_dtype, reduced_over, stored_in
from .pairs import Streamed, are_features, as_parallel, nodes_of_pairs, references
from .share import renaming


def both_dimensions(each: Streamed, whole: Streamed, compute: str) -> Streamed | None:
    """Both kernels as one; None if the sums of `whole` do not go along both dimensions that `each` has by themselves.

    Args:
      each: of one loop, at whose steps it stores what is reduced over an axis that a tile has whole.
      whole: of one loop, along both, in which it stores nothing.
    """
    (parallel, loops, stores), (own, longer, last) = each.kernel, whole.kernel
    if len(loops) != 1 or len(longer) != 1 or not stored_in(loops[0], stores):
        return None
    (loop,), (long,) = loops, longer
    held = reduced_over(parallel, loops, stores)
    sums = [s for s in long.steps if isinstance(s, Accumulator) and s.correct is None]
    if len(held) != 1 or len(sums) != len(long.steps) or stored_in(long, last):
        return None
    (inner,) = held
    if inner.extent * loop.axis.extent != long.axis.extent:
        return None
    for slow, fast in ((inner, loop.axis), (loop.axis, inner)):
        first = op("mul", index(slow), const(fast.extent, "i64"), dtype="i64")
        at = op("add", first, index(fast), dtype="i64")
        found = _same_pairs(each, whole, at)
        if found is not None:
            break
    else:
        return None
    features = [a for a in own if a not in found]
    if not are_features(features, whole.kernel):
        return None
    place = found | {a: Axis(f"{a.name}_s", a.extent) for a in features}
    mapping = {a: index(b) for a, b in place.items()} | {long.axis: at}
    known: dict[Expr, Expr] = {}
    steps: list[Step] = []
    for s in sums:
        update = reduce(s.kind, inner, substitute(s.update, mapping, known), s.dtype)
        axes = tuple(place[a] for a in s.axes)
        steps.append(replace(s, name=f"{s.name}_s", axes=axes, update=update))
        held_as = held_dtype(s.kind, s.update, compute)
        known |= dict.fromkeys(references(s.name, whole.kernel), ref(f"{s.name}_s", axes, held_as))
    made = (as_parallel(s, place, mapping, known) for s in last)
    notes = tuple(dict.fromkeys((*each.notes, *whole.notes)))
    kernel = (
        (*parallel, *(place[a] for a in features)),
        (replace(loop, steps=(*loop.steps, *steps)),),
        (*stores, *made),
    )
    return Streamed(kernel, notes)


def _same_pairs(each: Streamed, whole: Streamed, at: Expr) -> dict[Axis, Axis] | None:
    """For each parallel axis of pairs in `whole` that of the same pairs in `each`, where its loop's index is `at`."""
    (_, (loop,), _), (own, (long,), _) = each.kernel, whole.kernel
    offered = nodes_of_pairs(loop, each.kernel[0])
    for n in nodes_of_pairs(long, own):
        there = substitute(n, {long.axis: at})
        for other in offered:
            found = {b: a for a, b in (renaming(there, other) or {}).items()}
            if found and all(found[a] == a for a in free_axes(at)):
                return {b: a for b, a in found.items() if b not in free_axes(at)}
    return None
