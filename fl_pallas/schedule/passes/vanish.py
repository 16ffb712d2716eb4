"""Gradients that are zero whatever the numbers are.

A softmax written by hand takes the maximum off first, and autograd sends a gradient back to the scores that equal it.
That gradient is zero, for the result does not depend on what is taken off: which follows here from the algebra of sums
and products. A gradient is written as a polynomial; its letters are what is no sum, product or quotient, and sums of
products of such over axes (`Total`). Σⱼ e(j)·(g(j)/l − Σₖ g(k)·e(k)/l²) with l = Σⱼ e(j) is then no term at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ..build import substitute
from ..dtype import is_float
from ..expr import Axis, Const, Expr, Load, Op, Reduce, free_axes, index, loads, reductions, walk
from ..program import Program, Value
from ..text import expr_text
from .grow_regions import grow_regions
from .resolve_views import inline_load, resolve_views

# Terms of a polynomial, and axes of equal extent under one sum, beyond which nothing is proved.
MAX_TERMS, MAX_ALIKE = 256, 4
# Expressions and letters that are looked at for all values of a Program: seconds. Attention takes hundreds.
MAX_STEPS = 20_000
# What is left of a coefficient when others cancel it by rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Total:
    """The sum over `axes` of a product; the axes are named by the depth of sums inside of sums."""

    axes: tuple[Axis, ...]
    product: Monomial
    depth: int


@dataclass(frozen=True)
class Divisor:
    """What something is divided by: a sum, in its terms."""

    terms: frozenset[tuple[Monomial, float]]


Letter = Expr | Total | Divisor
# Letters and their exponents.
Monomial = frozenset[tuple[Letter, int]]
Polynomial = dict[Monomial, float]
ONE: Monomial = frozenset()


class _TooLong(Exception):
    """A polynomial of too many terms, or too many of them."""


def vanishing(joint: Program, forward: tuple[str, ...], backward: tuple[str, ...]) -> frozenset[str]:
    """Names of floats that are handed to what equals something (a maximum), and are zero whatever the numbers are.

    Args:
      joint: both passes.
      forward, backward: names of the results of either.
    """
    # What PyTorch computes (the place of a maximum) is any number here, and in nothing's way.
    values = tuple(replace(v, op="input", reads=()) if v.expr is None else v for v in joint.values)
    program = resolve_views(Program(values, (*forward, *backward)))
    tests = _tests(program, _reduced(joint))
    if not any(is_float(program.by_name[name].dtype) for name in tests):
        return frozenset()
    opened = {m for region in grow_regions(program).regions for m in region.members}
    algebra = _Algebra(program, opened)
    return frozenset(v.name for v in program.values if v.name in tests and is_float(v.dtype) and algebra.is_zero(v))


def _reduced(joint: Program) -> set[str]:
    """Names of what a reduction of floats, or PyTorch from floats, makes, and of what depends on it. A test of anything
    else (a mask that is given) is as good as a number."""
    found: set[str] = set()
    for v in joint.values:
        floats = any(is_float(joint.by_name[r].dtype) for r in v.reads)
        if not found.isdisjoint(v.reads) or floats and (v.expr is None or reductions(v.expr)):
            found.add(v.name)
    return found


def _tests(program: Program, reduced: set[str]) -> set[str]:
    """Names of what asks whether two things are equal, one of them `reduced`, and of what reads the answer."""
    found: set[str] = set()
    answers: set[str] = set()
    for v in program.values:
        if v.expr is not None and (_asks(v.expr, reduced) or answers.intersection(v.reads)):
            found.add(v.name)
            if not is_float(v.dtype):
                answers.add(v.name)
    return found


def _asks(e: Expr, reduced: set[str]) -> bool:
    return any(isinstance(n, Op) and n.name == "eq" and any(m.source in reduced for m in loads(n)) for n in walk(e))


class _Algebra:
    """Polynomials of the values of a Program; the expressions of those in `opened` are looked into."""

    def __init__(self, program: Program, opened: set[str]):
        self.program, self.opened = program, opened
        self.known: dict[Expr, Polynomial] = {}
        self.fresh = itertools.count()
        self.left = MAX_STEPS

    def is_zero(self, v: Value) -> bool:
        assert v.expr is not None
        try:
            p = self.polynomial(v.expr)
            while divisor := next((a for m in p for a, _ in m if isinstance(a, Divisor)), None):
                p = _cleared(p, divisor)
            return all(any(self._is_nothing(a, m) for a, _ in m) for m in p)
        except _TooLong:
            return False

    def _is_nothing(self, test: Letter, m: Monomial) -> bool:
        """Whether `test` says that a sum of what is not negative is 0, and with it each of its terms, and the product
        `m` has a sum of such terms: a guarded division by Σⱼ e(j) takes Σⱼ e(j)·v(j) for 0 where the former is.
        """
        while isinstance(test, Load) and (value := self.program.by_name[test.source]).expr is not None:
            test = inline_load(test, value)
        if not isinstance(test, Op) or test.name != "eq":
            return False
        sides = [p for p in map(self.polynomial, test.args) if p]
        letters = [a for p in sides for k in p for a, _ in k]
        if len(sides) != 1 or len(sides[0]) != 1 or len(letters) != 1 or not isinstance(whole := letters[0], Total):
            return False
        sums = [a for a, n in m if isinstance(a, Total) and n > 0]
        return all(_is_positive(a) for a, _ in whole.product) and any(_is_part(whole, a) for a in sums)

    def polynomial(self, e: Expr) -> Polynomial:
        """`e` as a polynomial.

        Raises: _TooLong.
        """
        found = self.known.get(e)
        if found is None:
            self._spend(1)
            found = self.known[e] = self._polynomial(e)
        return found

    def _spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise _TooLong

    def _polynomial(self, e: Expr) -> Polynomial:
        if isinstance(e, Const) and abs(e.value) < float("inf"):
            return {ONE: float(e.value)} if e.value else {}
        if isinstance(e, Load) and e.source in self.opened:
            return self.polynomial(inline_load(e, self.program.by_name[e.source]))
        if isinstance(e, Reduce) and e.kind == "sum" and is_float(e.dtype):
            return self._total(self.polynomial(e.body), e.axis)
        if isinstance(e, Op) and (e.name == "select" or e.name in _ARITHMETIC) and is_float(e.dtype):
            if e.name == "select":
                test, then, other = (self._truth(e.args[0]), *map(self.polynomial, e.args[1:]))
                return _sum(_times(test, then), other, _times(_times(test, other), {ONE: -1.0}))
            args = [self.polynomial(a) for a in e.args]
            if e.name == "neg":
                return _times(args[0], {ONE: -1.0})
            if e.name == "mul":
                return _times(*args)
            if e.name == "div":
                return _times(args[0], _inverse(args[1]))
            return _sum(args[0], args[1] if e.name == "add" else _times(args[1], {ONE: -1.0}))
        return {frozenset({(e, 1)}): 1.0}

    def _truth(self, e: Expr) -> Polynomial:
        """1 where a condition holds, else 0."""
        if isinstance(e, Op) and e.name == "not":
            return _sum({ONE: 1.0}, _times(self._truth(e.args[0]), {ONE: -1.0}))
        if isinstance(e, Op) and e.name == "and":
            return _times(*map(self._truth, e.args))
        return {frozenset({(e, 1)}): 1.0}

    def _total(self, p: Polynomial, axis: Axis) -> Polynomial:
        """The sum of `p` over an axis: sums inside of sums become one, and fall apart where they share no axis."""
        out: Polynomial = {}
        for monomial, c in p.items():
            moving = [(a, n) for a, n in monomial if axis in _free(a)]
            factors, bound = [], [axis]
            for a, n in moving:
                if not isinstance(a, Total) or n < 0:
                    factors.append((a, n))
                    continue
                for _ in range(n):
                    own = {b: Axis(f"%{next(self.fresh)}", b.extent) for b in a.axes}
                    bound += own.values()
                    factors += [(_renamed(f, own), k) for f, k in a.product]
            term = {monomial.difference(moving): c}
            if not moving:
                term = _times(term, {ONE: float(axis.extent)})
            while bound and moving:
                together, bound = _component(bound, factors)
                inside = [f for f in factors if together & _free(f[0])]
                self._spend(len(factors))
                factors = [f for f in factors if not together & _free(f[0])]
                term = _times(term, {frozenset({(_named(together, _product(inside), self._spend), 1)}): 1.0})
            out = _sum(out, term)
        return out


def _is_positive(a: Letter) -> bool:
    """Whether a letter is never negative."""
    return _is_truth(a) or isinstance(a, Op) and a.name in ("exp", "exp2", "sigmoid", "abs", "sqrt")


def _is_part(whole: Total, other: Total) -> bool:
    """Whether each term of `other` is one of `whole`, times something."""
    powers = dict(other.product)
    for order in itertools.permutations(other.axes, len(whole.axes)):
        if all(a.extent == b.extent for a, b in zip(whole.axes, order)):
            own = dict(zip(whole.axes, order))
            if all(powers.get(_renamed(f, own), 0) >= n > 0 for f, n in whole.product):
                return True
    return False


_ARITHMETIC = ("add", "sub", "neg", "mul", "div")


def _component(bound: list[Axis], factors: list[tuple[Letter, int]]) -> tuple[frozenset[Axis], list[Axis]]:
    """The axes that factors tie to the first of `bound`, and the others."""
    together = frozenset(bound[:1])
    while True:
        more = together.union(*(_free(a) for a, _ in factors if together & _free(a))).intersection(bound)
        if more == together:
            return together, [b for b in bound if b not in together]
        together = more


def _named(axes: frozenset[Axis], product: Monomial, spend: Callable[[int], None]) -> Total:
    """The sum over `axes` under names that depend on nothing but what it says; `spend` is told what finding them takes.

    Raises: _TooLong.
    """
    depth = 1 + max((_depth(a) for a, _ in product), default=0)
    signs = {a: (a.extent, _sign(a, axes, product) if len(axes) > 1 else "") for a in axes}
    groups = [list(g) for _, g in itertools.groupby(sorted(axes, key=signs.__getitem__), key=signs.__getitem__)]
    if any(len(g) > MAX_ALIKE for g in groups):
        raise _TooLong
    ways = math.prod(math.factorial(len(g)) for g in groups)
    spend(ways * len(product) if ways > 1 else 0)
    orders = itertools.product(*map(itertools.permutations, groups))
    made = []
    for order in orders:
        own = {a: Axis(f"%{depth}.{n}", a.extent) for n, a in enumerate(itertools.chain(*order))}
        made.append(Total(tuple(own.values()), frozenset((_renamed(a, own), n) for a, n in product), depth))
    return min(made, key=_text) if len(made) > 1 else made[0]


def _sign(a: Axis, axes: frozenset[Axis], product: Monomial) -> str:
    """What a product says of an axis, no other of `axes` told from the next: what differs in it needs no trying out."""
    own = {b: Axis("%own" if b == a else "%other", b.extent) for b in axes}
    return _product_text(frozenset((_renamed(f, own), n) for f, n in product if a in _free(f)))


def _depth(a: Letter) -> int:
    """How many sums lie inside of each other, those of a divisor too: their axes must not take each other's names."""
    if isinstance(a, Divisor):
        return max((_depth(f) for m, _ in a.terms for f, _ in m), default=0)
    return a.depth if isinstance(a, Total) else 0


