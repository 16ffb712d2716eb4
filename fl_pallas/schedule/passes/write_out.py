"""Short axes written out: what pairs of points have of a few features each takes no tile of three dimensions.

Before: a0[i, d] = sum(a0.old, (y[j, d] - x[i, d]) * rsqrt(sum[r]((y[j, r] - x[i, r])²))), d and r of 3.
After:  a0_0[i] = sum(a0_0.old, (y[j, 0] - x[i, 0]) * rsqrt((y[j, 0] - x[i, 0])² + ...)), and a0_1, a0_2.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

from ..build import op, rewrite, select, substitute
from ..expr import Axis, Const, Expr, Load, Reduce, Ref, const, index, loads, ref, ref_names
from ..plan import Accumulator, Loop, Step, Store, step_expressions
from .group_rows import Kernel
from .roles import is_of_computed_rows, is_of_rows, roles

# Indices of an axis that is written out: of more the matrix units take the sums. And sums that loops may have then;
# fewer where threads exchange them.
SHORT, MOST, MOST_EXCHANGED = 8, 32, 8


def write_out(
    parallel: tuple[Axis, ...],
    loops: tuple[Loop, ...],
    stores: tuple[Store, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> Kernel:
    """(parallel axes, loops, stores) with an accumulator for each index of short axes, where loops then have sums of
    rows alone; as they are, elsewhere.

    Args:
      shapes: of what is loaded, by name.
    """
    # (What a short sum has of a feature makes that no row.)
    plain = tuple(replace(loop, steps=tuple(map(_plain, loop.steps))) for loop in loops)
    steps = [s for loop in plain for s in loop.steps]
    sums = [s for s in steps if isinstance(s, Accumulator)]
    kinds = roles(parallel, plain, stores)
    short = tuple(a for a in kinds.features if a.extent > 1)
    own = {s.name: tuple(a for a in s.axes if a in short) for s in sums}
    apart = {name: axes for name, axes in own.items() if axes}
    copies = sum(math.prod(a.extent for a in axes) for axes in own.values())
    read = frozenset[str]().union(*(ref_names(e) for s in steps for e in step_expressions(s)))
    if copies > MOST or any(a.extent > SHORT or a.size is not None for a in short):
        return parallel, loops, stores
    if any(name in read or f"{name}.old" in read for name in apart):
        return parallel, loops, stores

    def of_each(s: Step) -> list[Step]:
        return [*_of_each(s, apart[s.name])] if isinstance(s, Accumulator) and s.name in apart else [s]

    def chosen(n: Expr) -> Expr:
        return _chosen(n, apart[n.name]) if isinstance(n, Ref) and n.name in apart else n

    made = tuple(replace(loop, steps=tuple(s for step in loop.steps for s in of_each(step))) for loop in plain)
    fits = all(is_of_rows(loop, kinds) for loop in made)
    alone = len(made) == 1 and is_of_computed_rows(made[0], kinds)
    every = (e for loop in made for s in loop.steps for e in step_expressions(s))
    beyond = any(_is_beyond(n, shapes[n.source]) for e in every for n in loads(e))
    if not fits or beyond or not alone and copies > MOST_EXCHANGED:
        return parallel, loops, stores
    return parallel, made, tuple(replace(s, expr=rewrite(s.expr, chosen)) for s in stores)


def _is_beyond(n: Load, shape: tuple[int, ...]) -> bool:
    """Whether a load is of an index that there is none of: of features further on, say, which no store then takes."""
    return any(isinstance(i, Const) and not 0 <= i.value < extent for i, extent in zip(n.index, shape, strict=True))


def _plain(s: Step) -> Step:
    return replace(s, update=rewrite(s.update, _written)) if isinstance(s, Accumulator) else s


def _written(e: Expr) -> Expr:
    """A short sum, term by term."""
    if not isinstance(e, Reduce) or e.kind != "sum" or e.axis.extent > SHORT or e.axis.size is not None:
        return e
    terms = (substitute(e.body, {e.axis: const(n, "i64")}) for n in range(e.axis.extent))
    return functools.reduce(lambda a, b: op("add", a, b, dtype=e.dtype), terms)


def _of_each(s: Accumulator, axes: tuple[Axis, ...]) -> list[Accumulator]:
    """An accumulator for each index of `axes`."""
    rest = tuple(a for a in s.axes if a not in axes)
    return [
        replace(s, name=_name(s.name, at), axes=rest, update=substitute(s.update, _indices(axes, at)))
        for at in _places(axes)
    ]


def _chosen(whole: Ref, axes: tuple[Axis, ...]) -> Expr:
    """That one of the accumulators which stands for an element of `whole`."""
    rest = tuple(a for a in whole.axes if a not in axes)
    *before, last = _places(axes)
    found: Expr = ref(_name(whole.name, last), rest, whole.dtype)
    for at in reversed(before):
        here = [op("eq", index(a), i, dtype="bool") for a, i in _indices(axes, at).items()]
        test = functools.reduce(lambda a, b: op("and", a, b, dtype="bool"), here)
        found = select(test, ref(_name(whole.name, at), rest, whole.dtype), found)
    return found


def _places(axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
    return [*itertools.product(*(range(a.extent) for a in axes))]


def _indices(axes: tuple[Axis, ...], at: tuple[int, ...]) -> dict[Axis, Expr]:
    return {a: const(n, "i64") for a, n in zip(axes, at, strict=True)}


def _name(name: str, at: tuple[int, ...]) -> str:
    return "_".join((name, *map(str, at)))
