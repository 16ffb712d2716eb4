"""The associative merge of two partial accumulators, derived from how they are corrected."""

from __future__ import annotations

from ..build import op, rewrite
from ..dtype import is_float
from ..expr import Expr, Ref, ref
from ..plan import Accumulator
from .split_reductions import COMBINE


def merge_of(acc: Accumulator, compute: str) -> Expr:
    """`acc' = correct(acc.old) ⊕ tile` → `acc = correct(acc.left) ⊕ correct(acc.right)`.

    A part is corrected to the merged references exactly as an old value is to the new ones. The
    result refers to `<name>.left`, `<name>.right` and, without a suffix, to merged references.
    """
    held = "bool" if acc.kind in ("any", "all") else compute if is_float(acc.update.dtype) else acc.update.dtype
    own = acc.correct if acc.correct is not None else ref(f"{acc.name}.old", acc.axes, held)
    return op(COMBINE[acc.kind], _side(own, "left"), _side(own, "right"), dtype=held)


def _side(e: Expr, side: str) -> Expr:
    def rule(n: Expr) -> Expr:
        if isinstance(n, Ref) and n.name.endswith(".old"):
            return ref(f"{n.name[: -len('.old')]}.{side}", n.axes, n.dtype)
        return n

    return rewrite(e, rule)