def _free(a: Letter) -> frozenset[Axis]:
    if isinstance(a, Total):
        return frozenset().union(*(_free(f) for f, _ in a.product)).difference(a.axes)
    if isinstance(a, Divisor):
        return frozenset().union(*(_free(f) for m, _ in a.terms for f, _ in m))
    return free_axes(a)


def _renamed(a: Letter, own: Mapping[Axis, Axis]) -> Letter:
    if isinstance(a, Total):
        return replace(a, product=frozenset((_renamed(f, own), n) for f, n in a.product))
    if isinstance(a, Divisor):
        return Divisor(frozenset((frozenset((_renamed(f, own), n) for f, n in m), c) for m, c in a.terms))
    return substitute(a, {old: index(new) for old, new in own.items()})


def _text(a: Letter) -> str:
    if isinstance(a, Total):
        return f"sum{[x.extent for x in a.axes]}({_product_text(a.product)})"
    if isinstance(a, Divisor):
        return " + ".join(sorted(f"{c} {_product_text(m)}" for m, c in a.terms))
    return expr_text(a)


def _product_text(m: Monomial) -> str:
    return " ".join(sorted(f"{_text(a)}^{n}" for a, n in m))


def _sum(*polynomials: Polynomial) -> Polynomial:
    out: Polynomial = {}
    for p in polynomials:
        for m, c in p.items():
            before = out.pop(m, 0.0)
            if abs(before + c) > ROUNDING * max(abs(before), abs(c)):
                out[m] = before + c
    if len(out) > MAX_TERMS:
        raise _TooLong
    return out


