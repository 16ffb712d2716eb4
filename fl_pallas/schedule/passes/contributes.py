"""What contributes to a loop's accumulators: the condition under which an update is not the identity.

It is read off the expression where a mask stands next to a sum, or behind an exponential; else what the update can be
where a mask hides is followed up to it (`schedule/reach.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..build import FALSE, TRUE, negate, op
from ..dtype import is_float
from ..expr import Axis, Const, Expr, Load, Op, Reduce, Ref, children, const, free_axes, loads, ref_names, walk
from ..plan import FLOOR, HIDDEN, LOWEST, Accumulator, Anchor, Loop
from ..positions import is_of_positions
from ..reach import FINITE, MOST, Reach, Reaches, reach
from ..remember import remembered
from .unseeing import perhaps_unseeing

_IDENTITIES = {"sum": 0.0, "max": -math.inf, "min": math.inf}


def about_finite(loop: Loop, _: frozenset[Axis]) -> Loop:
    """`loop` with `finite`, if more can be said of what contributes where earlier loops' results are finite."""
    own = {n for s in loop.steps for n in (s.name, f"{s.name}.old")}
    read = (n for s in loop.steps if isinstance(s, Accumulator) for n in sorted(ref_names(s.update) - own))
    about = replace(loop, finite=tuple(dict.fromkeys(read)))
    return about if contribution(about) is not contribution(loop) else loop


def about_settled(loop: Loop, _: frozenset[Axis]) -> Loop:
    """`loop` with `settled`, if more can be said of what contributes where its maxima are above what masks put in the
    place of scores (-1e9, the least number of a type): weights of that are 0 then."""
    least: dict[str, float] = {}
    for s in loop.steps:
        if isinstance(s, Accumulator) and s.kind == "max" and s.correct is None:
            masked = (
                reach(s.update, t, outcome, lambda _: None) for t in _selecting(s.update) for outcome in (True, False)
            )
            hidden = [r.high for r in masked if not r.nan and -math.inf < r.high <= HIDDEN]
            least |= {s.name: max(hidden) / 2} if hidden else {}
    about = replace(loop, settled=tuple(least.items()))
    return about if least and contribution(about) is not contribution(loop) else loop


def about_above(loop: Loop, tiled: frozenset[Axis]) -> Loop:
    """`loop` with `above`, if more can be said of what contributes where rows' maxima, which another kernel has made,
    are finite, or above what masks put in the place of scores."""
    updates = [s.update for s in loop.steps if isinstance(s, Accumulator)]
    nodes = dict.fromkeys(n for e in updates for n in walk(e))
    is_hidden = any(isinstance(n, Const) and -math.inf < n.value <= HIDDEN for n in nodes)
    least = FLOOR if is_hidden else LOWEST
    unseeing = frozenset[Load]().union(*map(perhaps_unseeing, updates))
    if not is_hidden and not unseeing:
        return loop
    seeing = replace(loop, above=tuple((n, least) for n in nodes if n in unseeing))
    if contribution(seeing) is contribution(loop):
        seeing = loop
    # Not what would have to be looked at all along the axis for each tile of the grid anew.
    given = (n for n in nodes if isinstance(n, Load) and is_float(n.dtype) and n not in unseeing)
    own = (n for n in given if loop.axis not in free_axes(n) or not free_axes(n) & (tiled - {loop.axis}))
    asked = tuple((n, least) for n in own if is_hidden)
    # Most often all of them together tell nothing.
    if contribution(replace(seeing, above=(*seeing.above, *asked))) is contribution(seeing):
        return seeing
    alone = (a for a in asked if contribution(replace(seeing, above=(*seeing.above, a))) is not contribution(seeing))
    return replace(seeing, above=(*seeing.above, *alone))


# What the bounds of a loop may rest on, for a kernel to ask; with the axes of which it takes tiles.
ASSUMING: tuple[Callable[[Loop, frozenset[Axis]], Loop], ...] = (about_finite, about_settled, about_above)


def contribution(loop: Loop) -> Expr:
    """A condition without which every accumulator of `loop` receives its identity."""
    condition: Expr = FALSE
    settled = dict(loop.settled)
    finite = frozenset((*loop.finite, *(s.name for s in loop.steps if isinstance(s, Anchor))))
    for step in loop.steps:
        if isinstance(step, Accumulator):
            least = settled.get(step.name, -math.inf)
            about = (*loop.settled, *loop.above)
            part = contributes(step.update, step.kind, finite, about, least)
            condition = op("or", condition, part, dtype="bool")
    return condition


