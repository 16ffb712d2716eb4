"""What is left of running sums is a running sum itself, and nothing cancels.

Of sums `c` so far of x, and the total t: `c - x` is the sum before an element, `t - c` that behind it, `t - c + x` that
from it on. PyTorch's differences are off by a rounding of t, which is all that there is where little is left, under a
root, a logarithm or a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..build import op, reduce, substitute
from ..expr import Axis, Expr, Load, Op, Reduce, const, index, load
from ..program import Program, Value
from .resolve_views import inline_load, inlined

# More terms than these are no difference of a sum.
MOST = 8


@dataclass(frozen=True)
class Scan:
    """A value that is a running sum.

    Attributes:
      read: an element of what is summed, over the axes of the value.
      at: the dimension of the value along which it runs.
      back: whether it runs from the other end.
      whole: whether an element is in its own sum.
      negated: whether it is taken times -1.
      total: of all that is summed, where PyTorch takes another sum off that.
    """

    read: Expr
    at: int
    back: bool
    whole: bool = True
    negated: bool = False
    total: Expr | None = None


def from_the_end(axis: Axis) -> Expr:
    return op("sub", const(axis.extent - 1, "i64"), index(axis), dtype="i64")


def remainder(program: Program, v: Value, found: Mapping[str, Scan]) -> Scan | None:
    """`v` as a running sum, if it is such a difference; None for anything else.

    Args:
      program: its views resolved.
      found: its running sums so far, by name.
    """
    if not isinstance(v.expr, Op) or v.expr.name not in ("add", "sub"):
        return None
    for sign, e in _terms(program, v.expr, lambda e: isinstance(e, Load) and e.source in found):
        if isinstance(e, Load) and e.source in found:
            made = _remainder(program, v, v.expr, found[e.source], sign, e)
            if made is not None:
                return made
    return None


def _remainder(program: Program, v: Value, e: Expr, scan: Scan, sign: int, taken: Load) -> Scan | None:
    """`v` as a running sum, if it is a difference of one, `taken` times `sign`, and a total, or the element itself."""
    axes = program.by_name[taken.source].axes
    place, whole = taken.index[scan.at], [a for a in v.axes if a.extent == axes[scan.at].extent]
    axis = next((a for a in whole if place == (from_the_end(a) if scan.back else index(a))), None)
    if axis is None:
        return None
    at, moved = v.axes.index(axis), {**dict(zip(axes, taken.index, strict=True)), axes[scan.at]: index(axis)}
    read = substitute(scan.read, moved)
    # The last of the sums is a total too.
    last = (*taken.index[: scan.at], const(axis.extent - 1, "i64"), *taken.index[scan.at + 1 :])
    of_all = load(taken.source, last, taken.dtype)
    for own, factor in _signs(program, read):
        outer = -sign * factor if scan.negated else sign * factor

        def is_total(x: Expr, own: Expr = own) -> bool:
            return x == of_all and own is read or _is_sum(program, x, own, axis)

        def is_term(x: Expr, own: Expr = own) -> bool:
            return x in (taken, own) or is_total(x, own)

        terms = _terms(program, e, is_term)
        elements = [s for s, x in terms if x == own]
        totals = [(s, x) for s, x in terms if is_total(x)]
        signs = {*elements, *(s for s, _ in totals)}
        if len(elements) + len(totals) + 1 != len(terms) or signs != {-outer}:
            continue
        if len(elements) == 1 and not totals and scan.whole:
            return Scan(own, at, scan.back, False, outer < 0)
        if len(totals) == 1 and len(elements) <= scan.whole:
            total = totals[0][1]
            if total == of_all:
                every = Axis("%every", axis.extent)
                total = reduce("sum", every, substitute(own, {axis: index(every)}), v.dtype)
            return Scan(own, at, not scan.back, bool(elements) or not scan.whole, outer > 0, total)
    return None


def _terms(program: Program, e: Expr, is_term: Callable[[Expr], bool]) -> list[tuple[int, Expr]]:
    """What sums and differences, of values too, add up, each with its sign: as far as they are no terms themselves."""
    found: list[tuple[int, Expr]] = []
    stack = [(1, e)]
    while stack:
        sign, n = stack.pop()
        inner = n if is_term(n) or len(found) + len(stack) >= MOST else _computed(program, n)
        if not isinstance(inner, Op) or is_term(n) or inner.name not in ("add", "sub", "neg"):
            found.append((sign, n))
        elif inner.name == "neg":
            stack.append((-sign, inner.args[0]))
        else:
            stack += [(sign, inner.args[0]), (sign if inner.name == "add" else -sign, inner.args[1])]
    return found


def _signs(program: Program, read: Expr) -> list[tuple[Expr, int]]:
    """What is summed; and, where that is a number times -1 (a gradient), that number."""
    inner = _computed(program, read)
    return [(read, 1), (inner.args[0], -1)] if isinstance(inner, Op) and inner.name == "neg" else [(read, 1)]


def _is_sum(program: Program, e: Expr, read: Expr, axis: Axis) -> bool:
    """Whether `e` is the sum of `read` over all of an axis: computed here, or, in a backward pass, known to be."""
    summed = _computed(program, e)
    known = {f.name: f for f in program.facts}
    if isinstance(summed, Load) and (fact := known.get(summed.source)):
        computed = {u.name: u for u in program.values if u.expr is not None}
        summed, read = inline_load(summed, fact), inlined(read, computed)
    if not isinstance(summed, Reduce) or summed.kind != "sum" or summed.axis.extent != axis.extent:
        return False
    return summed.body == substitute(read, {axis: index(summed.axis)})


def _computed(program: Program, e: Expr) -> Expr:
    """What a value that is loaded is computed by."""
    return inline_load(e, v) if isinstance(e, Load) and (v := program.by_name[e.source]).expr is not None else e
