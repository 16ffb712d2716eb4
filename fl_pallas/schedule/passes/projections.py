"""Regions end before the products with weights that would take what they return on: a bias's gradient is stored, and
that of the pairs which a layer made it of is PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..dtype import is_float
from ..expr import Axis, Load, loads, reductions
from ..program import Program, Value, enclosed
from .joins import Seed, Sides, axes_of, indexing
from .resolve_views import root_of
from .weights import has_weight


def large_results(program: Program, seed: Seed) -> set[str]:
    """The large values of a region that are returned, as they are or through views."""
    return {root_of(program, n) for n in program.outputs} & seed.large


def end_before_projections(program: Program, seed: Seed, pairs: Set[str] | None = None) -> None:
    """Leave out of a region what products with weights make of large values that together are no larger than the
    result, if all that is returned comes from these: storing the one or the others is as good.

    So a bias's gradient is stored, and a gate's, and that of the pairs and the weights from which linear layers made
    them are PyTorch's.

    Args:
      pairs: where nothing large is returned, what regions compute; the rest, from which layers made biases, PyTorch
        has in memory, and reads it again beside what is left out.
    """
    returned = large_results(program, seed)
    large = [v for v in program.values if v.name in seed.large and v.name != seed.value.name]
    made: list[tuple[Value, Value]] = []
    for v in large:
        stored = [program.by_name[r] for r in v.reads if r in seed.large]
        if v.expr is not None and reductions(v.expr) and has_weight(program, v) and len(stored) == 1:
            made.append((v, stored[0]))
    for way in ([pair] for pair in made):
        if _ends_before(program, seed, way, returned, pairs):
            return
    if len(made) > 1:
        _ends_before(program, seed, made, returned, pairs)


def _ends_before(
    program: Program, seed: Seed, made: list[tuple[Value, Value]], returned: set[str], pairs: Set[str] | None
) -> bool:
    """Leave out of a region products, beside the values that they are made of, and what follows them, if all that is
    returned does, and nothing that stays reads any of it."""
    kept = {stored.name: stored for _, stored in made}
    meeting = (m for m in seed.members for k in kept.values() if _meets_as_large(program, program.by_name[m], k, seed))
    after = {v.name for v, _ in made} | {*meeting}
    for u in program.values:
        if u.name in seed.members and after.intersection(u.reads):
            after.add(u.name)
    others = {r for name in after for r in program.by_name[name].reads if r in seed.large} - after
    small = sum(k.numel for k in kept.values()) <= max(v.numel for v, _ in made)
    if not small or not returned <= after or not others <= kept.keys() or kept.keys() & after:
        return False
    if pairs is not None and not _is_of_memory(program, seed, after, kept, pairs):
        return False
    for name in after:
        del seed.members[name]
    seed.large -= after
    for name in seed.members.keys() - _between(program, seed):
        del seed.members[name]
    return True


def _is_of_memory(program: Program, seed: Seed, after: Set[str], kept: Mapping[str, Value], pairs: Set[str]) -> bool:
    """Whether what follows is no attention of the region's: all products of its large values are with weights, or with
    what is in memory in any case, and has pairs as well, or is as large (those that a layer made a bias of)."""
    size, met = min(k.numel for k in kept.values()), False
    for v in (program.by_name[name] for name in after):
        if v.expr is None or not reductions(v.expr) or seed.large.isdisjoint(v.reads):
            continue
        own = after | kept.keys()
        others = [n for n in loads(v.expr) if n.dtype != "bool" and root_of(program, n.source) not in own]
        sides = _sides(program, [n for n in loads(v.expr) if n.source in seed.large], seed)
        large = [n for n in others if _has_pairs(n, *sides) or program.by_name[n.source].numel >= size]
        if not large and any(is_float(n.dtype) for n in others) and not has_weight(program, v):
            return False
        met |= any(root_of(program, n.source) not in pairs for n in large)
    return met


def _sides(program: Program, read: Sequence[Load], seed: Seed) -> Sides:
    """The axes along rows and along columns, of what loads these large values."""
    rows, cols = (
        frozenset[Axis]().union(*(indexing(n, program.by_name[n.source], seed.sides[n.source][k]) for n in read))
        for k in (0, 1)
    )
    return rows, cols


def _has_pairs(node: Load, rows: frozenset[Axis], cols: frozenset[Axis]) -> bool:
    """Whether a load is along rows and columns; of a dimension that both were flattened to, along all of it."""
    own = axes_of(node)
    return rows | cols <= own if rows & cols else bool(rows & own and cols & own)


def _between(program: Program, seed: Seed) -> set[str]:
    """The members that are large or read what is, and those that lie between these."""
    own = {m for m in seed.members if m in seed.large or not seed.large.isdisjoint(program.by_name[m].reads)}
    return own | enclosed(program, own) & seed.members.keys()


def _meets_as_large(program: Program, v: Value, kept: Value, seed: Seed) -> bool:
    """Whether `v` reduces the product of a large value and of another of that size, from outside of the region."""
    others = (program.by_name[r] for r in v.reads if r not in seed.members)
    return v.name not in seed.large and kept.name in v.reads and any(o.numel >= kept.numel for o in others)
