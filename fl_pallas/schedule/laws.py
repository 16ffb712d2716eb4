"""The algebra streaming rests on: how an expression separates from values that move while a loop runs.

Let x be what depends on the loop axis and r what moves with the loop (running reductions). Laws used:

  exp(a + b)       = exp(a)·exp(b)              exp turns + into ×
  Σ h·f(x)         = h·Σ f(x)                   factors free of the loop axis hoist out of a sum
  Σ f·(g + h)      = Σ f·g + Σ f·h              × distributes over +
  max(a(x) + b)    = max a(x) + b               + distributes over max and min
  max(h·f(x))      = h·max f(x)   if h >= 0     non-negative factors commute with max
  max(exp u)       = exp(max u)                 exp is increasing
  Σ w·(a + b')     = Σ w·(a + b) + (b' - b)·Σ w   a sum taken about b moves to b'
  max(c·x)         = c·max x      c > 0 constant, also through masks
  select(c, exp(u), 0) = exp(select(c, u, -inf))
  select(c(r), 0, f)   commutes with every sum: conditions free of the loop axis hoist out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .build import negate, op, select
from .dtype import is_float, itemsize
from .expr import Axis, Const, Expr, Load, Op, Reduce, Ref, const, free_axes, loads, walk
from .remember import remembered

MAX_TERMS = 8
MAX_SHIFTS = 2
# Operations that make infinities, or NaN, of finite numbers.
UNBOUNDED = {
    "div",
    "quotient",
    "pow",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sqrt",
    "rsqrt",
    "tan",
    "asin",
    "acos",
}
# Scores of this size come from masks alone.
LARGE = 2.0**10
# Up to here float32 has every whole number.
EXACT = 2.0**24


class Nonseparable(Exception):
    """No law takes the moving values out of an expression; the argument says where it stopped."""


@dataclass(frozen=True)
class Scope:
    """What moves: the loop axis, the names of the running references, and the compute type."""

    axis: Axis
    running: frozenset[str]
    dtype: str

    def varies(self, e: Expr) -> bool:
        """Whether `e` depends on the loop axis."""
        return self.axis in free_axes(e)

    def moves(self, e: Expr) -> bool:
        """Whether `e` depends on a running reference."""
        return any(isinstance(n, Ref) and n.name in self.running for n in walk(e))

    def const(self, value: float) -> Expr:
        return const(value, self.dtype)

    def op(self, name: str, *args: Expr) -> Expr:
        return op(name, *args, dtype=self.dtype)


@dataclass(frozen=True)
class Shift:
    """A factor a(x) + b(r): taken about the running value of b, moved when b moves."""

    varying: Expr
    moving: Expr


@dataclass(frozen=True)
class Term:
    """hoisted · exp(exponent + offset) · Π factors · Π shifts, and 0 where a gate is closed.

    exponent and factors vary with the loop axis and do not move; hoisted, offset and the gates' conditions are free of
    the loop axis. Where it is `rounded`, that is done to the power times the factors, before these are multiplied by
    the `last` one. Where it is `chosen`, an element is 0 by choice where the exponent, if there is one, is -inf; `kept`
    are the conditions of that, but for those without which the exponent is never -inf.
    """

    hoisted: Expr
    exponent: Expr | None = None
    offset: Expr | None = None
    factors: tuple[Expr, ...] = ()
    shifts: tuple[Shift, ...] = ()
    gates: tuple[Expr, ...] = ()
    rounded: bool = False
    last: Expr | None = None
    chosen: bool = False
    kept: tuple[Expr, ...] = ()


def separate(e: Expr, scope: Scope) -> list[Term]:
    """`e` as a sum of terms.

    Raises: Nonseparable.
    """
    one = scope.const(1.0)
    if not scope.varies(e):
        return [Term(e)]
    if not scope.moves(e):
        return [Term(one, factors=(e,))]
    if not isinstance(e, Op):
        raise Nonseparable("a nested reduction depends on a running value")
    if e.name == "mul":
        return _products(separate(e.args[0], scope), separate(e.args[1], scope), scope)
    if e.name == "div":
        return _products(separate(e.args[0], scope), [_inverse(separate(e.args[1], scope), scope)], scope)
    if e.name == "neg":
        return [replace(t, hoisted=scope.op("neg", t.hoisted)) for t in separate(e.args[0], scope)]
    if e.name in ("add", "sub"):
        return _sum(e, scope)
    if e.name == "exp":
        varying, rest = split_sum(e.args[0], scope)
        return [Term(one, exponent=varying, offset=rest)]
    if e.name == "pow" and isinstance(e.args[1], Const) and e.args[1].value in (2, 3, 2.0, 3.0):
        base = separate(e.args[0], scope)
        out = base
        for _ in range(int(e.args[1].value) - 1):
            out = _products(out, base, scope)
        return out
    if e.name == "select":
        return _selection(e, scope)
    raise Nonseparable(f"`{e.name}` of a value that varies along the loop and moves with it")


def _products(left: list[Term], right: list[Term], scope: Scope) -> list[Term]:
    if len(left) * len(right) > MAX_TERMS:
        raise Nonseparable("too many terms")
    return [_product(a, b, scope) for a in left for b in right]


def _product(a: Term, b: Term, scope: Scope) -> Term:
    if len(a.shifts) + len(b.shifts) > MAX_SHIFTS:
        raise Nonseparable("too high a power of a moving difference")
    return Term(
        scope.op("mul", a.hoisted, b.hoisted),
        _plus(a.exponent, b.exponent, scope),
        _plus(a.offset, b.offset, scope),
        a.factors + b.factors,
        a.shifts + b.shifts,
        a.gates + b.gates,
        chosen=(a.chosen or b.chosen) and all(t.chosen or t.exponent is None for t in (a, b)),
        kept=a.kept + b.kept,
    )


def _plus(a: Expr | None, b: Expr | None, scope: Scope) -> Expr | None:
    """a + b, of the same with factors: that with their sum, about whose maximum it is then taken."""
    if a is None or b is None:
        return b if a is None else a
    (core, c), (other, d) = positive_factor(a), positive_factor(b)
    return scope.op("mul", core, scope.const(c + d)) if core is other else scope.op("add", a, b)


def _inverse(terms: list[Term], scope: Scope) -> Term:
    if len(terms) != 1 or terms[0].shifts or terms[0].gates:
        raise Nonseparable("division by a sum of separable terms")
    t, one = terms[0], scope.const(1.0)
    negated = [None if p is None else scope.op("neg", p) for p in (t.exponent, t.offset)]
    inverted = tuple(scope.op("div", one, f) for f in t.factors)
    return Term(scope.op("div", one, t.hoisted), negated[0], negated[1], inverted)


def _sum(e: Op, scope: Scope) -> list[Term]:
    try:
        varying, moving = split_sum(e, scope)
    except Nonseparable:
        varying = moving = None
    if varying is not None and moving is not None:
        if stable(moving, scope):
            return [Term(scope.const(1.0), shifts=(Shift(varying, moving),))]
        raise Nonseparable("a difference from a running value that is no mean, maximum or logarithm would cancel")
    right = separate(e.args[1], scope)
    if e.name == "sub":
        right = [replace(t, hoisted=scope.op("neg", t.hoisted)) for t in right]
    return [*separate(e.args[0], scope), *right]


def _selection(e: Op, scope: Scope) -> list[Term]:
    test, then, other = e.args
    if scope.varies(test) and scope.moves(test):
        raise Nonseparable("a condition on a value that varies along the loop and moves with it")
    out = []
    for branch, condition in ((then, test), (other, negate(test))):
        if not (isinstance(branch, Const) and branch.value == 0):
            out += [_gated(t, condition, scope) for t in separate(branch, scope)]
    return out


def _gated(t: Term, condition: Expr, scope: Scope) -> Term:
    if not scope.varies(condition):
        return replace(t, gates=(*t.gates, condition))
    # What is not selected may be infinite, and 0 · inf is NaN.
    shifts = tuple(replace(s, varying=select(condition, s.varying, scope.const(0.0))) for s in t.shifts)
    t = replace(t, shifts=shifts)
    if t.exponent is None and (shifts or scope.moves(t.hoisted)):
        # So may be what it is multiplied by, once the loop has ended.
        t = replace(t, chosen=True, kept=(*t.kept, condition))
    if t.exponent is not None:
        exponent = select(condition, t.exponent, scope.const(-math.inf))
        kept = (*t.kept, condition) if exponent is not t.exponent and _may_be_least(t.exponent) else t.kept
        factors = tuple(_finite_where(condition, f, scope) for f in t.factors)
        return replace(t, exponent=exponent, factors=factors, chosen=True, kept=kept)
    if t.factors:
        first, *rest = t.factors
        rest = [_finite_where(condition, f, scope) for f in rest]
        return replace(t, factors=(select(condition, first, scope.const(0.0)), *rest))
    return replace(t, factors=(select(condition, scope.const(1.0), scope.const(0.0)),))


def _finite_where(condition: Expr, f: Expr, scope: Scope) -> Expr:
    """A factor that is not infinite where something else is 0 by choice; data may be, as the user knows who chose."""
    risky = _may_overflow(f) or _is_data(f) and free_axes(condition) <= free_axes(f)
    return select(condition, f, scope.const(1.0)) if risky else f


def _is_data(e: Expr) -> bool:
    """Whether floats are loaded for `e`, other than for its sums."""
    if isinstance(e, Op):
        return any(map(_is_data, e.args))
    return isinstance(e, Load) and is_float(e.dtype)


def _may_be_least(e: Expr) -> bool:
    """Whether a mask may have made some of `e` -inf."""
    return _is_filled(e) or any(isinstance(n, Const) and n.value == -math.inf for n in _terms(e))


def _may_overflow(e: Expr) -> bool:
    """Whether `e` may be infinite or NaN where all that it is made of is finite."""
    return any(isinstance(n, Op) and n.name in UNBOUNDED for n in walk(e))


def split_sum(u: Expr, scope: Scope) -> tuple[Expr | None, Expr | None]:
    """`u` as a(x) + b, a varying and not moving, b free of the loop axis; None for an absent part.

    Raises: Nonseparable.
    """
    if not scope.varies(u):
        return None, u
    if not scope.moves(u):
        return u, None
    if not isinstance(u, Op):
        raise Nonseparable("a nested reduction depends on a running value")
    if u.name in ("add", "sub"):
        (a, b), (c, d) = split_sum(u.args[0], scope), split_sum(u.args[1], scope)
        return _signed(u.name, a, c, scope), _signed(u.name, b, d, scope)
    if u.name == "neg":
        a, b = split_sum(u.args[0], scope)
        return _map(lambda x: scope.op("neg", x), a, b)
    if u.name in ("mul", "div"):
        for n in (0, 1) if u.name == "mul" else (0,):
            scale = u.args[1 - n]
            if not scope.varies(scale) and not scope.moves(scale):
                a, b = split_sum(u.args[n], scope)
                return _map(lambda x, s=scale: scope.op(u.name, x, s), a, b)
    if u.name == "select" and not scope.moves(u.args[0]):
        test, then, other = u.args
        for kept, dead, condition in ((then, other, test), (other, then, negate(test))):
            if isinstance(dead, Const) and dead.value == -math.inf:
                a, b = split_sum(kept, scope)
                a = scope.const(0.0) if a is None else a
                return select(condition, a, dead), b
        (a, b), (c, d) = split_sum(then, scope), split_sum(other, scope)
        if b is d and a is not None and c is not None:
            return select(test, a, c), b
    raise Nonseparable(f"`{u.name}` does not split into a varying and a moving part")


def _signed(name: str, a: Expr | None, b: Expr | None, scope: Scope) -> Expr | None:
    if b is None:
        return a
    if a is None:
        return scope.op("neg", b) if name == "sub" else b
    return scope.op(name, a, b)


def _map(f: Callable[[Expr], Expr], *parts: Expr | None) -> tuple[Expr | None, Expr | None]:
    a, b = (None if p is None else f(p) for p in parts)
    return a, b


def stable(e: Expr, scope: Scope) -> bool:
    """Whether a running value may serve as a reference for differences.

    A maximum, a ratio of sums (a running mean) or a logarithm stays near what it will become; a bare
    partial sum does not, and differences from it would cancel. Decided by the degree in the sums.
    """
    return _degree(e, scope) == 0


def _degree(e: Expr, scope: Scope) -> int | None:
    if isinstance(e, Ref):
        return 1 if e.name in scope.running and not e.name.startswith("m") else 0
    if not isinstance(e, Op) or not scope.moves(e):
        return 0
    degrees = [_degree(a, scope) for a in e.args]
    if any(d is None for d in degrees):
        return None
    known = [d for d in degrees if d is not None]
    if e.name == "mul":
        return sum(known)
    if e.name == "div":
        return known[0] - known[1]
    if e.name in ("add", "sub", "max", "min"):
        return known[0] if known[0] == known[1] else None
    if e.name in ("neg", "abs"):
        return known[0]
    if e.name == "select":
        return known[1] if known[1] == known[2] else None
    return 0 if e.name == "log" or not any(known) else None


@remembered
def non_negative(e: Expr, positive: frozenset[str]) -> bool:
    """Whether `e` is provably >= 0 (or NaN); `positive` names references known to be."""
    if isinstance(e, Const):
        return e.value >= 0
    if isinstance(e, Ref):
        return e.name in positive
    if isinstance(e, Reduce):
        return e.kind != "prod" and non_negative(e.body, positive)
    if not isinstance(e, Op):
        return False
    if e.name in ("exp", "exp2", "abs", "sigmoid", "sqrt", "rsqrt") or _is_square(e):
        return True
    if e.name in ("mul", "div", "add", "min"):
        return all(non_negative(a, positive) for a in e.args)
    if e.name == "max":
        return any(non_negative(a, positive) for a in e.args)
    if e.name == "select":
        return all(non_negative(a, positive) for a in e.args[1:])
    return False


def _is_square(e: Op) -> bool:
    return e.name == "mul" and e.args[0] is e.args[1] and is_float(e.dtype)


def holds_large(e: Expr) -> bool:
    """Whether a number is among the terms of `e` that scores reach by masks alone."""
    return any(isinstance(n, Const) and is_float(n.dtype) and LARGE <= abs(n.value) < math.inf for n in _terms(e))


def reads_beyond(e: Expr, reference: Expr) -> bool:
    """Whether data that a mask may have made large is among the terms of `e`, other than in sums: data along axes that
    `reference` lacks, or what is added to scores or put in their place."""
    own = free_axes(reference)
    beyond = (n for n in _terms(e) if isinstance(n, Load) and is_float(n.dtype) and not free_axes(n) <= own)
    return _is_filled(e) or next(beyond, None) is not None


@remembered
def _is_filled(e: Expr) -> bool:
    """Whether data is added to `e`, or put in the place of some of it; a factor (a temperature, a slope) is not, nor
    what is taken from all (a row's maximum is as large as what it is of)."""
    if isinstance(e, Op) and is_float(e.dtype):
        if e.name in ("mul", "div") or e.name == "sub" and isinstance(e.args[1], Load):
            return any(_is_filled(a) for a in e.args if not isinstance(a, Load))
        chosen = e.args[1:] if e.name == "select" else e.args
        return e.name in ("select", "add", "sub", "max", "min", "neg", "cast") and any(map(_is_filled, chosen))
    return isinstance(e, Load) and is_float(e.dtype)


def _terms(e: Expr) -> Iterator[Expr]:
    """What `e` is made of element by element: its nodes, each once, but for those inside of sums and of indices."""
    seen, stack = {e}, [e]
    while stack:
        n = stack.pop()
        yield n
        if isinstance(n, Op) and is_float(n.dtype):
            new = [a for a in n.args if a not in seen]
            seen.update(new)
            stack += new


def may_be_large(e: Expr, reference: Expr) -> bool:
    """Whether masks may have made `e`, over axes that `reference` lacks, large and finite."""
    return holds_large(e) or reads_beyond(e, reference)


def is_narrow(e: Expr) -> bool:
    """Whether data of 16 bits is read for `e`."""
    return any(is_float(n.dtype) and itemsize(n.dtype) == 2 for n in loads(e))


def power_of_difference(x: Expr, reference: Expr, factor: float, kind: str) -> Expr:
    """exp((x - reference) * factor) in the type `kind`, x over axes that the reference lacks, as a power of two.

    x · c - reference · c is one instruction an element, which rounds the latter product alone: about a reference that a
    mask made (of a row that sees nothing) the difference of equal numbers would be powers of two, or infinite. About
    one of sharp scores it would be a little more than 1 or less, and weights that are computed again would not have the
    sum that is kept: in 32 bits that is seen.
    """
    base = factor * math.log2(math.e)

    def scaled(by: Expr) -> Expr:
        return op("sub", op("mul", x, by, dtype=kind), op("mul", reference, by, dtype=kind), dtype=kind)

    if holds_large(x) or not is_narrow(x):
        exponent = op("mul", op("sub", x, reference, dtype=kind), const(base, kind), dtype=kind)
    elif reads_beyond(x, reference):
        # Numbers beyond the limit are so far apart that the base does not matter.
        near = op("lt", op("abs", reference, dtype=kind), const(EXACT / base, kind), dtype="bool")
        exponent = scaled(select(near, const(base, kind), const(1.0, kind)))
    else:
        exponent = scaled(const(base, kind))
    return op("exp2", exponent, dtype=kind)


@remembered
def positive_factor(e: Expr) -> tuple[Expr, float]:
    """`e` as core · c, c a positive constant: c·max x = max c·x, and select(p, c·x, -inf) = c·select(p, x, -inf)."""
    if isinstance(e, Op) and e.name in ("mul", "div") and isinstance(e.args[1], Const):
        value = float(e.args[1].value)
        if 0 < value < math.inf:
            core, c = positive_factor(e.args[0])
            return core, (c * value if e.name == "mul" else c / value)
    if isinstance(e, Op) and e.name == "select":
        test, then, other = e.args
        for kept, dead, condition in ((then, other, test), (other, then, negate(test))):
            if isinstance(dead, Const) and dead.value == -math.inf and not isinstance(kept, Const):
                core, c = positive_factor(kept)
                return (select(condition, core, dead), c) if c != 1.0 else (e, 1.0)
    return e, 1.0
