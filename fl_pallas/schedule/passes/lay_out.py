"""Layouts: an operand whose tiles lie scattered in memory is copied once, in the order in which they are read.

Before: the program of a head reads tiles of `bias[x0, j0, h]`, the heads innermost: every element from another sector.
After: a small kernel stores `copy[h, x0, j0]`, and tiles are runs of it.

Before: many programs read tiles `bias[j0, x0]`, their rows last: each is turned in shared memory, with barriers.
After: they read a `copy[x0, j0]`.

Before: the program of a head stores a tile of `grad[x0, x1, h]`: every element in another sector, which is read and
written once for each head. After: it stores `tiles[h, x0, x1]`, for other kernels to read, or to be copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace

from ..build import rewrite
from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Index, Load, free_axes, index, load, loads
from ..inner import factors, power_of_two
from ..plan import Accumulator, Choices, KernelPlan, Loop, Step, Store, bounds_of, expressions, operand_names

# What memory hands over at once, bytes.
SECTOR = 32
# What a GPU moves in the time of a launch, bytes. (H200: of IPA's bias, scattered bytes of 19 MB read take 26.1 us in
# all and a copy 28.2; of 75 MB 63.2 and 56.)
LAUNCH = 2**24
# How often what lies the other way is read, at least, for a copy to pay.
OFTEN = 16
# Elements of a tile of the copying kernel, and the most along what was innermost.
COPIED_AT_ONCE, MAX_INNERMOST = 2048, 64


def lay_out(plan: KernelPlan, shapes: Mapping[str, tuple[int, ...]]) -> tuple[KernelPlan, ...]:
    """The kernels that copy operands, and `plan` reading the copies; `plan` alone where no copy pays.

    An operand is taken to lie as a new tensor of its shape does.

    Args:
      shapes: of what plans may read, by name.
    """
    copies: list[KernelPlan] = []
    notes: list[str] = []
    orders: dict[str, tuple[str, tuple[int, ...]]] = {}
    for node in dict.fromkeys(n for e in _bodies(plan) for n in loads(e)):
        order = _better_order(node, plan, shapes[node.source])
        if order is not None and node.source not in orders:
            name = f"{plan.name}_c{len(copies)}"
            copies.append(_copying(node.source, node.dtype, name, shapes[node.source], order))
            orders[node.source] = name, order
            notes.append(f"{node.source} is copied to {name}, for its tiles lie scattered")

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source not in orders:
            return n
        name, order = orders[n.source]
        return load(name, tuple(n.index[k] for k in order), n.dtype)

    return (*copies, replace(rewritten(plan, rule), notes=(*plan.notes, *notes)) if copies else plan)


def lay_out_results(plans: Sequence[KernelPlan], results: Collection[str]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, what they store lying as tiles do where that pays, and kernels
    that copy it.

    Args:
      results: names of what is stored for others than these kernels, and has to lie as its axes say.
    """
    made = list(plans)
    fixed = {n.source for p in plans for loop in p.loops for e in bounds_of(loop) if e is not None for n in loads(e)}
    for name in [s.name for p in plans for s in p.stores if not s.dims]:
        at, store = next((k, s) for k, p in enumerate(made) for s in p.stores if s.name == name)
        plain = tuple(range(len(store.axes)))
        order = tuple(sorted(plain, key=lambda k: made[at].choices.tile(store.axes[k]) != 1))
        if name in results:
            if _is_scattered(store.index, store.shape, store.dtype, math.prod(store.shape), made[at]):
                made[at : at + 1] = _copied(made[at], store, order)
        elif name not in fixed and _touched(made, store, order) < _touched(made, store, plain):
            made = [_reordered(p, store, order) for p in made]
    return made


def _copied(plan: KernelPlan, store: Store, order: tuple[int, ...]) -> tuple[KernelPlan, KernelPlan]:
    """A kernel that stores something with its dimensions in another order, and the one that copies it."""
    tiles = replace(store, name=f"{plan.name}_{store.name}", axes=tuple(store.axes[k] for k in order))
    back = tuple(map(order.index, range(len(order))))
    copying = _copying(tiles.name, store.dtype, f"{tiles.name}_c", tiles.shape, back)
    copying = replace(copying, stores=(replace(copying.stores[0], name=store.name),))
    note = f"{store.name} is stored as {tiles.name} and copied, for its tiles lie scattered"
    stores = tuple(tiles if s is store else s for s in plan.stores)
    return replace(plan, stores=stores, notes=(*plan.notes, note)), copying


def _touched(plans: Sequence[KernelPlan], stored: Store, order: tuple[int, ...]) -> int:
    """Bytes of the sectors that kernels touch to store and read a tensor with its dimensions in this order."""
    shape, total = tuple(stored.shape[k] for k in order), 0
    for plan in plans:
        nodes = dict.fromkeys(n for e in expressions(plan) for n in loads(e) if n.source == stored.name)
        places = [(s.index, math.prod(s.shape)) for s in plan.stores if s.name == stored.name]
        places += [(n.index, _elements_read(n, plan)) for n in nodes]
        total += sum(n * _apart([at[k] for k in order], shape, itemsize(stored.dtype), plan) for at, n in places)
    return total


