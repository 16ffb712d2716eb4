"""Split sums: where a kernel without a loop has too few programs for the GPU, several share what each sums up.

Before: `grad[h, i, j] = sum[b < 2048](ds(b, h, i, j))` has a program for each tile of (i, j), and windows are one tile.
After: 64 programs for each sum up 32 of b, and another kernel adds what they store.
"""

from __future__ import annotations

from dataclasses import replace

from ..build import op, reduce, select, substitute
from ..expr import Axis, Expr, Reduce, children, const, free_axes, index, load, reductions, ref
from ..inner import is_matrix_product, is_sequential
from ..plan import Accumulator, Choices, KernelPlan, Loop, Store, held_dtype
from ..target import Target
from .split_loop import MERGED_AT_ONCE, WAVES, note_of_parts, programs_of, with_part

# Least indices of a part, for a program has its first loads to wait for: where each takes products of matrices, and
# where it does not. (Each waits for the last one's loads: 256 take 115 us on an H200.)
MIN_PART, MIN_LIGHT_PART = 16, 32


def split_sums(plan: KernelPlan, merger: str, target: Target) -> tuple[KernelPlan, ...]:
    """The plan as it is; or one whose programs each take a part of its sums and store it, and one, named
    `merger`, that folds the parts and stores what `plan` does.
    """
    tiled = plan.choices.tiled
    found = _split_up(plan, tiled)
    wanted = WAVES * target.processors // max(1, programs_of(plan))
    wanted = min([wanted, *(r.axis.extent // _least(r, tiled) for r in found)])
    if not found or wanted < 2:
        return (plan,)
    parts = Axis("p0", 1 << (wanted.bit_length() - 1))
    names = {r: f"{plan.name}_a{n}" for n, r in enumerate(found)}
    held = {r: held_dtype(r.kind, r.body, plan.compute) for r in found}
    stores = tuple(Store(names[r], (parts, *plan.grid), held[r], _part(r, parts)) for r in found)
    first = replace(
        plan,
        grid=(parts, *plan.grid),
        stores=stores,
        choices=with_part(plan.choices, parts),
        others=tuple(with_part(c, parts) for c in plan.others),
        notes=(*plan.notes, note_of_parts("a sum", parts.extent, programs_of(plan), merger)),
    )
    return first, _merging(plan, merger, parts, names, held)


def _least(r: Reduce, tiled: frozenset[Axis]) -> int:
    """Indices of a part, at least."""
    products = (is_matrix_product(n.body, n.axis, tiled | {n.axis}) for n in reductions(r.body) if n.kind == "sum")
    return MIN_PART if any(products) else MIN_LIGHT_PART


def _split_up(plan: KernelPlan, tiled: frozenset[Axis]) -> list[Reduce]:
    """The sums in a plan's stores that are taken one index at a time; none if the merging kernel had more to do."""
    found: dict[Reduce, None] = {}

    def visit(e: Expr) -> bool:
        if isinstance(e, Reduce):
            found[e] = None
            return e.kind == "sum" and is_sequential(e, tiled) and free_axes(e) >= {*plan.grid}
        return all(map(visit, children(e)))

    return [*found] if not plan.loops and all(visit(s.expr) for s in plan.stores) else []


def _part(r: Reduce, parts: Axis) -> Expr:
    """What one of the parts sums up to; all are equally long, the last perhaps beyond the end."""
    length = -(-r.axis.extent // parts.extent)
    own = Axis(f"%{length}", length)
    at = op("add", op("mul", index(parts), const(length, "i64"), dtype="i64"), index(own), dtype="i64")
    if length * parts.extent == r.axis.extent:
        return reduce(r.kind, own, substitute(r.body, {r.axis: at}), r.dtype)
    last = const(r.axis.extent - 1, "i64")
    body = substitute(r.body, {r.axis: op("min", at, last, dtype="i64")})
    within = op("le", at, last, dtype="bool")
    return reduce(r.kind, own, select(within, body, const(0, body.dtype)), r.dtype)


def _merging(plan: KernelPlan, name: str, parts: Axis, names: dict[Reduce, str], held: dict[Reduce, str]) -> KernelPlan:
    """Before: out = f(Σ over all). After: out = f(Σ over parts), each loaded."""
    place = (index(parts), *map(index, plan.grid))
    steps = tuple(
        Accumulator(f"a{n}", r.kind, plan.grid, load(names[r], place, held[r]), held[r], None)
        for n, r in enumerate(names)
    )
    sums = {r: ref(s.name, plan.grid, s.dtype) for r, s in zip(names, steps, strict=True)}
    stores = tuple(replace(s, expr=substitute(s.expr, {}, sums)) for s in plan.stores)
    # Short runs of one row: there are few elements, and each program adds up all parts of its own.
    tiles = dict.fromkeys(plan.grid, 1)
    innermost = max(plan.grid, key=lambda a: ((plan.choices.tile(a) or 1) > 1, plan.grid.index(a)))
    tiles[innermost] = plan.choices.tile(innermost) or 1
    together = max(1, MERGED_AT_ONCE // tiles[innermost])
    tiles[parts] = min(parts.extent, 1 << (together.bit_length() - 1))
    choices = Choices(tuple(tiles.items()), 4, 1)
    return KernelPlan(name, plan.grid, plan.features, (Loop(parts, steps),), stores, plan.compute, choices)
