"""Masked products of what could be both sides of a matrix product: each side is masked instead.

Before: `sum[j](select(seen[j], k[j, a] * k[j, b], 0))`, element by element. After: `sum[j](select(seen[j], k[j, a], 0)
* select(seen[j], k[j, b], 0))`, a product of matrices. The terms are the same, and 0 where nothing is seen, whatever
stands there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from ..build import op, select
from ..dtype import is_float
from ..expr import Axis, Const, Expr, Op, const, free_axes
from ..inner import factors, grouped
from ..plan import Accumulator, Loop, Step


def mask_sides(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Loops whose sums add masked products → the same sums of masked sides."""

    def masked(step: Step, axis: Axis) -> Step:
        if not isinstance(step, Accumulator) or step.kind != "sum":
            return step
        found = [side for f in factors(step.update) for side in _sides(f, axis)]
        return step if len(found) == len(factors(step.update)) else replace(step, update=_product(found))

    return tuple(replace(loop, steps=tuple(masked(s, loop.axis) for s in loop.steps)) for loop in loops)


def _sides(f: Expr, axis: Axis) -> list[Expr]:
    """The masked sides that a masked product is a product of; the factor itself, if it is anything else."""
    if not (isinstance(f, Op) and f.name == "select" and is_float(f.dtype)):
        return [f]
    seen, product, hidden = f.args
    if not isinstance(hidden, Const) or hidden.value != 0:
        return [f]
    varying = [n for n in factors(product) if axis in free_axes(n)]
    if not varying:
        return [f]
    # What all of them have, and the mask, is no side's own.
    common = free_axes(seen) | frozenset.intersection(*map(free_axes, varying))
    groups, plain, numbers = grouped(product, axis, free_axes(product) - common)
    if len(groups) < 2 or plain or not all(isinstance(n, Const) and math.isfinite(n.value) for n in numbers):
        return [f]
    return [*(select(seen, _product(g), const(0.0, f.dtype)) for g in groups), *numbers]


def _product(found: Sequence[Expr]) -> Expr:
    return functools.reduce(lambda a, b: op("mul", a, b, dtype=b.dtype), found)
