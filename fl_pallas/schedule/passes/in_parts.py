"""Float32 in parts: what many programs multiply is taken apart once, into numbers that the matrix units take.

Before: scores[i, j] = Σ q[i, d] · k[j, d], in float32. Matrix units take no such numbers: each program makes two of
TF32 of each that it loads, in registers, and takes them to shared memory, tile by tile.
After: a small kernel stores k as sums of three numbers of bfloat16, which is exact; their tiles go to the matrix units
as they lie in memory, and six products (of nine; the others are below float32's last bit) make scores of the same
precision. What a program reads once, its rows of q, it takes apart by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..build import op
from ..expr import Axis, Expr, Load, free_axes, index, load
from ..inner import PARTS, power_of_two
from ..plan import Accumulator, Choices, KernelPlan, Loop, Store, operand_names
from .lay_out import elements_read, rewritten
from .shared import sides

# How often each element is read, at least, for storing its parts to pay; and how many elements are, all together.
OFTEN, MANY = 8, 2**23
# Rows of a program, before those are chosen.
ROWS = 64
# Elements of a tile of the kernel that takes a tensor apart, and the most along what is innermost.
AT_ONCE, MAX_INNERMOST = 2048, 256


def in_parts(plans: Sequence[KernelPlan], shapes: Mapping[str, tuple[int, ...]]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, multiplying parts of float32 where that pays, and kernels that
    store these.

    Args:
      shapes: of what plans may read, by name.
    """
    made: list[list[KernelPlan]] = [[p] for p in plans]
    found = [multiplied(p.loops, tiled_axes(p)) if p.compute == "f32" else frozenset() for p in plans]
    for source in dict.fromkeys(name for p in plans for name in operand_names(p)):
        users = {k: own for k, nodes in enumerate(found) if (own := [n for n in nodes if n.source == source])}
        read = sum(elements_read(n, plans[k]) for k, nodes in users.items() for n in nodes)
        if not users or not _pays(read, math.prod(shapes[source])):
            continue
        first = min(users)
        name = f"{plans[first].name}_p{len(made[first]) - 1}"
        splitting = _splitting(source, name, shapes[source])
        made[first].insert(-1, splitting)
        for k in users:
            note = f"{source} is multiplied in parts, {name}"
            read_so = _reading(made[k][-1], source, tuple(s.name for s in splitting.stores))
            made[k][-1] = replace(read_so, notes=(*read_so.notes, note))
    return [p for group in made for p in group]


def are_in_parts(loops: Sequence[Loop], tiled: frozenset[Axis], rows: Sequence[Axis], batch: Sequence[Axis]) -> bool:
    """Whether something that loops multiply will be taken apart, as far as is known before tiles are chosen.

    Args:
      tiled: the axes of which a tile has more than one index; `rows` those of them that have many programs, and
        `batch` those of which each program has one.
    """
    programs = {a: a.extent for a in batch} | {a: -(-a.extent // ROWS) for a in rows}
    for n in multiplied(loops, tiled):
        numel = math.prod(a.extent for a in free_axes(n))
        again = math.prod(count for a, count in programs.items() if a not in free_axes(n))
        if _pays(numel * again, numel):
            return True
    return False


def _pays(read: int, numel: int) -> bool:
    return read >= max(OFTEN * numel, MANY)


def tiled_axes(plan: KernelPlan) -> frozenset[Axis]:
    """The axes of which a tile has more than one index."""
    return frozenset(a for a, n in plan.choices.tiles if n > 1)


def multiplied(loops: Iterable[Loop], tiled: frozenset[Axis]) -> frozenset[Load]:
    """What loops load in float32 as one side of a matrix product."""
    found: set[Load] = set()
    for loop in loops:
        updates = tuple(s.update for s in loop.steps if isinstance(s, Accumulator))
        found |= {n for n, _ in sides(updates, loop.axis, tiled) if n.dtype == "f32"}
    return frozenset(found)


def _splitting(source: str, name: str, shape: tuple[int, ...]) -> KernelPlan:
    """The kernel that stores the parts of a tensor, the largest first."""
    axes = tuple(Axis(f"x{k}", n) for k, n in enumerate(shape))
    rest: Expr = load(source, tuple(map(index, axes)), "f32")
    stores: list[Store] = []
    for n in range(PARTS):
        part = op("rounded", rest, dtype="f32")
        stores.append(Store(f"{name}_{n}", axes, "bf16", part))
        rest = op("sub", rest, part, dtype="f32")
    used = tuple(a for a in axes if a.extent > 1)
    tiles, left = dict.fromkeys(used, 1), AT_ONCE
    for a, most in zip(reversed(used), (MAX_INNERMOST, AT_ONCE), strict=False):
        tiles[a] = min(power_of_two(a.extent), most, left)
        left //= tiles[a]
    return KernelPlan(name, used, (), (), tuple(stores), "f32", Choices(tuple(tiles.items()), warps=4, stages=1))


def _reading(plan: KernelPlan, source: str, parts: tuple[str, ...]) -> KernelPlan:
    """A plan that loads the parts of a tensor in its place."""

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source != source:
            return n
        return op("joined", *(load(p, n.index, "bf16") for p in parts), dtype="f32")

    return rewritten(plan, rule)
