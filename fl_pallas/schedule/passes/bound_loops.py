"""Tile analysis of predicates: which indices of a loop axis can contribute to a tile of the grid.

A mask is any condition under which every accumulator of a loop receives its identity. Conditions on
index expressions are solved for the loop axis; what a tile of the grid spans enters by its ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..build import FALSE, TRUE, negate, op, select, substitute
from ..dtype import is_float
from ..expr import Axis, Const, Expr, Index, Op, Reduce, Ref, children, const, free_axes, ref, ref_names, walk
from ..integer import Linear, bounds, linear
from ..interior import constants
from ..plan import Accumulator, Anchor, Interior, Loop, Step
from ..reach import FINITE, MOST, Reach, reach
from ..remember import remembered

Range = tuple[Expr | None, Expr | None]  # first index that can contribute, and one past the last
_EMPTY_HIGH = const(0, "i64")


def bound_loop(loop: Loop, tiled: frozenset[Axis]) -> Loop:
    """`loop` with `lower` and `upper`; `tiled` are the grid axes whose tile is wider than one index."""
    lower, upper = solve(contribution(loop), loop.axis, tiled)
    for assuming in (about_finite, about_settled):
        if (about := assuming(loop)) is not loop:
            narrower = solve(contribution(about), loop.axis, tiled)
            if narrower != (lower, upper):
                loop, (lower, upper) = about, narrower
    return replace(loop, lower=lower, upper=upper, interior=_interior(loop, tiled))


def about_finite(loop: Loop) -> Loop:
    """`loop` with `finite`, if more can be said of what contributes where earlier loops' results are finite."""
    own = {n for s in loop.steps for n in (s.name, f"{s.name}.old")}
    read = (n for s in loop.steps if isinstance(s, Accumulator) for n in sorted(ref_names(s.update) - own))
    about = replace(loop, finite=tuple(dict.fromkeys(read)))
    return about if contribution(about) is not contribution(loop) else loop


def about_settled(loop: Loop) -> Loop:
    """`loop` with `settled`, if more can be said of what contributes where its maxima are above what masks put in the
    place of scores (-1e9, the least number of a type): weights of that are 0 then."""
    least: dict[str, float] = {}
    for s in loop.steps:
        if isinstance(s, Accumulator) and s.kind == "max" and s.correct is None:
            masked = (
                reach(s.update, t, outcome, lambda _: None) for t in _selecting(s.update) for outcome in (True, False)
            )
            hidden = [r.low for r in masked if r.is_only(r.low) and -math.inf < r.low <= HIDDEN]
            least |= {s.name: max(hidden) / 2} if hidden else {}
    about = replace(loop, settled=tuple(least.items()))
    return about if least and contribution(about) is not contribution(loop) else loop


def contribution(loop: Loop) -> Expr:
    """A condition without which every accumulator of `loop` receives its identity."""
    condition: Expr = FALSE
    settled = dict(loop.settled)
    finite = frozenset((*loop.finite, *(s.name for s in loop.steps if isinstance(s, Anchor))))
    for step in loop.steps:
        if isinstance(step, Accumulator):
            least = settled.get(step.name, -math.inf)
            part = contributes(step.update, step.kind, finite, loop.settled, least)
            condition = op("or", condition, part, dtype="bool")
    return condition


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


def contributes(
    update: Expr,
    kind: str,
    finite: frozenset[str] = frozenset(),
    settled: tuple[tuple[str, float], ...] = (),
    least: float = -math.inf,
) -> Expr:
    """A condition without which `update` is the identity of `kind`, or no more than `least`, of a maximum.

    Loaded data is taken to be finite. A running or final value is not, unless it is one of `finite`, and then it is no
    sum that is 0 either: -inf - (-inf) and 0 · inf are NaN, as in the wholly masked row of a softmax, and must be kept.
    """
    if kind in _IDENTITIES:
        identity = _IDENTITIES[kind]
        floor = max(identity, least) if kind == "max" else identity
        return _where_masked(_unless(update, identity, finite), update, (identity, floor), finite, settled)
    return update if kind == "any" else TRUE


_IDENTITIES = {"sum": 0.0, "max": -math.inf, "min": math.inf}
# What masks put in the place of scores is this or less.
HIDDEN = -9000.0


@remembered
def _where_masked(
    condition: Expr,
    update: Expr,
    nothing: tuple[float, float],
    finite: frozenset[str],
    settled: tuple[tuple[str, float], ...],
) -> Expr:
    """`condition`, and that no mask in `update` makes it `nothing`, from the one to the other number, whatever lies
    between: a maximum with 0, a sigmoid, a test for what the mask has put there."""
    known = dict(settled)

    def whole(e: Expr) -> Reach | None:
        if isinstance(e, Ref) and e.name in known:
            return Reach(known[e.name], MOST)
        return FINITE if isinstance(e, Ref) and e.name in finite or _is_replaced_maximum(e) else None

    for test in _selecting(update):
        for outcome in (True, False):
            excluded = negate(test) if outcome else test
            if not _asks(condition, excluded):
                found = reach(update, test, outcome, whole)
                if not found.nan and nothing[0] <= found.low and found.high <= nothing[1]:
                    condition = op("and", condition, excluded, dtype="bool")
    return condition


def _asks(condition: Expr, test: Expr) -> bool:
    """Whether a condition holds only where `test` does, by what it is made of."""
    if not isinstance(condition, Op) or condition is test:
        return condition is test or condition is FALSE
    every = [_asks(a, test) for a in condition.args] if condition.name in ("and", "or") else [False]
    return any(every) if condition.name == "and" else all(every)


