"""Integer algebra on index expressions: ranges, and a normal form that undoes views.

Only exact identities over the integers are used; floor division and modulo are Python's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .expr import Const, Expr, Index, Load, Op, Size, const, raw_op

Bounds = tuple[int, int] | None
Linear = tuple[dict[Expr, int], int]
# What a size known at launch stays below, so that 32 bits hold sums of a few.
MAX_SIZE = 2**28


# Inclusive, of each type; and the types of so few bits that sums and products of what they hold often have no room.
RANGES = {"u8": (0, 255)} | {f"i{n}": (-(1 << n - 1), (1 << n - 1) - 1) for n in (8, 16, 32, 64)}
NARROW = ("u8", "i8", "i16")


def bounds(e: Expr) -> Bounds:
    """Inclusive range of an integer or bool expression over all its axes, or None if unknown."""
    if isinstance(e, Const):
        return (int(e.value), int(e.value)) if not isinstance(e.value, float) else None
    if isinstance(e, Index):
        roomy = e.axis.size is None or e.axis.extent > e.axis.size.hint
        return 0, (e.axis.extent if roomy else MAX_SIZE) - 1
    if isinstance(e, Size):
        return -MAX_SIZE, MAX_SIZE
    if isinstance(e, Load) and e.dtype in NARROW:
        return RANGES[e.dtype]
    if not isinstance(e, Op):
        return None
    if "_bounds" not in e.__dict__:
        object.__setattr__(e, "_bounds", _op_bounds(e))
    return e.__dict__["_bounds"]


def _op_bounds(e: Op) -> Bounds:
    args = [bounds(a) for a in e.args]
    if e.name == "select":
        return (min(args[1][0], args[2][0]), max(args[1][1], args[2][1])) if args[1] and args[2] else None
    if e.name in ("min", "max") and e.dtype != "bool" and any(args):
        # One of the two is between these in any case: a loaded position that is clamped.
        args = [a or RANGES["i64"] for a in args]
    if any(a is None for a in args):
        return (0, 1) if e.dtype == "bool" else None
    return combine_bounds(e.name, [a for a in args if a is not None], e.dtype)


def combine_bounds(name: str, args: list[tuple[int, int]], dtype: str) -> Bounds:
    """Range of the integer operation `name` on arguments with the given ranges, or None."""
    (a, b), (c, d) = args[0], args[1] if len(args) > 1 else (0, 0)
    if name == "add":
        return a + c, b + d
    if name == "sub":
        return a - d, b - c
    if name == "neg":
        return -b, -a
    if name == "abs":
        return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
    if name == "mul":
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if name == "max":
        return max(a, c), max(b, d)
    if name == "min":
        return min(a, c), min(b, d)
    if name == "and" and dtype != "bool" and max(a, c) >= 0:
        return 0, min(n for low, n in ((a, b), (c, d)) if low >= 0)  # of one that is not negative, no more bits
    if name == "shr" and c == d and 0 <= c < 64:
        return a >> c, b >> c
    if name == "floordiv" and c == d and c > 0:
        return a // c, b // c
    if name == "mod" and c == d and c > 0:
        return (a % c, b % c) if a // c == b // c else (0, c - 1)
    return (0, 1) if dtype == "bool" else None


def linear(e: Expr) -> Linear:
    """`e` as a sum of integer multiples of atoms, and a constant."""
    if isinstance(e, Const):
        return {}, int(e.value)
    if isinstance(e, Op) and e.name in ("add", "sub"):
        (ta, ca), (tb, cb) = linear(e.args[0]), linear(e.args[1])
        sign = 1 if e.name == "add" else -1
        terms = dict(ta)
        for atom, k in tb.items():
            terms[atom] = terms.get(atom, 0) + sign * k
        return {t: k for t, k in terms.items() if k}, ca + sign * cb
    if isinstance(e, Op) and e.name == "neg":
        terms, c = linear(e.args[0])
        return {t: -k for t, k in terms.items()}, -c
    if isinstance(e, Op) and e.name == "mul" and isinstance(e.args[1], Const):
        terms, c = linear(e.args[0])
        k = int(e.args[1].value)
        return ({t: v * k for t, v in terms.items()}, c * k) if k else ({}, 0)
    return {e: 1}, 0


def from_linear(lin: Linear, dtype: str) -> Expr:
    """Rebuild an expression from its linear form, joining n·(x // n) + x % n to x, and m·((x // m + c) % n) + x % m to
    (x + c·m) % (m·n): a matrix that is padded, and viewed by other rows twice."""
    terms, c = dict(lin[0]), lin[1]
    for atom in list(terms):
        if (joined := _joined(atom, terms)) is not None:
            high, whole = joined
            k = terms.pop(atom)
            del terms[high]
            terms[whole] = terms.get(whole, 0) + k
            return from_linear(({t: v for t, v in terms.items() if v}, c), dtype)
        if isinstance(atom, Op) and atom.name == "mod" and atom in terms:
            quotient = raw_op("floordiv", atom.args, atom.dtype)
            n, k = atom.args[1], terms[atom]
            if isinstance(n, Const) and terms.get(quotient, 0) == k * int(n.value):
                del terms[atom], terms[quotient]
                inner, ic = linear(atom.args[0])
                for t, v in inner.items():
                    terms[t] = terms.get(t, 0) + v * k
                c += ic * k
                return from_linear(({t: v for t, v in terms.items() if v}, c), dtype)
    out: Expr | None = None
    for atom, k in sorted(terms.items(), key=lambda item: -item[1]):
        scaled = atom if abs(k) == 1 else raw_op("mul", (atom, const(abs(k), dtype)), dtype)
        if out is None:
            out = scaled if k > 0 else raw_op("neg", (scaled,), dtype)
        else:
            out = raw_op("add" if k > 0 else "sub", (out, scaled), dtype)
    if out is None:
        return const(c, dtype)
    return raw_op("add" if c > 0 else "sub", (out, const(abs(c), dtype)), dtype) if c else out


def _joined(low: Expr, terms: Mapping[Expr, int]) -> tuple[Expr, Expr] | None:
    """(x // m + c) % n, among `terms` m times as often as x % m is, and (x + c·m) % (m·n)."""
    if not isinstance(low, Op) or low.name != "mod" or not isinstance(low.args[1], Const):
        return None
    (x, m), times = low.args, int(low.args[1].value)
    for high, k in terms.items():
        if isinstance(high, Op) and high.name == "mod" and k == terms[low] * times and isinstance(high.args[1], Const):
            quotients, c = linear(high.args[0])
            if quotients == {raw_op("floordiv", (x, m), low.dtype): 1}:
                return high, mod(_plus(x, c * times, low.dtype), times * int(high.args[1].value), low.dtype)
    return None


def _plus(x: Expr, more: int, dtype: str) -> Expr:
    terms, c = linear(x)
    return from_linear((terms, c + more), dtype)


def linear_bounds(lin: Linear, facts: tuple[Linear, ...] = ()) -> Bounds:
    """Range of a linear form, each atom taken over its own range, where all `facts` are at most 0."""
    terms = {t: k for t, k in lin[0].items() if k}
    lo = hi = lin[1]
    for atom, k in terms.items():
        b = bounds(atom)
        if b is None:
            return None
        lo, hi = lo + min(k * b[0], k * b[1]), hi + max(k * b[0], k * b[1])
    for fact, c in facts:
        for atom in terms.keys() & fact.keys():
            # So many of the form, less so many of the fact, have none of this atom.
            own = math.lcm(terms[atom], fact[atom]) // abs(terms[atom])
            times = own * terms[atom] // fact[atom]
            rest = {t: own * terms.get(t, 0) - times * fact.get(t, 0) for t in {**terms, **fact}}
            span = linear_bounds((rest, own * lin[1] - times * c))
            if span is not None:
                lo, hi = max(lo, -(-span[0] // own)) if times < 0 else lo, min(hi, span[1] // own) if times > 0 else hi
    return lo, hi


def is_inside(i: Expr, n: int | Size) -> bool:
    """Whether an index is known to lie inside of a dimension of extent `n`."""
    limits = bounds(i)
    if limits is None or limits[0] < 0:
        return False
    if isinstance(n, Size):
        return limits[1] == 0 or isinstance(i, Index) and i.axis.size is n
    return limits[1] < n


def divided(a: Expr, n: int, facts: tuple[Linear, ...] = ()) -> tuple[Linear, Linear] | None:
    """`a` // n and `a` % n for a positive constant n as linear forms; None if bounds do not tell them.

    facts: what is known to be at most 0.
    """
    terms, c = linear(a)
    for rest in ({t: k if k % n else 0 for t, k in terms.items()}, least(terms, n)):
        span = linear_bounds((rest, c % n), facts)
        if span is not None and span[0] // n == span[1] // n:
            more = span[0] // n
            whole = {t: (k - rest[t]) // n for t, k in terms.items() if k != rest[t]}
            return (whole, c // n + more), ({t: k for t, k in rest.items() if k}, c % n - more * n)
    return None


def least(terms: Mapping[Expr, int], n: int) -> dict[Expr, int]:
    """The factors of a linear form but for multiples of n: i · 2047 + j goes over 2048 as i · 2048 + (j - i) does."""
    half = (n - 1) // 2
    return {t: (k + half) % n - half for t, k in terms.items()}


def floordiv(a: Expr, n: int, dtype: str, facts: tuple[Linear, ...] = ()) -> Expr:
    """a // n for a positive constant n: whole multiples of n leave the division."""
    if n == 1:
        return a
    if (known := divided(a, n, facts)) is not None:
        return from_linear(known[0], dtype)
    terms, c = linear(a)
    whole = {t: k // n for t, k in terms.items() if k % n == 0}
    rest = {t: k for t, k in terms.items() if k % n}
    if (apart := _apart((rest, c % n), n, facts)) is not None:
        step, coarse, _ = apart
        quotient = floordiv(from_linear(coarse, dtype), n // step, dtype, facts)
    elif (finer := _finer(rest)) is not None:
        x, m = finer
        quotient = floordiv(_plus(x, c % n * m, dtype), m * n, dtype, facts)
    else:
        quotient = raw_op("floordiv", (from_linear((rest, c % n), dtype), const(n, dtype)), dtype)
    out, oc = linear(quotient)
    for t, k in out.items():
        whole[t] = whole.get(t, 0) + k
    return from_linear(({t: k for t, k in whole.items() if k}, c // n + oc), dtype)


def _finer(terms: Mapping[Expr, int]) -> tuple[Expr, int] | None:
    """x and m if a form is x // m, beside a constant: (x // m + c) // n is (x + c·m) // (m·n)."""
    ((quotient, k),) = terms.items() if len(terms) == 1 else ((None, 0),)
    if k != 1 or not isinstance(quotient, Op) or quotient.name != "floordiv":
        return None
    x, m = quotient.args
    return (x, int(m.value)) if isinstance(m, Const) else None


def mod(a: Expr, n: int, dtype: str, facts: tuple[Linear, ...] = ()) -> Expr:
    """a % n for a positive constant n: whole multiples of n vanish."""
    if n == 1:
        return const(0, dtype)
    if (known := divided(a, n, facts)) is not None:
        return from_linear(known[1], dtype)
    terms, c = linear(a)
    rest = {t: k for t, k in terms.items() if k % n}
    if (apart := _apart((rest, c % n), n, facts)) is not None:
        step, coarse, (fine, more) = apart
        high, hc = linear(mod(from_linear(coarse, dtype), n // step, dtype, facts))
        return from_linear(({**{t: k * step for t, k in high.items()}, **fine}, hc * step + more), dtype)
    return raw_op("mod", (from_linear((rest, c % n), dtype), const(n, dtype)), dtype)


def _apart(a: Linear, n: int, facts: tuple[Linear, ...]) -> tuple[int, Linear, Linear] | None:
    """A divisor d of `n`, c and f such that a = d · c + f and f is one of 0 .. d - 1: heads and their features, that
    are flattened and lie in a dimension that has several of those."""
    terms, c = a
    for step in sorted({math.gcd(k, n) for k in terms.values()} - {1}, reverse=True):
        fine = {t: k for t, k in terms.items() if k % step}, c % step
        span = linear_bounds(fine, facts)
        if span is not None and 0 <= span[0] and span[1] < step:
            return step, ({t: k // step for t, k in terms.items() if k % step == 0}, c // step), fine
    return None