def _reordered(plan: KernelPlan, stored: Store, order: tuple[int, ...]) -> KernelPlan:
    """A plan with the dimensions of a tensor in another order where it is stored and read."""

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source != stored.name:
            return n
        return load(n.source, tuple(n.index[k] for k in order), n.dtype)

    turned = replace(stored, axes=tuple(stored.axes[k] for k in order))
    plan = replace(plan, stores=tuple(turned if s.name == stored.name else s for s in plan.stores))
    return rewritten(plan, rule) if stored.name in operand_names(plan) else plan


def _bodies(plan: KernelPlan) -> list[Expr]:
    """What is evaluated most often: the steps of the loops; the stores of a plan without any."""
    steps = [s for loop in plan.loops for s in loop.steps]
    return [s.update if isinstance(s, Accumulator) else s.value for s in steps] or [s.expr for s in plan.stores]


def _better_order(node: Load, plan: KernelPlan, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions of a loaded tensor in a better order, innermost last; None if a copy would not pay."""
    wide = _dimensions_of_tiles(node.index, plan)
    if len(wide) < 2 or not is_float(node.dtype):
        return None
    streamed = {loop.axis for loop in plan.loops}
    inner = sorted(wide, key=lambda k: bool(free_axes(node.index[k]) & streamed))
    size, numel, read = itemsize(node.dtype), math.prod(shape), _elements_read(node, plan)
    is_scattered = _is_scattered(node.index, shape, node.dtype, read, plan)
    is_turned = inner != wide and _joins_rows(node, plan, streamed) and read >= max(OFTEN * numel, LAUNCH // size)
    return (*(k for k in range(len(shape)) if k not in wide), *inner) if is_scattered or is_turned else None


def _dimensions_of_tiles(at: Sequence[Expr], plan: KernelPlan) -> list[int]:
    """The dimensions, by their indices, of which a program has more than one element."""
    single = {a for a in plan.grid if plan.choices.tile(a) == 1}
    return [k for k, i in enumerate(at) if free_axes(i) - single]


def _apart(at: Sequence[Expr], shape: Sequence[int], size: int, plan: KernelPlan) -> int:
    """Bytes of memory that are touched for an element of `size` bytes in a tile."""
    wide = _dimensions_of_tiles(at, plan)
    return min(SECTOR, size * math.prod(shape[wide[-1] + 1 :])) if wide else size


def _is_scattered(at: Sequence[Expr], shape: Sequence[int], dtype: str, elements: int, plan: KernelPlan) -> bool:
    """Whether touching so many elements, a tile at a time, takes longer than it does where tiles are runs, and a
    copy."""
    size, numel = itemsize(dtype), math.prod(shape)
    return elements * (_apart(at, shape, size, plan) - size) > 2 * numel * size + LAUNCH


def _joins_rows(node: Load, plan: KernelPlan, streamed: Set[Axis]) -> bool:
    """Whether a load has rows and columns of a loop's tile, and is no side of a product, which may lie either way."""
    rows = {a for a in plan.grid if a not in plan.features and (plan.choices.tile(a) or 1) > 1}
    wide = {i.axis for i in node.index if isinstance(i, Index)} & (rows | streamed)
    plain = wide == free_axes(node) & (rows | streamed)
    return bool(plain and wide & rows and wide & streamed) and not any(node in factors(e) for e in _bodies(plan))


def _elements_read(node: Load, plan: KernelPlan) -> int:
    """By all programs together."""
    own = free_axes(node)
    again = (-(-a.extent // (plan.choices.tile(a) or 1)) for a in plan.grid if a not in own)
    return math.prod(a.extent for a in own) * math.prod(again)


def _copying(source: str, dtype: str, name: str, shape: tuple[int, ...], order: tuple[int, ...]) -> KernelPlan:
    """The kernel that copies a tensor with its dimensions in another order."""
    axes = [Axis(f"x{k}", n) for k, n in enumerate(shape)]
    tiles = dict.fromkeys(axes, 1)
    tiles[axes[-1]] = min(power_of_two(shape[-1]), MAX_INNERMOST)
    last = axes[order[-1]]
    tiles[last] = min(power_of_two(last.extent), COPIED_AT_ONCE // tiles[axes[-1]])
    grid = tuple(axes[k] for k in order)
    store = Store(name, grid, dtype, load(source, tuple(map(index, axes)), dtype))
    used = tuple(a for a in grid if a.extent > 1)
    choices = Choices(tuple((a, tiles[a]) for a in used), warps=4, stages=1)
    return KernelPlan(name, used, (), (), (store,), "f32", choices)


def rewritten(plan: KernelPlan, rule: Callable[[Expr], Expr]) -> KernelPlan:
    """A plan with `rule` applied to the nodes of what its loops and stores compute."""

    def of_step(s: Step) -> Step:
        if isinstance(s, Accumulator):
            return replace(s, update=rewrite(s.update, rule))
        return replace(s, value=rewrite(s.value, rule))

    def of_loop(loop: Loop) -> Loop:
        inner = loop.interior and replace(loop.interior, constants=tuple(map(of_pair, loop.interior.constants)))
        return replace(loop, steps=tuple(map(of_step, loop.steps)), interior=inner)

    def of_pair(pair: tuple[Expr, Expr]) -> tuple[Expr, Expr]:
        return rewrite(pair[0], rule), rewrite(pair[1], rule)

    stores = tuple(replace(s, expr=rewrite(s.expr, rule)) for s in plan.stores)
    return replace(plan, loops=tuple(map(of_loop, plan.loops)), stores=stores)
