"""What is told: blow-ups that stay with PyTorch, and what is larger than all that is given and returned and is stored
all the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..build import substitute
from ..dtype import is_int, itemsize
from ..expr import Const, Index, Op, free_axes, load, loads, reductions, walk
from ..program import Program, Value
from .blow_ups import beside, given_or_returned, is_of_streams
from .joins import is_outer, join
from .region import Region, Rejected
from .resolve_views import root_of

# What PyTorch makes by an operation that kernels know nothing of, and is so many times as large as all that is given,
# is of pairs (distances of all points).
BLOWN_UP = 4
# What is less than so many times as large as all that is given and returned may be that, padded to whole blocks.
ROUNDED_UP = 2


def told(program: Program, regions: Sequence[Region], rejected: Sequence[Rejected], given: int) -> tuple[Rejected, ...]:
    """What a user is told of.

    Args:
      rejected: blow-ups of which no region grew, and what regions store for PyTorch to read.
      given: elements of the largest input.
    """
    if not any(program.by_name[name].numel for name in {*program.outputs} - program.saved):
        return ()  # of a batch of none, which PyTorch has nothing to do for
    found = [*rejected]
    for region in regions:
        largest = max(given + 1, *(program.by_name[m].numel for m in region.members))
        laid_over = _laid_over(program, region)
        for v in program.values:
            # As large as the blow-up, and PyTorch makes it (the mask of a dropout): the kernel is no help there.
            if v.expr is None and v.why and not v.borrowed and v.numel >= largest and v.name in laid_over:
                found.append(Rejected(v, v, f"{v.why}; a kernel reads it", v.numel * itemsize(v.dtype)))
    if regions:
        # Beside kernels, what is no larger than an input (a gate of blocks of keys, which PyTorch sorts) is no blow-up.
        found = [r for r in found if r.fused or r.value.numel > given]
    # What a kernel computes along with its own may be stored all the same, for an operation of PyTorch's to read.
    fused = {name for r in regions for name in r.members} - {v.name for v, _ in _stored(program, regions)}
    found = [r for r in found if r.fused or r.value.name not in fused]
    # Where something is said already, that is the cause of more.
    return tuple(found or itertools.islice(_left_large(program, regions), 1))


def _laid_over(program: Program, region: Region) -> set[str]:
    """The region's large members, and what they are made of element by element, as by a mask. Operands of products are
    not, which a short sequence may leave as large (queries, keys and values that a convolution makes)."""
    found = {*region.large}
    for v in reversed([program.by_name[m] for m in region.members]):
        if v.name in found and v.expr is not None:
            own = frozenset(v.axes)
            wide = {a for a in own if a.extent > 1}
            indexing = {n.source: frozenset().union(*map(free_axes, n.index)) for n in loads(v.expr)}
            found |= {source for source, axes in indexing.items() if wide <= axes <= own}
    return found


def _left_large(program: Program, regions: Sequence[Region]) -> Iterator[Rejected]:
    """What is larger than all that the program is given and returns, and is stored all the same: by kernels, for
    PyTorch or the backward pass to read, or by PyTorch, which puts tensors, or positions, together.
    """
    limit = given_or_returned(program, program.saved)
    for v, region in _stored(program, regions):
        if v.numel <= ROUNDED_UP * limit:
            continue
        others = [r for r in regions if r is not region]
        if region is not None and (
            root_of(program, v.name) in _finished_large(program, region)
            or _is_bias(program, v, others)
            or v.numel > ROUNDED_UP * _most_read(program, region)
        ):
            reader = next((program.by_name[u] for u in program.users[v.name] if u not in region.members), v)
            why = "the backward pass reads it" if reader is v else "PyTorch computes it; a kernel stores what it reads"
            yield Rejected(v, reader, why, v.numel * itemsize(v.dtype), fused=True)
        elif region is None and is_outer(v) and not (_is_few(program, v) or any(beside(program, v))):
            yield Rejected(v, v, "it is no part of what a kernel computes", v.numel * itemsize(v.dtype))
        elif region is None and is_int(v.dtype) and v.expr is not None and reductions(v.expr):
            yield Rejected(v, v, "a product of integers that floats may not hold", v.numel * itemsize(v.dtype))
        elif v.expr is None and v.numel > BLOWN_UP * limit and any(program.by_name[r].numel for r in v.reads):
            yield Rejected(v, v, v.why or "no rule says what it computes", v.numel * itemsize(v.dtype))


def _stored(program: Program, regions: Sequence[Region]) -> Iterator[tuple[Value, Region | None]]:
    """The values that results are made of, but for what a region keeps to itself; and the region that makes each, if
    one does."""
    maker = {name: region for region in regions for name in region.outputs}
    seen: set[str] = set()
    stack = [*program.outputs]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        region = maker.get(name)
        yield program.by_name[name], region
        members = () if region is None else region.members
        stack += [r for m in members or (name,) for r in program.by_name[m].reads if r not in members]


def _is_few(program: Program, v: Value) -> bool:
    """Whether what is outer is no more than some tensors one behind another, or a few for each token."""
    seed = join(program, v)
    return _is_stacked(v) or seed is not None and is_of_streams(program, seed)


def _is_stacked(v: Value) -> bool:
    """Whether `v` is tensors laid one behind another along an axis that they lack, or one of them among zeros (the
    gradient of what is selected): no larger than all of them together, and so no pairs of anything.
    """
    assert v.expr is not None
    asked = [n for n in walk(v.expr) if isinstance(n, Op) and n.name in ("lt", "eq") and isinstance(n.args[1], Const)]
    along = {n.args[0].axis for n in asked if isinstance(n.args[0], Index)}
    answered = substitute(v.expr, {}, {n: load("answer", (), n.dtype) for n in asked})
    wide = {a for a in v.axes if a.extent > 1} - along
    return along.isdisjoint(free_axes(answered)) and all(wide <= free_axes(n) for n in loads(v.expr))


def _finished_large(program: Program, region: Region) -> set[str]:
    """The region's large members, and what finishes them element by element."""
    found = {*region.large}
    for v in (program.by_name[m] for m in region.members):
        if v.expr is not None and not reductions(v.expr):
            found |= {v.name for r in v.reads if r in found and program.by_name[r].numel == v.numel}
    return found


def _most_read(program: Program, region: Region) -> int:
    """Elements of the largest value that the region reads."""
    own = {*region.members}
    return max((program.by_name[r].numel for m in own for r in program.by_name[m].reads if r not in own), default=0)


def _is_bias(program: Program, v: Value, regions: Sequence[Region]) -> bool:
    """Whether a region takes `v`, element by element, for what is large there."""
    users = (program.by_name[u] for u in program.users[v.name])
    return any(u.name in r.large and u.expr is not None and not reductions(u.expr) for u in users for r in regions)
