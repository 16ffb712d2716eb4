"""Powers: what is cut from an exponent is stored as the power, where that is but a factor of products in 16 bits.

Before: `sum[j](exp(select(j > i, -inf, t(i, j)) - m(i)) * ds(i, j))`, and t, next to a normaliser of 32 bits, would be
stored in as many. After: `sum[j](select(j > i, 0, p(i, j)) * ds(i, j))`, and p = exp(t(i, j) - m(i)) is stored in 16
bits, as PyTorch has its weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..build import op, select, substitute, with_children
from ..dtype import compute_dtype, is_float, itemsize
from ..expr import Const, Expr, Load, Op, Reduce, children, const, free_axes, loads, reductions, walk
from ..inner import factors
from .fuse import Fused

POWERS = ("exp", "exp2")


@dataclass(frozen=True)
class Power:
    """What is stored in place of a part of its exponent.

    Attributes:
      node: the power, wherever it counts.
      dtype: in which it is stored.
      zero: for each power that it takes the place of, where that is zero by its position; None if nowhere.
    """

    node: Expr
    dtype: str
    zero: dict[Expr, Expr | None]

    def loading(self, stored: Expr) -> dict[Expr, Expr]:
        """What takes the place of the powers; loops still see where they are zero."""
        nothing = const(0.0, stored.dtype)
        return {p: stored if at is None else select(at, nothing, stored) for p, at in self.zero.items()}


def as_power(fused: Fused, node: Expr) -> Power | None:
    """The one power of the same axes, masks aside, that has `node` in its exponent; None if anything else reads `node`,
    or the power is read as wide as it is computed."""
    every = {n for o in fused.outputs for n in walk(o.expr) if isinstance(n, Op) and n.name in POWERS}
    found = [n for n in every if free_axes(n) == free_axes(node) and node in read_unsummed(n)]
    bare = {n: _unmasked(n) for n in found}
    if len({p for p, _ in bare.values()}) != 1:
        return None
    held: dict[Expr, Expr] = {p: const(0.0, p.dtype) for p in found}
    if any(node in {*walk(substitute(o.expr, {}, held))} for o in fused.outputs):
        return None
    power, _ = bare[found[0]]
    types = multiplied_as([o.expr for o in fused.outputs], compute_dtype([power.dtype]))
    dtype = max((types[p] for p in found), key=itemsize)
    if itemsize(dtype) >= itemsize(power.dtype):
        return None
    return Power(power, dtype, {p: at for p, (_, at) in bare.items()})


def multiplied_as(exprs: list[Expr], compute: str) -> dict[Expr, str]:
    """The type of the widest sum of products that something is a factor of; `compute` for what anything else reads.

    A product with a sum that PyTorch rounds is no more exact than that, whatever it is added up in.
    """
    found: dict[Expr, str] = {}
    seen: set[tuple[Expr, str]] = set()

    def visit(e: Expr, multiplied: str) -> None:
        if (e, multiplied) in seen:
            return
        seen.add((e, multiplied))
        if isinstance(e, Reduce):
            sums = (f.dtype for f in factors(e.body) if isinstance(f, Reduce) and is_float(f.dtype))
            multiplied = min((e.dtype, *sums), key=itemsize) if e.kind == "sum" and is_float(e.dtype) else compute
        elif not isinstance(e, Op) or e.name != "mul" and not is_masking(e):
            multiplied = compute
        for c in children(e):
            found[c] = max(found.get(c, multiplied), multiplied, key=itemsize)
            if not isinstance(c, Load):
                visit(c, multiplied)

    for e in exprs:
        found[e] = compute
        visit(e, compute)
    return found


def is_masking(e: Op) -> bool:
    """Whether an operation takes something, or a zero in its place: rounded before, it is as if rounded after."""
    return e.name == "select" and any(isinstance(c, Const) and c.value == 0 for c in e.args[1:])


def read_unsummed(e: Expr) -> set[Expr]:
    """The nodes that `e` reads with no reduction in between, itself and reductions among them."""
    seen: set[Expr] = set()
    waiting = [e]
    while waiting:
        n = waiting.pop()
        if n not in seen:
            seen.add(n)
            waiting += () if isinstance(n, Reduce) else children(n)
    return seen


def _unmasked(power: Op) -> tuple[Expr, Expr | None]:
    """A power as it is where no mask of positions makes it zero, and where one does; None if there is none."""
    exponent, masks = _without_masks(power.args[0])
    zero = None
    for m in masks:
        zero = m if zero is None else op("or", zero, m, dtype="bool")
    return op(power.name, exponent, dtype=power.dtype), zero


def _without_masks(e: Expr) -> tuple[Expr, list[Expr]]:
    """An exponent without selections of -inf by position, and their conditions."""
    if not isinstance(e, Op):
        return e, []
    if e.name == "select" and isinstance(e.args[1], Const) and e.args[1].value == -math.inf:
        other, masks = _without_masks(e.args[2])
        if loads(e.args[0]) or reductions(e.args[0]):
            return with_children(e, (*e.args[:2], other)), masks
        return other, [e.args[0], *masks]
    positive = any(isinstance(c, Const) and c.value > 0 for c in e.args)
    # Of a difference what is taken off may be infinite as well.
    at = range(2) if e.name == "add" or e.name == "mul" and positive else range(1) if e.name == "sub" else ()
    parts = {n: _without_masks(e.args[n]) for n in at}
    args = tuple(parts[n][0] if n in parts else c for n, c in enumerate(e.args))
    return with_children(e, args), [m for _, masks in parts.values() for m in masks]
