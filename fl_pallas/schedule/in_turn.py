"""What a loop writes part by part, each part made of those before, is PyTorch's.

    for i in range(1, n): a[..., i, :i] += (a[..., i, :i, None] * a[..., :i, :i]).sum(-2)

(a triangle inverted row by row, as chunks of the delta rule are). Each part would have a kernel of its own, or be
computed again for each that reads it; and each is an expression of all that were written before.
"""

from __future__ import annotations

from dataclasses import dataclass

from .build import COMPARISONS
from .dtype import is_int
from .expr import Const, Index, Op, reductions, walk
from .integer import linear
from .program import Program, Value

# Parts, each a sum of what was written before, that are still written out.
MAX_PARTS = 16

Place = tuple[str, int]
"""A comparison of an index, and with what."""


@dataclass(frozen=True)
class _Path:
    """What was written before a value, along the path that leads to it with the most of it.

    Attributes:
      places: of the parts, each a reduction after the one before.
      reduced: whether there is a reduction behind the last.
    """

    places: frozenset[Place] = frozenset()
    reduced: bool = False


def in_turn(program: Program) -> frozenset[str]:
    """Names of the values that such loops write or compute, from the first part on to the last."""
    paths: dict[str, _Path] = {}
    last: set[str] = set()
    for v in program.values:
        paths[v.name] = path = _path(v, paths)
        if len(path.places) > MAX_PARTS and not path.reduced and _part(v) is not None:
            last.add(v.name)
    if not last:
        return frozenset()
    above = 0
    for name in last:
        above |= program.above[name] | 1 << program.places[name]
    begun = (v for v in program.values if paths[v.name].places and above >> program.places[v.name] & 1)
    return frozenset(v.name for v in begun if v.expr is not None and not v.is_view)


def _path(v: Value, paths: dict[str, _Path]) -> _Path:
    if v.expr is None or v.projection:
        return _Path()  # what PyTorch computes (a layer) begins anew
    path = max((paths[r] for r in v.reads), key=lambda p: (len(p.places), p.reduced), default=_Path())
    if reductions(v.expr):
        return _Path(path.places, True)
    place = _part(v) if path.reduced else None
    return path if place is None else _Path(path.places | {place})


def _part(v: Value) -> Place | None:
    """Where a part of `v` begins or ends that is another than the rest; None if it has none."""
    for test in (n for n in walk(v.expr) if isinstance(n, Op) and n.name in COMPARISONS) if v.expr is not None else ():
        left, right = test.args
        if is_int(left.dtype) and isinstance(right, Const):
            terms, before = linear(left)
            if len(terms) == 1 and all(isinstance(t, Index) for t in terms):
                return test.name, int(right.value) - before
    return None
