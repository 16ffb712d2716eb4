"""How a number changes with the reference that others are taken about: a sum of exp(x - r) is halved by r + log(2), a
logarithm of it is less by log(2), and its quotient by another such sum is what it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from .expr import Const, Expr, Op, Ref, children, ref_names


class Change(NamedTuple):
    """What becomes of a number where a reference is 1 more: times 2 ** degree, or plus a shift; one of both is 0."""

    degree: float = 0.0
    shift: float = 0.0


NONE = Change()
# Constants are rounded in many ways: log2(e) times 0.125, or 0.125 by log(2).
CLOSE = 1e-6


def is_alike(a: Change, b: Change) -> bool:
    """Whether two changes are one, but for how constants are rounded."""
    return abs(a.degree - b.degree) < CLOSE and abs(a.shift - b.shift) < CLOSE


def change(e: Expr, known: Mapping[str, Change]) -> Change | None:
    """How `e` changes with references; None if in another way.

    Args:
      known: how those change that do.
    """
    if known.keys().isdisjoint(ref_names(e)):
        return NONE
    if isinstance(e, Ref):
        return known[e.name]
    found = [change(c, known) for c in children(e)]
    inner = [c for c in found if c is not None]
    if len(inner) < len(found):
        return None
    if all(is_alike(c, NONE) for c in inner):
        return NONE
    return _of_operation(e, inner) if isinstance(e, Op) else None


def _of_operation(e: Op, inner: list[Change]) -> Change | None:
    first, last = inner[0], inner[-1]
    scaled, shifted = all(abs(c.shift) < CLOSE for c in inner), all(abs(c.degree) < CLOSE for c in inner)
    sign = -1.0 if e.name in ("sub", "div") else 1.0
    if e.name in ("exp", "exp2"):
        return Change(degree=first.shift * (math.log2(math.e) if e.name == "exp" else 1.0)) if shifted else None
    if e.name == "log":
        return Change(shift=first.degree * math.log(2)) if scaled else None
    if e.name == "neg":
        return Change(first.degree, -first.shift)
    if e.name in ("mul", "div") and scaled:
        return Change(degree=first.degree + sign * last.degree)
    if e.name in ("mul", "div") and shifted:
        factor = next((a.value for a in e.args[::-1] if isinstance(a, Const)), None)
        if factor is None or e.name == "div" and not isinstance(e.args[1], Const):
            return None
        return Change(shift=(first.shift + last.shift) * (factor if e.name == "mul" else 1 / factor))
    if e.name in ("add", "sub") and shifted:
        return Change(shift=first.shift + sign * last.shift)
    compared = inner[1:] if e.name == "select" and is_alike(first, NONE) else inner
    is_linear = e.name in ("select", "max", "min") or e.name in ("add", "sub") and scaled
    return compared[0] if is_linear and all(is_alike(c, compared[0]) for c in compared) else None
