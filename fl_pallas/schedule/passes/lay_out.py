"""Layouts: an operand whose tiles lie scattered in memory is copied once, in the order in which they are read.

Before: the program of a head reads tiles of `bias[x0, j0, h]`, the heads innermost: every element from another sector.
After: a small kernel stores `copy[h, x0, j0]`, and tiles are runs of it.

Before: many programs read tiles `bias[j0, x0]`, their rows last: each is turned in shared memory, with barriers.
After: they read a `copy[x0, j0]`.

Before: a kernel stores scores [key, query] for another whose loop goes along keys, which reads a copy. After: it stores
them [query, key], and what else makes tiles of pairs has their longer side along keys.

Before: the program of a head stores a tile of `grad[x0, x1, h]`: every element in another sector, which is read and
written once for each head. After: it stores `tiles[h, x0, x1]`, for other kernels to read, or to be copied.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Index, Load, free_axes, index, load, loads, reductions
from ..inner import as_product, factors, power_of_two
from ..plan import Accumulator, Choices, KernelPlan, Store, bounds_of, expressions, operand_names
from ..remember import remembered
from .digits import apart, together
from .rewritten import rewritten

# What memory hands over at once, bytes.
SECTOR = 32
# What a GPU moves in the time of a launch, bytes. (H200: of IPA's bias, scattered bytes of 19 MB read take 26.1 us in
# all and a copy 28.2; of 75 MB 63.2 and 56.)
LAUNCH = 2**24
# How often what lies the other way is read, at least, for a copy to pay.
OFTEN = 16
# Elements of a tile of the copying kernel, and the most along what was innermost.
COPIED_AT_ONCE, MAX_INNERMOST = 2048, 64

# Names and shapes of what a plan reads.
_Read = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class _Wish:
    """A kernel that would rather read an operand with its dimensions in another order.

    Attributes:
      plan: its place among the kernels.
      spared: bytes of sectors that it would not touch then.
      turned: elements that it would not have to turn.
    """

    plan: int
    dtype: str
    spared: int
    turned: int


def lay_out(
    plans: Sequence[KernelPlan], shapes: Mapping[str, tuple[int, ...]], results: Collection[str]
) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, reading copies where these pay, and kernels that make them.

    An operand is taken to lie as a new tensor of its shape does; what kernels store for each other alone lies as those
    that read it would have it, where that saves its copies.

    Args:
      shapes: of what plans may read, by name.
      results: names of what is stored for others than these kernels.
    """
    plans, shapes, cut = apart(plans, shapes)
    plans, shapes = _laid_for_readers(plans, dict(shapes), results)
    made: list[list[KernelPlan]] = [[p] for p in plans]
    copied: set[tuple[int, str]] = set()
    for (source, order), found in _wishes(plans, shapes).items():
        users = [w.plan for w in found if (w.plan, source) not in copied]
        if not users or not _pays(found, math.prod(shapes[source])):
            continue
        first = min(users)
        name = f"{plans[first].name}_c{len(made[first]) - 1}"
        made[first].insert(-1, _copying(source, found[0].dtype, name, shapes[source], order))
        note = f"{source} is copied to {name}, for its tiles lie scattered"
        for at in dict.fromkeys(users):
            copied.add((at, source))
            turned = _read_from(made[at][-1], source, name, order)
            made[at][-1] = replace(turned, notes=(*turned.notes, note))
    return together([p for group in made for p in group], cut)


def _laid_for_readers(
    plans: Sequence[KernelPlan], shapes: dict[str, tuple[int, ...]], results: Collection[str]
) -> tuple[Sequence[KernelPlan], dict[str, tuple[int, ...]]]:
    """What kernels store for each other with its dimensions in the order that moves the fewest bytes, where as it is
    some of it would be copied, or sectors are not used whole; the tiles of kernels of pairs along that; and the shapes.
    """
    fixed = {*results, *_fixed(plans)}
    own = [s for p in plans for s in p.stores if s.name not in fixed and not s.dims and len(s.axes) > 1]
    wishes = _wishes(plans, shapes)
    numel = {s.name: math.prod(s.shape) for s in own}
    pays = any(name in numel and _pays(found, numel[name]) for (name, _), found in wishes.items())
    if not pays and all(_wasted(plans, s) <= LAUNCH for s in own):
        return plans, shapes
    for store in own:
        plain = tuple(range(len(store.axes)))
        pairs = [(a, b) for a, b in combinations(plain, 2) if store.axes[a].extent == store.axes[b].extent]
        turned = [tuple(b if k == a else a if k == b else k for k in plain) for a, b in pairs]
        best = _moved(plans, shapes), plans, shapes
        wanted = (order for name, order in wishes if name == store.name)
        for order in dict.fromkeys((*wanted, *turned)):
            lying = {**shapes, store.name: tuple(store.shape[k] for k in order)}
            way = [_along_memory(_reordered(p, store, order), lying) for p in plans]
            moved = _moved(way, lying)
            if moved < best[0]:
                best = moved, way, lying
        _, plans, shapes = best
    return plans, shapes


