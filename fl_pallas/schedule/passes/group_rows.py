"""Several axes as one: rows for short queries, and features that lie side by side.

Axes that share what the loop loads become one row axis, so that it is loaded once.

Before: one query, 8 heads on 2 heads of keys: `q[h, 0, d] * k[h // 4, j, d]`, a program for each h.
After h = 4·g + m:                            `q[4·g + m, 0, d] * k[g, j, d]`, a program for each g, with rows m.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from ..build import op, rewrite, substitute
from ..expr import Axis, Const, Expr, Index, Load, Op, Ref, const, free_axes, index, loads, ref, walk
from ..integer import linear
from ..plan import Accumulator, Loop, Step, Store
from .roles import Roles, numbers, roles

Kernel = tuple[tuple[Axis, ...], tuple[Loop, ...], tuple[Store, ...]]

# Rows that fill a tile by themselves; an axis that long needs no others.
ENOUGH = 64


def group_rows(parallel: tuple[Axis, ...], loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> Kernel:
    """(parallel axes, loops, stores) with more rows in a tile, where the row axis is short."""
    kernel = parallel, loops, stores
    kinds = roles(*kernel)
    if not loops or (kinds.row is not None and kinds.row.extent >= ENOUGH):
        return kernel
    for axis in kinds.batch:
        divisor = _divisor(axis, kernel[1])
        if divisor is not None:
            kernel = _split(kernel, axis, divisor)
    kinds = roles(*kernel)
    together = _sharing(kernel[0], kernel[1], kinds)
    return _merged(kernel, together) if len(together) > 1 and _whole(together, kernel[2]) else kernel


def group_features(parallel: tuple[Axis, ...], loops: tuple[Loop, ...], stores: tuple[Store, ...]) -> Kernel:
    """(parallel axes, loops, stores) with features that lie side by side wherever they are read or written as one.

    Before: `v[j, p, 0..2]`, a tile of 8 by 4 for 8 points of 3 coordinates. After: a row of 24 elements.
    Before: `k[j, 16, 2]`, pairs that a rotary embedding turned, and `v[j, 2 * p + c]`. After: a row of 32 of each.
    """
    kernel = parallel, loops, stores
    features = roles(*kernel).features
    for store in stores:
        own = [a for a in store.axes if a in features]
        if len(own) > 1 and _side_by_side(own, kernel):
            kernel = _merged(kernel, own)
    return kernel


def _side_by_side(axes: list[Axis], kernel: Kernel) -> bool:
    """Whether all of `axes` index neighbouring dimensions in order, or one dimension as what these flattened would be,
    of whatever one of them does."""
    _, loops, stores = kernel
    exprs = [s.update for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    places = [n.index for e in (*exprs, *(s.expr for s in stores)) for n in loads(e)] + [s.index for s in stores]
    return _whole(axes, stores) and all(_is_run(place, axes) for place in places)


def _is_run(place: tuple[Expr, ...], axes: list[Axis]) -> bool:
    """Whether what of a place depends on any of `axes` is all of them, side by side."""
    run = tuple(map(index, axes))
    through = tuple(i for i in place if free_axes(i) & set(axes))
    if len(through) != 1:
        return not through or any(place[k : k + len(run)] == run for k in range(len(place)))
    terms, _ = linear(through[0])
    own = {t: n for t, n in terms.items() if free_axes(t) & set(axes)}
    strides = (math.prod(a.extent for a in axes[n + 1 :]) for n in range(len(axes)))
    return own == {i: n * own.get(run[-1], 0) for i, n in zip(run, strides, strict=True)}


def _whole(axes: list[Axis], stores: tuple[Store, ...]) -> bool:
    """Whether each store has all of `axes` or none."""
    return all(len(set(axes) & set(s.axes)) in (0, len(axes)) for s in stores)


def streams(loops: Iterable[Loop]) -> set[Load]:
    """What the loops load at every step."""
    updates = [(loop, s.update) for loop in loops for s in loop.steps if isinstance(s, Accumulator)]
    return {n for loop, e in updates for n in numbers(e) if loop.axis in free_axes(n)}


def _divisor(axis: Axis, loops: tuple[Loop, ...]) -> int | None:
    """The least n for which most of what the loops load depends on `axis` through axis // n or axis % n alone."""
    loaded = streams(loops)
    for node, n in sorted(_divisions(axis, loaded).items(), key=lambda found: (found[1], found[0].name)):
        through = [e for e in loaded if axis not in free_axes(substitute(e, {}, {node: const(0, "i64")}))]
        if 2 * sum(_width(e) for e in through if axis in free_axes(e)) >= sum(map(_width, loaded)):
            return n
    return None


