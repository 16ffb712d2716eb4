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
from .rewritten import rewritten
from .shared import sides

# How often each element is read, at least, for storing its parts to pay; and how many elements are, all together.
OFTEN, MANY = 2, 2**22
# Rows of a program, before those are chosen.
ROWS = 64
# Elements of a tile of the kernel that takes a tensor apart, and the most along what is innermost.
AT_ONCE, MAX_INNERMOST = 2048, 256


def in_parts(plans: Sequence[KernelPlan], shapes: Mapping[str, tuple[int, ...]]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, multiplying parts of float32 where they are to, and kernels
    that store these: of what a loop goes through, and of nothing else, for that is taken apart once by each program.

    Args:
      shapes: of what plans may read, by name.
    """
    made: list[list[KernelPlan]] = [[p] for p in plans]
    users = [k for k, p in enumerate(plans) if p.parts]
    loaded = {k: [*streamed(plans[k].loops, plans[k].choices.tiled)] for k in users}
    for source in dict.fromkeys(name for p in plans for name in operand_names(p)):
        if not any(n.source == source for nodes in loaded.values() for n in nodes):
            continue
        own = [k for k in users if source in operand_names(plans[k])]
        name = f"{plans[own[0]].name}_p{len(made[own[0]]) - 1}"
        splitting = _splitting(source, name, shapes[source])
        made[own[0]].insert(-1, splitting)
        for k in own:
            plan = _reading(made[k][-1], source, tuple(s.name for s in splitting.stores))
            made[k][-1] = replace(plan, notes=(*plan.notes, f"{source} is multiplied in parts, {name}"))
    return [p for group in made for p in group]


def are_in_parts(loops: Sequence[Loop], tiled: frozenset[Axis], rows: Sequence[Axis], batch: Sequence[Axis]) -> bool:
    """Whether a kernel had better multiply parts, as far as is known before its tiles are chosen.

    Args:
      tiled: the axes of which a tile has more than one index; `rows` those of them that have many programs, and
        `batch` those of which each program has one.
    """
    programs = {a: a.extent for a in batch} | {a: -(-a.extent // ROWS) for a in rows}
    for n in streamed(loops, tiled):
        numel = math.prod(a.extent for a in free_axes(n))
        again = math.prod(count for a, count in programs.items() if a not in free_axes(n))
        if again >= OFTEN and numel * again >= MANY:
            return True
    return False


def streamed(loops: Iterable[Loop], tiled: frozenset[Axis]) -> frozenset[Load]:
    """What loops go through, in float32, as one side of a matrix product."""
    found: set[Load] = set()
    for loop in loops:
        updates = tuple(s.update for s in loop.steps if isinstance(s, Accumulator))
        own = (n for n, _ in sides(updates, loop.axis, tiled) if n.dtype == "f32")
        found |= {n for n in own if loop.axis in free_axes(n)}
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
