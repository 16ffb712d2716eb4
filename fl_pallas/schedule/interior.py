"""Interiors: where a loop's masks let tiles through whole, and what they leave of its steps there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from .build import substitute, with_children
from .expr import Const, Expr, children, walk
from .plan import Accumulator, Loop, Step


def constants(steps: tuple[Step, ...], inside: Callable[[Expr], Expr]) -> tuple[tuple[Expr, Expr], ...]:
    """The nodes of what `steps` accumulate that turn into constants.

    Args:
      inside: an expression as it is in the interior.
    """
    inside = functools.cache(inside)
    found: dict[Expr, Expr] = {}
    seen: set[Expr] = set()

    def visit(e: Expr) -> None:
        seen.add(e)
        if isinstance(inside(e), Const):
            found[e] = inside(e)
        else:
            for c in children(e):
                if c not in seen and inside(c) != c:
                    visit(c)

    for s in steps:
        if isinstance(s, Accumulator) and inside(s.update) != s.update:
            visit(s.update)
    return tuple(found.items())


def substituted(steps: tuple[Step, ...], outcomes: Mapping[Expr, Expr]) -> tuple[Step, ...]:
    """`steps` with nodes of what they accumulate, a mask's tests say, replaced by their outcomes."""
    return tuple(
        replace(s, update=substitute(s.update, {}, outcomes)) if isinstance(s, Accumulator) else s for s in steps
    )


def interior_steps(loop: Loop) -> tuple[Step, ...]:
    """The steps of a loop as they are in its interior; as everywhere if it has none."""
    return substituted(loop.steps, dict(loop.interior.constants)) if loop.interior else loop.steps


def bare(loop: Loop) -> dict[Expr, Expr]:
    """The nodes with a constant for a child in the interior of `loop`, and what they are there."""
    known = dict(loop.interior.constants) if loop.interior else {}
    nodes = {n for s in loop.steps if isinstance(s, Accumulator) for n in walk(s.update)} - known.keys()
    return {
        n: with_children(n, tuple(known.get(c, c) for c in children(n)))
        for n in nodes
        if not known.keys().isdisjoint(children(n))
    }
