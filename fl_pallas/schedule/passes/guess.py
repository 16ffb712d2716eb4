"""Guesses: a softmax's sums about a number that is near its maximum, and that stands before the loop begins.

Any reference serves a softmax: exp(s - r) / sum exp(s - r) is the same for all r, as long as nothing overflows or
vanishes. A running maximum never lets it, at a price: each tile reduces its rows, and multiplies all sums by what moved
(a tenth of the time of plain attention). The maximum of a row's first keys is near enough nearly always. Whether it was
is seen in the sum of the weights, when all are added up; where it was not, the loop runs again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..build import substitute
from ..change import CLOSE, NONE, Change, change, is_alike
from ..expr import Const, Expr, Index, Load, Op, children, const, loads, ref, ref_names, walk
from ..inner import ROWS
from ..plan import Accumulator, Guess, KernelPlan, Loop
from .in_parts import streamed

# The first keys are multiplied twice: of shorter rows they would be too large a part.
LEAST = 1024


def guess(plan: KernelPlan) -> KernelPlan:
    """`plan`, its loops about guesses where that pays and nothing that is stored changes with a reference."""
    return replace(plan, loops=tuple(_with_guesses(plan, loop) for loop in plan.loops))


def _with_guesses(plan: KernelPlan, loop: Loop) -> Loop:
    if loop.parts is not None or loop.lower is not None or loop.axis.extent < LEAST or not _is_of_matrices(plan, loop):
        return loop
    steps = [s for s in loop.steps if isinstance(s, Accumulator)]
    moved = {n.removesuffix(".old") for s in steps if s.correct is not None for n in ref_names(s.correct)}
    moved -= {s.name for s in steps if s.correct is not None}
    guesses = [g for name in sorted(moved) if (g := _guess(name, steps)) is not None]
    if len(guesses) < len(moved) or not moved or not all(_is_free(plan, name) for name in moved):
        return loop
    return replace(loop, guesses=tuple(guesses))


def _is_free(plan: KernelPlan, reference: str) -> bool:
    """Whether all that a kernel stores is the same, whatever it takes for a reference."""
    known = _one_more(reference)
    for s in (s for loop in plan.loops for s in loop.steps if s.name != reference):
        if not isinstance(s, Accumulator):
            return False
        made = change(_finite(s.update, reference), known)
        if made is None or not is_alike(made, _kept(made, s.kind)):
            return False
        known[s.name] = made
    return all(_is_the_same(_finite(s.expr, reference), reference, known) for s in plan.stores)


def _one_more(reference: str) -> dict[str, Change]:
    """What changes where a reference is 1 more: itself."""
    return {reference: Change(shift=1.0)}


def _kept(c: Change, kind: str) -> Change:
    """What of a change a reduction has as its terms do: a sum is multiplied, a maximum is shifted."""
    return Change(c.degree if kind == "sum" else 0.0, c.shift if kind in ("max", "min") else 0.0)


def _is_the_same(e: Expr, reference: str, known: Mapping[str, Change]) -> bool:
    """Whether `e` does not change with a reference; nor with the larger of it and another, which is one as well."""
    larger = [n for n in walk(e) if isinstance(n, Op) and n.name == "max" and reference in ref_names(n)]
    named = substitute(e, {}, {n: ref(f"%{k}", (), n.dtype) for k, n in enumerate(larger)})
    others = [_one_more(f"%{k}") for k in range(len(larger))]
    found = [change(named, changes) for changes in (known, *others)]
    return all(c is not None and is_alike(c, NONE) for c in found)


def _finite(e: Expr, name: str) -> Expr:
    """`e` of a reference that is known to be finite."""
    return substitute(e, {}, {n: const(False, "bool") for n in walk(e) if _is_infinite(n, name)})


def _is_infinite(e: Expr, name: str) -> bool:
    """Whether `e` asks if a reference is infinite, or a multiple of it."""
    if not isinstance(e, Op) or e.name not in ("eq", "isinf") or ref_names(e) != {name} or loads(e):
        return False
    a, b = e.args[0], e.args[-1]
    plain = a.args[0] if isinstance(a, Op) and a.name == "abs" else a
    made = change(plain, _one_more(name))
    return made is not None and abs(made.shift) > CLOSE and (a is b or isinstance(b, Const) and math.isinf(b.value))


def _is_of_matrices(plan: KernelPlan, loop: Loop) -> bool:
    """Whether a loop adds up rows by features: what its maxima cost are the products of these. Not of float32, whose
    products take so long that maxima are nothing beside them (2048 keys of 64 features, an H200: 0.50 ms about running
    maxima, 0.73 about guesses)."""
    if streamed([loop], plan.choices.tiled):
        return False
    tile = plan.choices.tile
    rows = [a for a in plan.grid if a not in plan.features and (tile(a) or 1) >= ROWS]
    sums = (s for s in loop.steps if isinstance(s, Accumulator) and s.correct is not None)
    return any(a in s.axes for a in rows for s in sums if set(plan.features) & set(s.axes))


def _guess(name: str, steps: list[Accumulator]) -> Guess | None:
    """The guess of one maximum; None if a number near it cannot be told from a few scores, or not be checked."""
    maximum = next((s for s in steps if s.name == name and s.kind == "max"), None)
    if maximum is None or maximum.correct is not None or ref_names(maximum.update) or _moves(maximum.update):
        return None
    for s in steps:
        if s.kind == "sum" and s.axes == maximum.axes and _is_power(s.update):
            made = change(_finite(s.update, name), _one_more(name))
            if made is not None and made.degree < 0:
                return Guess(name, s.name, -made.degree)
    return None


def _is_power(e: Expr) -> bool:
    """Whether `e` is an exponential by itself, or nothing where a mask hides it."""
    if isinstance(e, Op) and e.name == "select":
        return any(map(_is_power, e.args[1:])) and all(isinstance(a, Const) or _is_power(a) for a in e.args[1:])
    return isinstance(e, Op) and e.name in ("exp", "exp2")


def _moves(e: Expr) -> bool:
    """Whether a score has positions for numbers, as distances are: the last may be far from the first."""
    if isinstance(e, Op) and e.name == "cast" and e.dtype in ("f32", "f64", "bf16", "f16"):
        return any(isinstance(n, Index) for n in walk(e.args[0]))
    if isinstance(e, Op) and e.name in ("lt", "le", "gt", "ge", "eq", "ne") or isinstance(e, Load):
        return False
    return any(map(_moves, children(e)))
