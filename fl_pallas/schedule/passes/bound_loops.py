"""Tile analysis of predicates: which indices of a loop axis can contribute to a tile of the grid.

A mask is any condition under which every accumulator of a loop receives its identity. Conditions on
index expressions are solved for the loop axis; what a tile of the grid spans enters by its ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..build import FALSE, TRUE, difference, negate, op, select, substitute
from ..expr import Axis, Const, Expr, Index, Op, Reduce, const, free_axes, ref, walk
from ..integer import Linear, bounds, linear
from ..interior import constants
from ..plan import Accumulator, Interior, Loop, Step
from ..remember import remembered
from .contributes import ASSUMING, contribution

Range = tuple[Expr | None, Expr | None]  # first index that can contribute, and one past the last
_EMPTY_HIGH = const(0, "i64")


def bound_loop(loop: Loop, tiled: frozenset[Axis]) -> Loop:
    """`loop` with `lower` and `upper`; `tiled` are the grid axes whose tile is wider than one index."""
    lower, upper = solve(contribution(loop), loop.axis, tiled)
    for assuming in ASSUMING:
        if (about := assuming(loop, tiled)) is not loop:
            narrower = solve(contribution(about), loop.axis, tiled)
            if narrower != (lower, upper):
                loop, (lower, upper) = about, narrower
    return replace(loop, lower=lower, upper=upper, interior=_interior(loop, tiled))


def _interior(loop: Loop, tiled: frozenset[Axis]) -> Interior | None:
    """The interval where every mask of the loop lets everything through."""
    replaced: dict[Expr, Expr] = {}
    lower: Expr | None = None
    upper: Expr | None = None
    for test, kept in masks(loop.steps):
        if loop.axis in free_axes(test) and test not in replaced:
            found = solve_certain(test if kept else negate(test), loop.axis, tiled)
            if found is not None:
                replaced[test] = TRUE if kept else FALSE
                lower, upper = narrowed(lower, found[0], "max"), narrowed(upper, found[1], "min")
    return Interior(lower, upper, constants(loop.steps, lambda e: substitute(e, {}, replaced))) if replaced else None


def masks(steps: tuple[Step, ...]) -> Iterator[tuple[Expr, bool]]:
    """(test, outcome that lets a value through) of every selection between a value and a constant, or of a
    constant that leaves what it is added to as it is and -inf. Tests of the index of a reduction inside of a step
    are not among them: they have an outcome for each of its terms."""
    nodes = [n for s in steps if isinstance(s, Accumulator) for n in walk(s.update)]
    inside = frozenset(n.axis for n in nodes if isinstance(n, Reduce))
    for n in nodes:
        if isinstance(n, Op) and n.name == "select" and not free_axes(n.args[0]) & inside:
            test, then, other = n.args
            if isinstance(other, Const) is not isinstance(then, Const):
                yield test, isinstance(other, Const)
            elif isinstance(other, Const) and isinstance(then, Const):
                hidden = tuple(c.value == -math.inf for c in (then, other))
                if any(hidden):
                    yield test, hidden[1]


def narrowed(a: Expr | None, b: Expr | None, name: str) -> Expr | None:
    """The tighter of two bounds: the max of lower ones, the min of upper ones."""
    return _join(a, b, name, False)


@remembered
def solve(condition: Expr, axis: Axis, tiled: frozenset[Axis]) -> Range:
    """The interval of indices of `axis` outside which `condition` is false for the whole tile."""
    if isinstance(condition, Const):
        return (None, None) if condition.value else (None, _EMPTY_HIGH)
    if not isinstance(condition, Op):
        return None, None
    if condition.name == "and" or condition.name == "or" and axis in free_axes(condition):
        left, right = (solve(a, axis, tiled) for a in condition.args)
        outward = condition.name == "or"
        return _join(left[0], right[0], "min" if outward else "max", outward), _join(
            left[1], right[1], "max" if outward else "min", outward
        )
    if condition.name == "not":
        inner = without_not(condition)
        return (None, None) if inner is None else solve(inner, axis, tiled)
    if axis not in free_axes(condition):
        return _all_or_nothing(condition, axis, tiled)
    if _is_comparison(condition):
        return _solve_comparison(condition, axis, tiled, certain=False)
    return None, None


def _all_or_nothing(condition: Op, axis: Axis, tiled: frozenset[Axis]) -> Range:
    """Every index of `axis` where a comparison without it may hold somewhere in the tile, none elsewhere."""
    if not _is_comparison(condition):
        return None, None
    possible: Expr = TRUE
    for form in _RELATIONS[condition.name](difference(*condition.args)):
        most = _extreme(_negated(form), tiled)
        if most is None:
            return None, None
        possible = op("and", possible, op("ge", most, const(0, "i64"), dtype="bool"), dtype="bool")
    if isinstance(possible, Const):
        return (None, None) if possible.value else (None, _EMPTY_HIGH)
    none, every = const(0, "i64"), const(axis.extent, "i64")
    return select(possible, none, every), select(possible, every, none)


@remembered
def solve_certain(condition: Expr, axis: Axis, tiled: frozenset[Axis]) -> Range | None:
    """An interval of indices of `axis` on which `condition` is true for the whole tile; None if none is known."""
    if isinstance(condition, Const):
        return (None, None) if condition.value else None
    if not isinstance(condition, Op):
        return None
    if condition.name in ("and", "or"):
        left, right = (solve_certain(a, axis, tiled) for a in condition.args)
        if left is None or right is None:
            return None if condition.name == "and" else (left or right)
        if condition.name == "or":
            return left
        return _join(left[0], right[0], "max", False), _join(left[1], right[1], "min", False)
    if condition.name == "not":
        inner = without_not(condition)
        return None if inner is None else solve_certain(inner, axis, tiled)
    if _is_comparison(condition) and condition.name not in ("eq", "ne"):
        found = _solve_comparison(condition, axis, tiled, certain=True)
        return None if found == (None, None) else found
    return None


def _is_comparison(e: Op) -> bool:
    return e.name in _RELATIONS and all(a.dtype in ("i64", "i32") for a in e.args)


def without_not(e: Op) -> Expr | None:
    """A negation carried inwards; None if that leads nowhere."""
    inner = e.args[0]
    if isinstance(inner, Op) and inner.name in ("and", "or"):
        return op("or" if inner.name == "and" else "and", *(negate(a) for a in inner.args), dtype="bool")
    flipped = negate(inner)
    return None if isinstance(flipped, Op) and flipped.name == "not" else flipped


def _join(a: Expr | None, b: Expr | None, name: str, both: bool) -> Expr | None:
    if a is None or b is None:
        return None if both else (b if a is None else a)
    return op(name, a, b, dtype="i64") if a is not b else a


_RELATIONS: dict[str, Callable[[Linear], list[Linear]]] = {
    # Each relation a ? b as inequalities "form <= 0", from form = a - b.
    "le": lambda f: [f],
    "lt": lambda f: [(f[0], f[1] + 1)],
    "ge": lambda f: [_negated(f)],
    "gt": lambda f: [(_negated(f)[0], _negated(f)[1] + 1)],
    "eq": lambda f: [f, _negated(f)],
    "ne": lambda f: [],
}


def _negated(f: Linear) -> Linear:
    return {t: -k for t, k in f[0].items()}, -f[1]


def _solve_comparison(e: Op, axis: Axis, tiled: frozenset[Axis], certain: bool) -> Range:
    lower: Expr | None = None
    upper: Expr | None = None
    for form in _RELATIONS[e.name](difference(*e.args)):
        low, high = _solve_form(form, axis, tiled, certain)
        lower, upper = _join(lower, low, "max", False), _join(upper, high, "min", False)
    return lower, upper


def _solve_form(form: Linear, axis: Axis, tiled: frozenset[Axis], certain: bool) -> Range:
    """Indices of `axis` for which `form` <= 0 is possible (or certain) in a tile."""
    along = [t for t in form[0] if axis in free_axes(t)]
    if len(along) != 1:
        return None, None
    atom, k = along[0], form[0][along[0]]
    rest = {t: -v for t, v in form[0].items() if t is not atom}, -form[1]
    if isinstance(atom, Index):
        limit = _limit(rest, tiled, certain)
        if limit is None:
            return None, None
        if k > 0:  # k·j <= limit
            return None, op("add", _divided(limit, k), const(1, "i64"), dtype="i64")
        # -|k|·j <= limit, so j >= ceil(-limit / |k|) = -floor(limit / |k|)
        return op("neg", _divided(limit, -k), dtype="i64"), None
    if isinstance(atom, Op) and atom.name == "abs" and k > 0:
        inner, c = linear(atom.args[0])
        sides = [({t: v * k for t, v in inner.items()}, c * k), ({t: -v * k for t, v in inner.items()}, -c * k)]
        ranges = []
        for terms, offset in sides:
            merged = dict(terms)
            for t, v in form[0].items():
                if t is not atom:
                    merged[t] = merged.get(t, 0) + v
            ranges.append(_solve_form(({t: v for t, v in merged.items() if v}, offset + form[1]), axis, tiled, certain))
        return _join(ranges[0][0], ranges[1][0], "max", False), _join(ranges[0][1], ranges[1][1], "min", False)
    if isinstance(atom, Op) and atom.name == "floordiv" and isinstance(atom.args[1], Const) and abs(k) == 1:
        n = int(atom.args[1].value)
        inner, c = linear(atom.args[0])
        limit = _limit(rest, tiled, certain)
        if limit is None:
            return None, None
        # x // n <= b is x <= n·b + n - 1; -(x // n) <= b is -x <= n·b.
        scaled = op("mul", limit, const(n, "i64"), dtype="i64")
        bound = op("add", scaled, const(n - 1 if k > 0 else 0, "i64"), dtype="i64")
        terms, offset = linear(bound)
        merged = {t: v * k for t, v in inner.items()}
        for t, v in terms.items():
            merged[t] = merged.get(t, 0) - v
        return _solve_form(({t: v for t, v in merged.items() if v}, c * k - offset), axis, tiled, certain)
    return None, None


def _limit(rest: Linear, tiled: frozenset[Axis], certain: bool) -> Expr | None:
    """The largest value of `rest` over a tile, or the least if what it limits must be certain."""
    if not certain:
        return _extreme(rest, tiled)
    most = _extreme(_negated(rest), tiled)
    return None if most is None else op("neg", most, dtype="i64")


def _divided(e: Expr, k: int) -> Expr:
    return e if k == 1 else op("floordiv", e, const(k, "i64"), dtype="i64")


def _extreme(form: Linear, tiled: frozenset[Axis]) -> Expr | None:
    """The largest value of a linear form over a tile, as a scalar expression of the tile's ends."""
    total: Expr = const(form[1], "i64")
    for atom, k in form[0].items():
        end = _end(atom, k > 0, tiled)
        if end is None:
            return None
        total = op("add", total, op("mul", end, const(k, "i64"), dtype="i64"), dtype="i64")
    return total


def _end(e: Expr, high: bool, tiled: frozenset[Axis]) -> Expr | None:
    """The largest (or least) value of an integer expression over a tile."""
    if not free_axes(e) & tiled:
        # A scalar of this program; data it loads is exact, whatever it is.
        return e
    if isinstance(e, Index):
        return ref(f"{e.axis.name}.{'last' if high else 'first'}", (), "i64")
    terms, c = linear(e)
    if e not in terms:
        out = _extreme(({t: (k if high else -k) for t, k in terms.items()}, c if high else -c), tiled)
        return out if out is None or high else op("neg", out, dtype="i64")
    if isinstance(e, Op) and e.name == "floordiv" and isinstance(e.args[1], Const) and e.args[1].value > 0:
        end = _end(e.args[0], high, tiled)
        return None if end is None else op("floordiv", end, e.args[1], dtype="i64")
    if isinstance(e, Op) and e.name in ("max", "min"):
        ends = [_end(a, high, tiled) for a in e.args]
        return None if None in ends else op(e.name, *(x for x in ends if x is not None), dtype="i64")
    span = bounds(e)
    return None if span is None else const(span[1] if high else span[0], "i64")