def _wishes(
    plans: Sequence[KernelPlan], shapes: Mapping[str, tuple[int, ...]]
) -> dict[tuple[str, tuple[int, ...]], list[_Wish]]:
    """The tensors that kernels would rather read with their dimensions in another order, that order, and what it spares
    each."""
    found: dict[tuple[str, tuple[int, ...]], list[_Wish]] = {}
    for at, plan in enumerate(plans):
        for tensor, wish in _wishes_of(plan, at, _read_by(plan, shapes)):
            found.setdefault(tensor, []).append(wish)
    return found


def _read_by(plan: KernelPlan, shapes: Mapping[str, tuple[int, ...]]) -> _Read:
    """What a plan reads: in most ways of laying things out that and the plan are the same, and so is what is asked of
    them."""
    return tuple((name, shapes[name]) for name in operand_names(plan))


@remembered
def _wishes_of(plan: KernelPlan, at: int, read: _Read) -> tuple[tuple[tuple[str, tuple[int, ...]], _Wish], ...]:
    """The wishes of the plan in this place."""
    shapes, found = dict(read), []
    for node in dict.fromkeys(n for e in _bodies(plan) for n in loads(e)):
        order, wish = _wish(node, plan, at, shapes[node.source])
        if wish.spared or wish.turned:
            found.append(((node.source, order), wish))
    return tuple(found)


def _wasted(plans: Sequence[KernelPlan], store: Store) -> int:
    """Bytes of sectors that kernels touch of a tensor and do not use."""
    size = itemsize(store.dtype)
    return sum(n * (touched_by(at, store.shape, size, p) - size) for p, at, n in _accesses(plans, store.name))