def _times(p: Polynomial, q: Polynomial) -> Polynomial:
    if len(p) * len(q) > MAX_TERMS:
        raise _TooLong
    return _sum(*({_product((*m, *k)): c * d} for m, c in p.items() for k, d in q.items()))


def _product(factors: Iterable[tuple[Letter, int]]) -> Monomial:
    out: dict[Letter, int] = {}
    for a, n in factors:
        out[a] = out.get(a, 0) + n
        if _is_truth(a):
            out[a] = 1
    return frozenset((a, n) for a, n in out.items() if n)


def _is_truth(a: Letter) -> bool:
    """Whether a letter is 0 or 1, and so its own square."""
    return not isinstance(a, Total | Divisor) and a.dtype == "bool"


def _inverse(p: Polynomial) -> Polynomial:
    if len(p) != 1 or any(_is_truth(a) for m in p for a, _ in m):
        return {frozenset({(Divisor(frozenset(p.items())), -1)}): 1.0}
    ((m, c),) = p.items()
    return {frozenset((a, -n) for a, n in m): 1 / c}


def _cleared(p: Polynomial, divisor: Divisor) -> Polynomial:
    """`p` times the power of a divisor that leaves none of it, which is as much zero as `p` is."""
    powers = {m: next((n for a, n in m if a == divisor), 0) for m in p}
    lowest = min(powers.values())
    out: Polynomial = {}
    for m, c in p.items():
        term = {frozenset((a, n) for a, n in m if a != divisor): c}
        for _ in range(powers[m] - lowest):
            term = _times(term, dict(divisor.terms))
        out = _sum(out, term)
    return out
