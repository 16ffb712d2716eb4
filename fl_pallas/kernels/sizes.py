"""One kernel for many sizes: two kernels that differ in integers alone become one that is given them at launch.

Nothing is assumed of how a plan follows from its sizes. Each call has its own plan, made for its own shapes;
where that plan is the general one with other integers in the places that are open, its integers are the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..schedule.expr import (
    Axis,
    Const,
    Expr,
    Index,
    Load,
    Op,
    Reduce,
    Ref,
    Size,
    index,
    load,
    raw_op,
    raw_reduce,
    ref,
    size,
)
from ..schedule.inner import MAX_WHOLE, power_of_two
from ..schedule.integer import MAX_SIZE
from ..schedule.plan import Choices, KernelPlan, Loop, Store, Visits, held_whole, operand_names
from .triton import TensorSpec, output_specs

# Sizes that hold a stride are given in units that Triton may rely on, elements; the widest load has 16 of them.
MAX_UNIT = 16
# The least room for an axis that is taken whole: an index for each thread of a small program. Else it is twice what was
# seen, and no more, for each program looks at all of it.
ROOM = 128
# The most rows of a tile, where they are given at launch: of 260, a tile of 256 leaves as many again to be computed for
# nothing (it took 3 times as long as a kernel for 260 alone).
ROWS = 64
# Loops of at most so many steps are faster under other choices than long ones: about running maxima, and with fewer
# stages (at 260 by a third).
SHORT = 512
# What is chosen, told or named does not make two kernels different.
_UNBOUNDED: dict[str, Any] = {"lower": None, "upper": None, "interior": None, "visits": None}
_FREE = {
    KernelPlan: ("name", "choices", "others", "notes"),
    Loop: ("guesses",),
    Store: ("name",),
    Visits: ("part", "long"),
}


class Mismatch(Exception):
    """Two kernels differ in more than integers that can be given at launch."""


@dataclass(frozen=True)
class Laid:
    """A plan, and how the tensors it reads and writes lie in memory."""

    plan: KernelPlan
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: int = 0


def laid(plan: KernelPlan, operands: tuple[TensorSpec, ...]) -> Laid:
    """A plan as it runs on these operands."""
    return Laid(plan, operands, output_specs(plan))


def is_short(a: Laid) -> bool:
    """Whether all its loops are."""
    return all(loop.axis.extent <= SHORT for loop in a.plan.loops)


def generalise(a: Laid, b: Laid, units: bool = True) -> Laid:
    """One kernel for both, and for more: what they differ in is given at launch.

    units: whether it may rely on strides having the divisors that both have, for wider loads.

    Raises: Mismatch.
    """
    return _joined(a, b, lambda x, y: x != y, units)


def opened(a: Laid) -> Laid:
    """A kernel for other sizes than those of `a` too: all but those of axes that each program has whole are given at
    launch.

    Raises: Mismatch.
    """
    tiled = {axis for axis, n in a.plan.choices.tiles if axis.extent != n or axis in a.plan.grid}
    fixed = {0, 1, *(axis.extent for axis in _axes(a.plan) - tiled)}
    return _joined(a, a, lambda x, _: x not in fixed, units=False)


def _joined(a: Laid, b: Laid, given: Callable[[int, int], bool], units: bool) -> Laid:
    """One kernel for both; two integers in the same place are one that is given at launch where `given` says so."""
    numbers: dict[tuple[bool, int, int], Size] = {}

    def join(x: int | Size, y: int, is_stride: bool) -> int | Size:
        assert isinstance(x, int)
        if not given(x, y):
            return x
        key = (is_stride, x, y)
        if key not in numbers:
            unit = math.gcd(x, y, MAX_UNIT) if is_stride and units else 1
            # Less than 8 elements of 16 bits make no wide load, and would only shut sizes out.
            numbers[key] = size(len(numbers), unit if unit >= 8 else 1, max(x, y))
        return numbers[key]

    # The one with the wider tiles says what they are, and what axes are called.
    if _width(b.plan) > _width(a.plan):
        a, b = b, a
    made = _Walk(a, b, join).laid()
    own = {axis.name: axis for axis in (*made.plan.grid, *(loop.axis for loop in made.plan.loops))}
    plain = replace(made.plan, loops=tuple(replace(loop, **_UNBOUNDED) for loop in made.plan.loops))
    covered = {*made.plan.features, *(_axes(plain) - set(own.values()))}
    if any(axis.size is not None for axis in covered):
        raise Mismatch("an axis that a tile covers whole")

    def over(choices: Choices) -> Choices:
        return replace(choices, tiles=tuple((own[axis.name], n) for axis, n in choices.tiles))

    rows = [axis for axis in made.plan.grid if axis.size is not None]
    others = tuple(c for c in map(over, a.plan.others) if all((c.tile(axis) or 1) <= ROWS for axis in rows))
    guessed = (replace(x, guesses=y.guesses) for x, y in zip(made.plan.loops, a.plan.loops, strict=True))
    plan = replace(made.plan, loops=tuple(guessed), choices=over(a.plan.choices), others=others, notes=())
    return replace(made, plan=plan, sizes=len(numbers))


def sizes_of(general: Laid, own: Laid) -> tuple[int, ...]:
    """What to give `general` at launch so that it does what `own` does.

    Raises: Mismatch.
    """
    found: dict[int, int] = {}

    def join(x: int | Size, y: int, is_stride: bool) -> int | Size:
        if isinstance(x, int):
            if x != y:
                raise Mismatch("an integer that is fixed")
            return x
        if y % x.unit or found.setdefault(x.number, y // x.unit) != y // x.unit:
            raise Mismatch("an integer of another unit, or two that were equal")
        return x

    _Walk(general, own, join).laid()
    return tuple(found[n] for n in range(general.sizes))


def programs_of(general: Laid, own: Laid) -> int:
    """How many programs of `general` do what `own` does."""
    axes = zip(own.plan.grid, general.plan.grid, strict=True)
    return math.prod(-(-axis.extent // (general.plan.choices.tile(same) or 1)) for axis, same in axes)


def _width(plan: KernelPlan) -> tuple[list[int], int]:
    return _whole_sides(plan), math.prod(n for _, n in plan.choices.tiles)


def _whole_sides(plan: KernelPlan) -> list[int]:
    """The narrowest tile along each axis that tiles have whole for reductions over it."""
    every, held = (plan.choices, *plan.others), held_whole(plan)
    return [min(c.tile(axis) or 1 for c in every) for axis in plan.grid if axis in held]


def _axes(x: Any) -> set[Axis]:
    """Every axis that a plan mentions."""
    found: set[Axis] = set()
    seen: set[int] = set()
    stack = [x]
    while stack:
        y = stack.pop()
        if id(y) in seen:
            continue
        seen.add(id(y))
        if isinstance(y, Axis):
            found.add(y)
        elif isinstance(y, tuple):
            stack.extend(y)
        elif is_dataclass(y) and not isinstance(y, (Choices, Size)):
            stack.extend(getattr(y, f.name) for f in fields(y) if f.name not in _FREE.get(type(y), ()))
    return found


class _Walk:
    """Goes through two kernels side by side and rebuilds the first, each integer as `join` says."""

    def __init__(self, a: Laid, b: Laid, join: Callable[[int | Size, int, bool], int | Size]):
        self.a, self.b, self.join = a, b, join
        self.known: dict[tuple[int, int, tuple[tuple[str, str], ...]], Expr] = {}
        # Names of axes that differ, within the reductions that are gone through; as the key of what is known there.
        self.bound: dict[str, str] = {}
        self.scope: tuple[tuple[str, str], ...] = ()
        # The axes that are tiled; what bounds of loops reduce over else is taken whole, and needs room.
        self.tiled = {axis.name for axis in (*a.plan.grid, *(loop.axis for loop in a.plan.loops))}
        # What a tile has whole, for reductions over it, has room in that, and is named by its extent.
        whole = [[axis for axis in x.plan.grid if axis in held_whole(x.plan)] for x in (a, b)]
        self.bound.update((x.name, y.name) for x, y in zip(*whole, strict=False))
        self.room = dict(zip((x.name for x in whole[0]), _whole_sides(a.plan), strict=False))
        self.places = [{n: k for k, n in enumerate(operand_names(x.plan))} for x in (a, b)]

    def laid(self) -> Laid:
        plan = self.anything(self.a.plan, self.b.plan)
        specs = [
            tuple(map(self.spec, x, y)) if len(x) == len(y) else self.fail("operands")
            for x, y in ((self.a.operands, self.b.operands), (self.a.outputs, self.b.outputs))
        ]
        return replace(self.a, plan=plan, operands=specs[0], outputs=specs[1])

    def fail(self, what: str) -> Any:
        raise Mismatch(what)

    def integer(self, x: int | Size, y: int, least: int, is_stride: bool = False) -> int | Size:
        n = self.join(x, y, is_stride)
        if isinstance(n, Size) and not (least <= min(y, n.hint) and abs(y) < MAX_SIZE and n.hint < MAX_SIZE):
            raise Mismatch("an integer out of range")
        return n

    def axis(self, x: Axis, y: Axis) -> Axis:
        if self.bound.get(x.name, x.name) != y.name:
            raise Mismatch("axes")
        n = self.integer(x.extent if x.size is None else x.size, y.extent, 2)
        if isinstance(n, int):
            return Axis(x.name, x.extent)
        if x.name in self.tiled:
            if max(n.hint, y.extent) > self.room.get(x.name, n.hint + y.extent):
                raise Mismatch("an axis that no tile covers")
            return Axis(x.name, n.hint, n)
        room = min(MAX_WHOLE, max(ROOM, power_of_two(2 * n.hint)))
        if y.extent > room:
            raise Mismatch("an axis that no tile covers")
        return Axis(x.name, room, n)

    def spec(self, x: TensorSpec, y: TensorSpec) -> TensorSpec:
        if (x.dtype, x.offset, len(x.shape)) != (y.dtype, y.offset, len(y.shape)):
            raise Mismatch("tensors")
        # Offsets beyond 32 bits are another kernel.
        if (x.span < 2**31) != (y.span < 2**31):
            raise Mismatch("a tensor's extent in memory")
        assert all(isinstance(n, int) for n in (*y.shape, *y.strides))
        shape = tuple(self.integer(n, m, 1) for n, m in zip(x.shape, y.shape))  # type: ignore[arg-type]
        strides = tuple(self.integer(n, m, 0, True) for n, m in zip(x.strides, y.strides))  # type: ignore[arg-type]
        return replace(x, shape=shape, strides=strides)

    def anything(self, x: Any, y: Any) -> Any:
        if isinstance(x, Size) and isinstance(y, int):
            return self.integer(x, y, 1)
        if isinstance(x, (Const, Size, Index, Load, Op, Reduce, Ref)):
            key = (id(x), id(y), self.scope)
            if key not in self.known:
                self.known[key] = self.expr(x, y)
            return self.known[key]
        if isinstance(x, Axis):
            return self.axis(x, y) if isinstance(y, Axis) else self.fail("kinds")
        if type(x) is not type(y):
            raise Mismatch("kinds")
        if isinstance(x, tuple):
            return tuple(map(self.anything, x, y)) if len(x) == len(y) else self.fail("lengths")
        if is_dataclass(x):
            free = _FREE.get(type(x), ())
            new = {
                f.name: self.anything(getattr(x, f.name), getattr(y, f.name)) for f in fields(x) if f.name not in free
            }
            return replace(x, **new)  # type: ignore[type-var]
        if isinstance(x, int) and not isinstance(x, bool):
            return self.integer(x, y, 1)
        return x if x == y else self.fail("values")

    def expr(self, x: Expr, y: Expr) -> Expr:
        if isinstance(x, (Const, Size)):
            if not isinstance(y, Const) or x.dtype != y.dtype:
                raise Mismatch("kinds")
            old = x if isinstance(x, Size) else x.value
            if isinstance(old, Const) or type(y.value) is not int or isinstance(old, (bool, float)):
                same = isinstance(x, Const) and type(x.value) is type(y.value) and repr(x.value) == repr(y.value)
                return x if same else self.fail("constants")
            n = self.integer(old, y.value, -MAX_SIZE)
            return x if isinstance(n, int) else size(n.number, n.unit, n.hint, x.dtype)
        if type(x) is not type(y) or x.dtype != y.dtype:
            raise Mismatch("kinds")
        if isinstance(x, Index):
            assert isinstance(y, Index)
            return index(self.axis(x.axis, y.axis))
        if isinstance(x, Load):
            assert isinstance(y, Load)
            if self.places[0][x.source] != self.places[1][y.source]:
                raise Mismatch("operands")
            return load(x.source, self.anything(x.index, y.index), x.dtype)
        if isinstance(x, Op):
            assert isinstance(y, Op)
            return raw_op(x.name, self.anything(x.args, y.args), x.dtype) if x.name == y.name else self.fail("ops")
        if isinstance(x, Reduce):
            assert isinstance(y, Reduce)
            if x.kind != y.kind:
                raise Mismatch("reductions")
            # What a reduction binds is named by its extent, which another may have in one of the kernels alone.
            before = self.bound, self.scope
            if self.bound.get(x.axis.name) != y.axis.name:
                self.bound = {**self.bound, x.axis.name: y.axis.name}
                self.scope = tuple(sorted(self.bound.items()))
            made = raw_reduce(x.kind, self.axis(x.axis, y.axis), self.anything(x.body, y.body), x.dtype)
            self.bound, self.scope = before
            return made
        assert isinstance(y, Ref)
        return ref(x.name, self.anything(x.axes, y.axes), x.dtype) if x.name == y.name else self.fail("references")
