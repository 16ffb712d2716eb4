"""The associative merge of two partial accumulators, derived from how they are corrected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..build import op, rewrite
from ..expr import Expr, Ref, ref
from ..plan import Accumulator, Anchor, Step, held_dtype
from .split_reductions import COMBINE

_OLD = ".old"


def held_type(step: Step, compute: str) -> str:
    """The type in which a step's value is kept."""
    if not isinstance(step, Accumulator):
        return compute
    return held_dtype(step.kind, step.update, compute)


def merge_of(acc: Accumulator, compute: str) -> Expr:
    """`acc' = correct(acc.old) ⊕ tile` → `acc = correct(acc.left) ⊕ correct(acc.right)`.

    A part is corrected to the merged references exactly as an old value is to the new ones. The
    result refers to `<name>.left`, `<name>.right` and, without a suffix, to merged references.
    """
    left, right = (
        part_of(acc, lambda r, side=side: ref(f"{r.name}.{side}", r.axes, r.dtype), compute)
        for side in ("left", "right")
    )
    return op(COMBINE[acc.kind], left, right, dtype=held_type(acc, compute))


def part_of(acc: Accumulator, part: Callable[[Ref], Expr], compute: str) -> Expr:
    """One part's share of the merged value: the part corrected to the merged references.

    part: what the part holds of a reference (given without its suffix).
    """
    own = acc.correct
    if own is None:
        own = ref(f"{acc.name}{_OLD}", acc.axes, held_type(acc, compute))

    def rule(n: Expr) -> Expr:
        if isinstance(n, Ref) and n.name.endswith(_OLD):
            held = ref(n.name.removesuffix(_OLD), n.axes, n.dtype)
            assert isinstance(held, Ref)
            return part(held)
        return n

    return rewrite(own, rule)


def folded(step: Step, part: Callable[[Ref], Expr], compute: str) -> Step:
    """A step of a loop over parts, for one of a loop: acc = correct(acc.old) ⊕ correct(part of acc)."""
    if isinstance(step, Anchor):
        return step
    return replace(step, update=part_of(step, part, compute), dtype=held_type(step, compute))