def _moved(plans: Sequence[KernelPlan], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes that kernels touch, turn and copy of what they store for each other."""
    total = sum(_touched(p, _read_by(p, shapes)) for p in plans)
    stored = {s.name: s for p in plans for s in p.stores}
    for (name, _), found in _wishes(plans, shapes).items():
        if name not in stored:
            continue
        size, numel = itemsize(stored[name].dtype), math.prod(stored[name].shape)
        if _pays(found, numel):
            total += 2 * numel * size - sum(w.spared for w in found)
        else:
            total += sum(w.turned for w in found) * size
    return total


def _along_memory(plan: KernelPlan, shapes: Mapping[str, tuple[int, ...]]) -> KernelPlan:
    """A kernel of pairs, its loops along neither, with the longer side of tiles along what tensors have innermost."""
    if any(name not in shapes for name in operand_names(plan)):
        return plan
    tiles = dict(plan.choices.tiles)
    wide = [a for a in plan.grid if a not in plan.features and tiles.get(a, 1) > 1]
    pairs = [(a, b) for a, b in combinations(wide, 2) if a.extent == b.extent and tiles[a] != tiles[b]]
    ways = [plan, *(_exchanged(plan, a, b) for a, b in pairs if _go_together(plan, a, b))]
    read = _read_by(plan, shapes)
    return min(ways, key=lambda p: _touched(p, read))


def _exchanged(plan: KernelPlan, a: Axis, b: Axis) -> KernelPlan:
    """A plan with the sides of its tiles along two axes exchanged."""
    other = {a: b, b: a}

    def turned(c: Choices) -> Choices:
        tiles = dict(c.tiles)
        return replace(c, tiles=tuple((x, tiles.get(other.get(x, x), n)) for x, n in c.tiles))

    return replace(plan, choices=turned(plan.choices), others=tuple(map(turned, plan.others)))


def _go_together(plan: KernelPlan, a: Axis, b: Axis) -> bool:
    """Whether two axes are on the same sides of all products of a kernel."""
    tiled = plan.choices.tiled
    sums = {(r.body, r.axis) for e in expressions(plan) for r in reductions(e)}
    sums |= {(s.update, loop.axis) for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)}
    products = (as_product(body, axis, tiled | {axis}) for body, axis in sums)
    sides = (frozenset().union(*map(free_axes, side)) for p in products if p for side in (p.left, p.right))
    return all((a in side) == (b in side) for side in sides)


@remembered
def _touched(plan: KernelPlan, read: _Read) -> int:
    """Bytes of the sectors that a kernel touches."""
    shapes = dict(read)
    nodes = dict.fromkeys(n for e in expressions(plan) for n in loads(e))
    places = [(n.index, shapes[n.source], n.dtype, _elements_read(n, plan)) for n in nodes]
    places += [(s.index, s.shape, s.dtype, math.prod(s.shape)) for s in plan.stores]
    return sum(n * touched_by(at, shape, itemsize(dtype), plan) for at, shape, dtype, n in places)


def _wish(node: Load, plan: KernelPlan, at: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], _Wish]:
    """The dimensions of a loaded tensor in the order in which a kernel would rather have them, and what that spares."""
    wide = _dimensions_of_tiles(node.index, plan)
    streamed = {loop.axis for loop in plan.loops}
    inner = sorted(wide, key=lambda k: bool(free_axes(node.index[k]) & streamed))
    order = (*(k for k in range(len(shape)) if k not in wide), *inner)
    if len(wide) < 2 or not is_float(node.dtype):
        return order, _Wish(at, node.dtype, 0, 0)
    size, read = itemsize(node.dtype), _elements_read(node, plan)
    spared = read * (touched_by(node.index, shape, size, plan) - size)
    turned = read if inner != wide and _joins_rows(node, plan, streamed) else 0
    return order, _Wish(at, node.dtype, spared, turned)


def _pays(wishes: Sequence[_Wish], numel: int) -> bool:
    """Whether a copy of so many elements takes less time than reading them as they lie does longer."""
    size = itemsize(wishes[0].dtype)
    scattered = sum(w.spared for w in wishes) > 2 * numel * size + LAUNCH
    return scattered or sum(w.turned for w in wishes) >= max(OFTEN * numel, LAUNCH // size)


def _read_from(plan: KernelPlan, source: str, name: str, order: tuple[int, ...]) -> KernelPlan:
    """A plan that loads a tensor under another name, its dimensions in another order."""

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source != source:
            return n
        return load(name, tuple(n.index[k] for k in order), n.dtype)

    return rewritten(plan, rule)


def lay_out_results(plans: Sequence[KernelPlan], results: Collection[str]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, what they store lying as tiles do where that pays, and kernels
    that copy it.

    Args:
      results: names of what is stored for others than these kernels, and has to lie as its axes say.
    """
    made = list(plans)
    fixed = _fixed(plans)
    for name in [s.name for p in plans for s in p.stores if not s.dims]:
        at, store = next((k, s) for k, p in enumerate(made) for s in p.stores if s.name == name)
        plain = tuple(range(len(store.axes)))
        order = tuple(sorted(plain, key=lambda k: made[at].choices.tile(store.axes[k]) != 1))
        if name in results:
            numel, size = math.prod(store.shape), itemsize(store.dtype)
            if numel * (touched_by(store.index, store.shape, size, made[at]) - size) > 2 * numel * size + LAUNCH:
                made[at : at + 1] = _copied(made[at], store, order)
        elif name not in fixed and _accessed(made, store, order) < _accessed(made, store, plain):
            made = [_reordered(p, store, order) for p in made]
    return made


def _fixed(plans: Sequence[KernelPlan]) -> set[str]:
    """Names of what bounds of loops read."""
    return {n.source for p in plans for loop in p.loops for e in bounds_of(loop) if e is not None for n in loads(e)}


def _copied(plan: KernelPlan, store: Store, order: tuple[int, ...]) -> tuple[KernelPlan, KernelPlan]:
    """A kernel that stores something with its dimensions in another order, and the one that copies it."""
    tiles = replace(store, name=f"{plan.name}_{store.name}", axes=tuple(store.axes[k] for k in order))
    back = tuple(map(order.index, range(len(order))))
    copying = _copying(tiles.name, store.dtype, f"{tiles.name}_c", tiles.shape, back)
    copying = replace(copying, stores=(replace(copying.stores[0], name=store.name),))
    note = f"{store.name} is stored as {tiles.name} and copied, for its tiles lie scattered"
    stores = tuple(tiles if s is store else s for s in plan.stores)
    return replace(plan, stores=stores, notes=(*plan.notes, note)), copying


def _accessed(plans: Sequence[KernelPlan], stored: Store, order: tuple[int, ...]) -> int:
    """Bytes of the sectors that kernels touch to store and read a tensor with its dimensions in this order."""
    shape, size = tuple(stored.shape[k] for k in order), itemsize(stored.dtype)
    found = _accesses(plans, stored.name)
    return sum(n * touched_by([at[k] for k in order], shape, size, plan) for plan, at, n in found)


def _accesses(plans: Sequence[KernelPlan], name: str) -> Iterator[tuple[KernelPlan, Sequence[Expr], int]]:
    """The kernels that store or read a tensor, at which indices, and how many elements."""
    for plan in plans:
        yield from ((plan, s.index, math.prod(s.shape)) for s in plan.stores if s.name == name)
        nodes = dict.fromkeys(n for e in expressions(plan) for n in loads(e) if n.source == name)
        yield from ((plan, n.index, _elements_read(n, plan)) for n in nodes)


def _reordered(plan: KernelPlan, stored: Store, order: tuple[int, ...]) -> KernelPlan:
    """A plan with the dimensions of a tensor in another order where it is stored and read."""
    axes = tuple(stored.axes[k] for k in order)
    plan = replace(plan, stores=tuple(replace(s, axes=axes) if s.name == stored.name else s for s in plan.stores))
    is_read = stored.name in operand_names(plan)
    return _read_from(plan, stored.name, stored.name, order) if is_read else plan


def _bodies(plan: KernelPlan) -> list[Expr]:
    """What is evaluated most often: the steps of the loops; the stores of a plan without any."""
    steps = [s for loop in plan.loops for s in loop.steps]
    return [s.update if isinstance(s, Accumulator) else s.value for s in steps] or [s.expr for s in plan.stores]


def _dimensions_of_tiles(at: Sequence[Expr], plan: KernelPlan) -> list[int]:
    """The dimensions, by their indices, of which a program has more than one element."""
    single = {a for a in (*plan.grid, *(loop.axis for loop in plan.loops)) if plan.choices.tile(a) == 1}
    return [k for k, i in enumerate(at) if free_axes(i) - single]


def touched_by(at: Sequence[Expr], shape: Sequence[int], size: int, plan: KernelPlan) -> int:
    """Bytes of memory that are touched for an element of `size` bytes, at these indices, in a plan's tile."""
    wide = _dimensions_of_tiles(at, plan)
    if not wide:
        return size
    apart = size * math.prod(shape[wide[-1] + 1 :])
    # Runs of a tile, where what is innermost is one of its sides.
    return min(SECTOR, apart if apart > size else max(size, SECTOR // _run(at, shape, plan)))


def _run(at: Sequence[Expr], shape: Sequence[int], plan: KernelPlan) -> int:
    """Elements of a tile that lie side by side."""
    run = 1
    for i, extent in zip(reversed(at), reversed(shape), strict=True):
        side = (plan.choices.tile(i.axis) or extent) if isinstance(i, Index) else extent
        run *= min(side, extent)
        if side < extent:
            break
    return run


def _joins_rows(node: Load, plan: KernelPlan, streamed: Set[Axis]) -> bool:
    """Whether a load has rows and columns of a loop's tile, and is no side of a product, which may lie either way."""
    rows = {a for a in plan.grid if a not in plan.features and (plan.choices.tile(a) or 1) > 1}
    wide = {i.axis for i in node.index if isinstance(i, Index)} & (rows | streamed)
    plain = wide == free_axes(node) & (rows | streamed)
    return bool(plain and wide & rows and wide & streamed) and not any(node in factors(e) for e in _bodies(plan))


def _elements_read(node: Load, plan: KernelPlan) -> int:
    """By all programs together."""
    own = free_axes(node) | {loop.parts for loop in plan.loops}
    again = (-(-a.extent // (plan.choices.tile(a) or 1)) for a in plan.grid if a not in own)
    return math.prod(a.extent for a in free_axes(node)) * math.prod(again)


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