def contributes(
    update: Expr,
    kind: str,
    finite: frozenset[str] = frozenset(),
    about: tuple[tuple[str | Expr, float], ...] = (),
    least: float = -math.inf,
) -> Expr:
    """A condition without which `update` is the identity of `kind`, or no more than `least`, of a maximum.

    Args:
      finite: names of values that are.
      about: values, by name, and loads that are no less than this, and finite.

    Loaded data is taken to be finite, but for what a row has that may see nothing. A running or final value is not,
    unless it is one of `finite`, and then it is no sum that is 0 either: -inf - (-inf) and 0 · inf are NaN, as in the
    wholly masked row of a softmax, and must be kept.
    """
    if kind in _IDENTITIES:
        identity = _IDENTITIES[kind]
        floor = max(identity, least) if kind == "max" else identity
        unseeing = perhaps_unseeing(update) - {e for e, _ in about if isinstance(e, Load)}
        condition = _unless(update, identity, finite, unseeing)
        return _where_masked(condition, update, (identity, floor), finite, about, unseeing)
    if kind in ("any", "all"):
        condition, nothing = (update, 0.0) if kind == "any" else (negate(update), 1.0)
        return _where_masked(condition, update, (nothing, nothing), finite, about, frozenset())
    return TRUE


@remembered
def _where_masked(
    condition: Expr,
    update: Expr,
    nothing: tuple[float, float],
    finite: frozenset[str],
    about: tuple[tuple[str | Expr, float], ...],
    unseeing: frozenset[Load],
) -> Expr:
    """`condition`, and that no mask in `update` makes it `nothing`, from the one to the other number, whatever lies
    between: a maximum with 0, a sigmoid, a test for what the mask has put there."""
    known = dict(about)

    def whole(e: Expr) -> Reach | None:
        least = known.get(e.name if isinstance(e, Ref) else e)
        if least is not None:
            return Reach(least, MOST)
        if e in unseeing:
            return Reach(-math.inf, MOST)
        return FINITE if isinstance(e, Ref) and e.name in finite or _is_replaced_maximum(e) else None

    reaches = Reaches(update, whole)
    for test in _selecting(update):
        for outcome in (True, False):
            excluded = negate(test) if outcome else test
            if not _asks(condition, excluded):
                found = reaches.where(test, outcome).of(update)
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
    return [
        t for t in tests if not free_axes(t) & inside and (is_of_positions(t) or not any(map(_is_computed, walk(t))))
    ]


def _is_computed(e: Expr) -> bool:
    return isinstance(e, Ref) or isinstance(e, Reduce) and e.kind not in ("any", "all") or is_float(e.dtype)


@remembered
def _unless(e: Expr, identity: float, finite: frozenset[str], unseeing: frozenset[Load]) -> Expr:
    """A condition that holds wherever `e` differs from `identity` (0, inf or -inf)."""

    def unless(x: Expr, value: float, others: tuple[Expr, ...] = ()) -> Expr:
        are_finite = all(
            _is_finite(o, finite) and unseeing.isdisjoint(loads(o)) and not _diverges(o, finite, unseeing)
            for o in others
        )
        return _unless(x, value, finite, unseeing) if are_finite else TRUE

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


def _diverges(e: Expr, finite: frozenset[str], unseeing: frozenset[Load]) -> bool:
    """Whether a mask makes `e` infinite, or has the logarithm of 0 in it, or a quotient by 0: 0 · log(0) is NaN, as
    PyTorch's.

    Where a selection keeps it out of the result, `_where_masked` sees that.
    """
    if any(_unless(e, value, finite, unseeing) is not TRUE for value in (-math.inf, math.inf)):
        return True

    def vanishes(x: Expr) -> bool:
        if isinstance(x, Op) and x.name == "sqrt":
            return vanishes(x.args[0])
        if isinstance(x, Op) and x.name == "mul":
            return any(map(vanishes, x.args))
        return not isinstance(x, Const) and _unless(x, 0.0, finite, unseeing) is not TRUE

    divisors = {"log": 0, "log2": 0, "div": 1, "quotient": 1}
    return any(isinstance(n, Op) and n.name in divisors and vanishes(n.args[divisors[n.name]]) for n in walk(e))


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
