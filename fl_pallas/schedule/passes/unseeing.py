"""Rows that a mask may leave nothing of, by what a kernel loads of them.

The maximum of such a row is -inf, and its weights, exp(-inf - -inf), are NaN: of masked scores too, so that a tile of
them is not nothing. A row is known to see something where the mask lets through its own index, say, whatever that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, product

from ..build import TRUE, negate, op, substitute
from ..dtype import is_float
from ..expr import Axis, Const, Expr, Load, Op, const, free_axes, index, walk
from ..remember import remembered
from ..spans import truth

# Ways to place what a row might see that are tried.
MOST = 64


@remembered
def perhaps_unseeing(update: Expr) -> frozenset[Load]:
    """The loads of `update` that are -inf, as the maximum or the logarithm of the sum of a row is, if a mask may leave
    nothing of it: beside a masked score in an exponent, and nowhere compared with -inf."""
    nodes = [*walk(update)]
    tests = (n.args for n in nodes if isinstance(n, Op) and n.name in ("eq", "ne"))
    asked = {a for args in tests if any(map(_is_lowest, args)) for a in args}
    found = set[Load]()
    for n in nodes:
        if isinstance(n, Op) and n.name in ("exp", "exp2"):
            masks = [test for test in map(_masked, walk(n.args[0])) if test is not None]
            beside = {*_beside(n.args[0])} - asked if masks else ()
            found |= {load for load in beside if not _sees(n.args[0], masks, load)}
    return frozenset(found)


def _is_lowest(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == -math.inf


def _masked(e: Expr) -> Expr | None:
    """The condition under which a mask lets an expression through, if it is masked: -inf else."""
    if not isinstance(e, Op) or e.name != "select" or not any(map(_is_lowest, e.args[1:])):
        return None
    test, then, _ = e.args
    return negate(test) if _is_lowest(then) else test


def _beside(e: Expr) -> Iterator[Load]:
    """What is loaded and added to masked scores, or taken off them."""
    if isinstance(e, Load) and is_float(e.dtype):
        yield e
    elif isinstance(e, Op) and _masked(e) is None:
        terms = [a for a in e.args if not _is_number(a)]
        if e.name in ("add", "sub", "neg", "cast", "log", "log2") or e.name in ("mul", "div") and len(terms) == 1:
            for a in terms:
                yield from _beside(a)


def _is_number(e: Expr) -> bool:
    """Whether it is a number that is known, or one of several."""
    return isinstance(e, Const) or isinstance(e, Op) and e.name == "select" and all(map(_is_number, e.args[1:]))


def _sees(exponent: Expr, masks: list[Expr], load: Load) -> bool:
    """Whether there is an index, of each axis that a load has not, at which all masks let something through; as there
    is taken to be for what is no row's, and has all axes of the scores."""
    rows = free_axes(load)
    if free_axes(exponent) <= rows:
        return True
    visible: Expr = TRUE
    for test in masks:
        visible = op("and", visible, test, dtype="bool")
    keys = sorted(free_axes(visible) - rows, key=lambda a: a.name)
    if any(a.size is not None for a in keys):
        return False
    ways = product(*([*_places(a, rows)] for a in keys))
    return any(_is_certain(substitute(visible, dict(zip(keys, at, strict=True)))) for at in islice(ways, MOST))


def _places(axis: Axis, rows: frozenset[Axis]) -> Iterator[Expr]:
    """Where along an axis a row may see something: at its own index, at the first or the last."""
    for a in sorted(rows, key=lambda a: a.name):
        if a.size is None and a.extent == axis.extent:
            yield index(a)
    yield const(0, "i64")
    yield const(axis.extent - 1, "i64")


def _is_certain(condition: Expr) -> bool:
    return condition is TRUE or truth(condition, lambda _: None, free_axes)[0] is TRUE