def _divisions(axis: Axis, loaded: Iterable[Load]) -> dict[Op, int]:
    """The quotients and remainders of `axis` by its divisors n, and n."""
    found: dict[Op, int] = {}
    for node in (n for e in loaded for n in walk(e) if isinstance(n, Op) and n.name in ("floordiv", "mod")):
        whole, n = node.args
        if whole is index(axis) and isinstance(n, Const) and axis.extent % int(n.value) == 0:
            found[node] = int(n.value)
    return found


def _split(kernel: Kernel, axis: Axis, n: int) -> Kernel:
    """`axis` as n · group + member."""
    group, member = Axis(f"{axis.name}g", axis.extent // n), Axis(f"{axis.name}m", n)
    whole = op("add", op("mul", index(group), const(n, "i64"), dtype="i64"), index(member), dtype="i64")
    return _renamed(kernel, {axis: whole}, {axis: (group, member)})


def _sharing(parallel: tuple[Axis, ...], loops: tuple[Loop, ...], kinds: Roles) -> list[Axis]:
    """The row axis and those that share with it most of what the loops load."""
    if kinds.row is None or kinds.row.extent >= ENOUGH:
        return []
    common = [e for e in streams(loops) if kinds.row not in free_axes(e)]
    most = sum(map(_width, common))

    def shares(a: Axis) -> bool:
        return 2 * sum(_width(e) for e in common if a not in free_axes(e)) > most

    return [a for a in parallel if a is kinds.row or a in kinds.batch and shares(a)]


def _merged(kernel: Kernel, axes: list[Axis]) -> Kernel:
    """Several axes as one, the last of them running fastest."""
    rows = Axis("".join(a.name for a in axes), math.prod(a.extent for a in axes))
    values: dict[Axis, Expr] = {}
    rest = index(rows)
    for a in reversed(axes):
        n = const(a.extent, "i64")
        values[a] = op("mod", rest, n, dtype="i64")
        rest = op("floordiv", rest, n, dtype="i64")
    return _renamed(kernel, values, {a: (rows,) for a in axes})


def _renamed(kernel: Kernel, values: dict[Axis, Expr], axes: dict[Axis, tuple[Axis, ...]]) -> Kernel:
    """A kernel over other axes: indices along the old ones become `values`."""

    def over(old: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(axes.get(a, (a,)) for a in old)))

    def rule(n: Expr) -> Expr:
        if isinstance(n, Index):
            return values.get(n.axis, n)
        return ref(n.name, over(n.axes), n.dtype) if isinstance(n, Ref) else n

    def of_step(s: Step) -> Step:
        if not isinstance(s, Accumulator):
            return replace(s, axes=over(s.axes), value=rewrite(s.value, rule))
        correct = None if s.correct is None else rewrite(s.correct, rule)
        return replace(s, axes=over(s.axes), update=rewrite(s.update, rule), correct=correct)

    def of_store(s: Store) -> Store:
        if not set(s.axes) & axes.keys():
            return s
        dims = tuple((rewrite(i, rule), n) for i, n in zip(s.index, s.shape, strict=True))
        return replace(s, axes=over(s.axes), expr=rewrite(s.expr, rule), dims=dims)

    parallel, loops, stores = kernel
    loops = tuple(replace(loop, steps=tuple(map(of_step, loop.steps))) for loop in loops)
    return over(parallel), loops, tuple(map(of_store, stores))


def _width(n: Load) -> int:
    """Dimensions of a load that are more than one index."""
    return sum(1 for i in n.index if free_axes(i))
