"""Float32 in parts: what many programs multiply is taken apart once, into numbers that the matrix units take.

Before: scores[i, j] = Σ q[i, d] · k[j, d], in float32. Matrix units take no such numbers: each program makes two of TF32
of each that it loads, in registers, and takes them to shared memory, tile by tile.
After: a small kernel stores k, and q, as sums of three numbers of bfloat16, which is exact; their tiles go to the matrix
units as they lie in memory, and six products (of nine; the others are below float32's last bit) make scores of the same
precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..build import op
from ..expr import Axis, Expr, Load, index, load, reductions
from ..inner import as_product, power_of_two
from ..plan import Accumulator, Choices, KernelPlan, Store
from .lay_out import elements_read, rewritten

# Numbers of bfloat16, 8 bits each, that a float32 is the sum of.
PARTS = 3
# How often each element is read, at least, for storing its parts to pay; and how many elements are, all together.
OFTEN, MANY = 8, 2**23
# Elements of a tile of the kernel that takes a tensor apart, and the most along what is innermost.
AT_ONCE, MAX_INNERMOST = 2048, 256


def in_parts(plans: Sequence[KernelPlan], shapes: Mapping[str, tuple[int, ...]]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same, multiplying parts of float32 where that pays, and kernels that
    store these.

    Args:
      shapes: of what plans may read, by name.
    """
    multiplied = [_multiplied(p) if p.compute == "f32" else {} for p in plans]
    made: list[list[KernelPlan]] = [[p] for p in plans]
    for source in dict.fromkeys(n.source for nodes in multiplied for n in nodes):
        users = [k for k, nodes in enumerate(multiplied) if any(n.source == source for n in nodes)]
        read = sum(elements_read(n, plans[k]) for k in users for n in multiplied[k] if n.source == source)
        if read < max(OFTEN * math.prod(shapes[source]), MANY):
            continue
        first = made[users[0]]
        name = f"{first[-1].name}_p{len(first) - 1}"
        splitting = _splitting(source, name, shapes[source])
        first.insert(-1, splitting)
        for k in users:
            note = f"{source} is multiplied in parts, {name}"
            own = _reading(made[k][-1], source, tuple(s.name for s in splitting.stores))
            made[k][-1] = replace(own, notes=(*own.notes, note))
    return [p for group in made for p in group]


def _multiplied(plan: KernelPlan) -> dict[Load, None]:
    """What is loaded in float32 as one side of a matrix product."""
    tiled = frozenset(a for a, n in plan.choices.tiles if n > 1)
    steps = [(s, loop.axis) for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    sums = [(s.update, axis) for s, axis in steps if s.kind == "sum"]
    inner = dict.fromkeys(r for s, _ in steps for r in reductions(s.update))
    sums += [(r.body, r.axis) for r in inner if r.kind == "sum"]
    found: dict[Load, None] = {}
    for body, axis in sums:
        p = as_product(body, axis, tiled | {axis}) if body.dtype == "f32" else None
        for side in (p.left, p.right) if p is not None else ():
            if len(side) == 1 and isinstance(side[0], Load) and side[0].dtype == "f32":
                found[side[0]] = None
    return found


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
