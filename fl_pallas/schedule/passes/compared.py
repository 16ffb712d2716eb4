"""What asks whether a float equals an extremum has to ask the kernel that found it."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Unsupported
from ..build import COMPARISONS
from ..dtype import is_float
from ..expr import Load, Op, Reduce, Ref, walk
from ..plan import Accumulator, KernelPlan, expressions


def check_comparisons(plans: Sequence[KernelPlan]) -> None:
    """Refuse kernels of which one compares what it computes with the largest that another has found of it (mutual
    nearest neighbours): in another order of operations the last bit may differ, and nothing equals it.

    Raises: Unsupported.
    """
    found: dict[str, str] = {}
    for plan in plans:
        steps = [s for loop in plan.loops for s in loop.steps]
        extrema = {s.name for s in steps if isinstance(s, Accumulator) and s.kind in ("max", "min")}
        for s in plan.stores:
            if isinstance(s.expr, Ref) and s.expr.name in extrema and is_float(s.expr.dtype):
                found[s.name] = plan.name
    for plan in plans:
        others = {name for name, maker in found.items() if maker != plan.name}
        asked = (n for e in expressions(plan) for n in walk(e) if isinstance(n, Op) and n.name in COMPARISONS)
        for n in asked:
            for a, b in (n.args, n.args[::-1]):
                computed = any(isinstance(m, Reduce) for m in walk(a))
                if isinstance(b, Load) and b.source in others and computed and is_float(a.dtype):
                    why = "what equals the largest of a row and of a column is compared in two kernels"
                    raise Unsupported("a comparison with an extremum", why)