def _selecting(e: Expr) -> list[Expr]:
    """The tests of selections in `e` that ask about positions and given data, and about no index bound in `e`."""
    nodes = [*walk(e)]
    inside = frozenset(n.axis for n in nodes if isinstance(n, Reduce))
    tests = dict.fromkeys(n.args[0] for n in nodes if isinstance(n, Op) and n.name == "select")
    return [t for t in tests if not free_axes(t) & inside and not any(map(_is_computed, walk(t)))]


def _is_computed(e: Expr) -> bool:
    return isinstance(e, (Ref, Reduce)) or is_float(e.dtype)


@remembered
def _unless(e: Expr, identity: float, finite: frozenset[str]) -> Expr:
    """A condition that holds wherever `e` differs from `identity` (0, inf or -inf)."""

    def unless(x: Expr, value: float, others: tuple[Expr, ...] = ()) -> Expr:
        return _unless(x, value, finite) if all(_is_finite(o, finite) for o in others) else TRUE

    def either(name: str, a: Expr, b: Expr) -> Expr:
        return op(name, a, b, dtype="bool")

    if isinstance(e, Const):
        return const(not e.value == identity, "bool")
    if not isinstance(e, Op):
        return TRUE
    if e.name == "select":
        test, then, other = e.args
        left = either("and", test, unless(then, identity))
        return either("or", left, either("and", negate(test), unless(other, identity)))
    if e.name in ("mul", "add", "sub", "div") and (identity or e.name in ("mul", "div")):
        a, b = e.args
        if identity == 0.0:
            right = TRUE if e.name == "div" else unless(b, 0.0, (a,))
            return either("and", unless(a, 0.0, (b,)), right)
        if e.name in ("add", "sub"):
            right = unless(b, identity if e.name == "add" else -identity, (a,))
            return either("and", unless(a, identity, (b,)), right)
        return unless(a, identity) if _is_positive(b) else TRUE
    if identity == 0.0:
        if e.name in ("neg", "cast", "abs"):
            return unless(e.args[0], 0.0)
        if e.name in ("exp", "exp2"):
            return unless(e.args[0], -math.inf)
        if e.name in ("add", "sub"):
            return either("or", unless(e.args[0], 0.0), unless(e.args[1], 0.0))
    return TRUE


def _is_positive(e: Expr) -> bool:
    """Whether `e` is one of several positive numbers."""
    if isinstance(e, Op) and e.name == "select":
        return all(map(_is_positive, e.args[1:]))
    return isinstance(e, Const) and e.value > 0


def _is_finite(e: Expr, finite: frozenset[str]) -> bool:
    """Whether `e` holds no running or final value that may be infinite or NaN."""
    stack, seen = [e], {e}
    while stack:
        n = stack.pop()
        if isinstance(n, Ref) and n.name not in finite:
            return False
        if not _is_replaced_maximum(n):
            below = {c for c in children(n) if ref_names(c)} - seen
            stack += below
            seen |= below
    return True


def _is_replaced_maximum(e: Expr) -> bool:
    """Whether `e` is a maximum, or something else where that is -inf."""
    if isinstance(e, Op) and e.name == "select" and isinstance(e.args[0], Op) and e.args[0].name == "eq":
        value, limit = e.args[0].args
        return value is e.args[2] and isinstance(limit, Const) and limit.value == -math.inf
    return False


@remembered
def solve(condition: Expr, axis: Axis, tiled: frozenset[Axis]) -> Range:
    """The interval of indices of `axis` outside which `condition` is false for the whole tile."""
    if isinstance(condition, Const):
        return (None, None) if condition.value else (None, _EMPTY_HIGH)
    if not isinstance(condition, Op):
        return None, None
    if axis not in free_axes(condition):
        return _all_or_nothing(condition, axis, tiled)
    if condition.name in ("and", "or"):
        left, right = (solve(a, axis, tiled) for a in condition.args)
        outward = condition.name == "or"
        return _join(left[0], right[0], "min" if outward else "max", outward), _join(
            left[1], right[1], "max" if outward else "min", outward
        )
    if condition.name == "not":
        inner = _without_not(condition)
        return (None, None) if inner is None else solve(inner, axis, tiled)
    if _is_comparison(condition):
        return _solve_comparison(condition, axis, tiled, certain=False)
    return None, None


def _all_or_nothing(condition: Op, axis: Axis, tiled: frozenset[Axis]) -> Range:
    """Every index of `axis` where a comparison without it may hold somewhere in the tile, none elsewhere."""
    if not _is_comparison(condition):
        return None, None
    possible: Expr = TRUE
    for form in _RELATIONS[condition.name](linear(op("sub", condition.args[0], condition.args[1], dtype="i64"))):
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
        inner = _without_not(condition)
        return None if inner is None else solve_certain(inner, axis, tiled)
    if _is_comparison(condition) and condition.name not in ("eq", "ne"):
        found = _solve_comparison(condition, axis, tiled, certain=True)
        return None if found == (None, None) else found
    return None


def _is_comparison(e: Op) -> bool:
    return e.name in _RELATIONS and all(a.dtype in ("i64", "i32") for a in e.args)


def _without_not(e: Op) -> Expr | None:
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
    difference = linear(op("sub", e.args[0], e.args[1], dtype="i64"))
    lower: Expr | None = None
    upper: Expr | None = None
    for form in _RELATIONS[e.name](difference):
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
