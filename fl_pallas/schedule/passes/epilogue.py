"""What finishes the results of a region (gates, scalings, differences) is computed by its kernels where that spares
memory traffic."""

from __future__ import annotations

from collections.abc import Set

from ..dtype import is_float, itemsize
from ..expr import free_axes, loads, reductions
from ..program import Program, Value, depends, reading
from .resolve_views import is_small_part, readers, root_of
from .surround import uses_division
from .weigh import LAUNCH, MOVED

# Bytes of a launch's time, and the share of them that is worth the trouble.
LAUNCHED = LAUNCH * MOVED
WORTH = LAUNCHED // 4


def with_epilogue(program: Program, members: set[str], others: set[str]) -> set[str]:
    """Add pointwise values that only finish what the region returns, or a small part that is all that is read of it."""
    members = set(members)
    for v in reading(program, members):
        if v.name in members or v.name in others or v.expr is None or v.is_view or v.projection:
            continue
        if not is_float(v.dtype) or reductions(v.expr):
            continue
        inner = [r for r in v.reads if r in members]
        largest = max((program.by_name[r] for r in inner), key=lambda r: r.numel)
        finishes = v.numel == largest.numel and _is_of_all(v, largest) or _is_part(program, v, largest)
        if finishes and not depends(program, set(v.reads) - members, members):
            members.add(v.name)
    return members


def _is_of_all(v: Value, whole: Value) -> bool:
    """Whether `v` reads all of `whole`, and not one of its rows again (the gradient of a token that is not rotated)."""
    assert v.expr is not None
    found = [n for n in loads(v.expr) if n.source == whole.name]
    indices = [i for n in found for i, a in zip(n.index, whole.axes, strict=True) if a.extent > 1]
    return not uses_division(v.expr) and all(map(free_axes, indices))


def _is_part(program: Program, v: Value, whole: Value) -> bool:
    """Whether `v` is made of a small part of `whole`, which nothing else reads."""
    assert v.expr is not None
    if program.users[whole.name] != (v.name,) or whole.name in program.outputs or not is_small_part(v, whole):
        return False
    read = [n for n in loads(v.expr) if n.source == whole.name]
    return len(read) == 1 and {a for a in v.axes if a.extent > 1} <= free_axes(read[0])


def with_sparing_epilogue(program: Program, members: set[str], others: set[str]) -> set[str]:
    """`with_epilogue`, but for what PyTorch finishes with less to load and to store, along with what it goes on with.

    The gradient of rotated queries, say: PyTorch would read two products with it, each as large, of 32 bits.
    """
    every = with_epilogue(program, members, others)
    best = every
    for name in [v.name for v in reversed(program.values) if v.name in every - members]:
        fewer = best - {name}
        if _moved(program, fewer, every) <= _moved(program, best, every):
            best = fewer
    return best if _moved(program, best, every) + WORTH < _moved(program, every, every) else every


def _moved(program: Program, members: set[str], every: Set[str]) -> int:
    """Bytes that are stored and loaded for what leaves some members, and for the rest of `every`, by PyTorch."""
    total, launched = 0, False
    for name in every:
        v = program.by_name[name]
        around = readers(program, name) - members
        fused = {r for r in around if _takes_along(program.by_name[r])}
        final = name in program.outputs or len(around) > len(fused) or _is_seen(program, name)
        own = v.numel * itemsize(v.dtype)
        if name in members:
            total += own * ((bool(fused) or final) + bool(fused))
            launched |= bool(fused)
        else:
            total += own * final
            launched = True
    return total + launched * LAUNCHED


def _is_seen(program: Program, name: str) -> bool:
    """Whether a view of a value is returned."""
    return any(root_of(program, out) == name for out in program.outputs)


def _takes_along(v: Value) -> bool:
    """Whether PyTorch may compute what `v` reads in the kernel of `v`, no product of matrices."""
    return v.expr is not None and not v.projection and all(len(loads(r.body)) == 1 for r in reductions(v.expr))
