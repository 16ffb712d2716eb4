"""Parting: kernels that do better apart, because their outputs want other rows, or their sums want more registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from ..build import substitute
from ..dtype import is_float
from ..expr import Axis, Expr, Reduce, Ref, children, free_axes, index, load, loads, reductions, ref_names, walk
from ..plan import Accumulator, Choices, Loop, Step, Store
from ..remember import remembered
from .fuse import Fused, Output
from .roles import roles
from .stream import parallel_axes, stream

Kernel = tuple[tuple[Loop, ...], tuple[Store, ...]]


@remembered
def part_outputs(fused: Fused, compute: str) -> tuple[Fused, ...]:
    """Before: one kernel whose outputs reuse what they load along different axes. After: one for each such axis.

    A tile has rows along one axis; an output whose operands are not shared along it would be no matrix product. And one
    that has loops of its own, and not all axes of the batch, would run them for each index of the others. What the
    kernels have in common is computed by each.
    """
    groups: dict[tuple[Axis | None, frozenset[Axis]], list[tuple[Output, frozenset[Axis], set[int]]]] = {}
    for out in fused.outputs:
        alone = Fused((out,))
        loops, stores, _ = stream(alone, compute)
        kinds = roles(parallel_axes(alone), loops, stores)
        own = out, frozenset(kinds.batch), {loop.axis.extent for loop in loops}
        # Along some, nothing that is loaded differs, but what is taken of it.
        loaded = frozenset().union(*(free_axes(n) for n in loads(out.expr) if is_float(n.dtype)))
        groups.setdefault((kinds.row if loops else None, own[1] - loaded), []).append(own)
    if any(row is None for row, _ in groups):
        return (fused,)
    parts: list[Fused] = []
    for group in groups.values():
        _, batch, lengths = max(group, key=lambda own: len(own[1]))
        together = [own for own in group if own[1] == batch or own[2] <= lengths]
        apart = [own for own in group if own not in together]
        parts += [Fused(tuple(out for out, *_ in part)) for part in (together, apart) if part]
    return tuple(parts)


def ways_to_part(
    loops: tuple[Loop, ...],
    stores: tuple[Store, ...],
    parallel: tuple[Axis, ...],
    name: str,
    compute: str,
    tiles: Callable[[Kernel], Choices | None],
) -> tuple[tuple[Kernel, ...], ...]:
    """Kernels that together do what one would, in several ways: that one; its chains; its outputs; chains of those; two
    of several outputs together; outputs by the batch that they have.

    Args:
      parallel: axes of the outputs.
      name: what the names of further stores begin with.
      tiles: what a kernel would choose to cover its features with.
    """
    whole, outputs = ((loops, stores),), part_stores(loops, stores, parallel)
    ways: list[tuple[Kernel, ...]] = []
    for kernels in (whole, outputs):
        chains: list[Kernel] = []
        for n, kernel in enumerate(kernels):
            *first, last = part_chains(*kernel, parallel, f"{name}_{n}", compute)
            apart = part_join(*last, parallel, f"{name}_{n}", compute) if first else (last,)
            # What is taken along at the end may leave registers for smaller tiles only.
            chains += [*first, *(apart if tiles(apart[0]) != tiles(last) else (last,))]
        ways += [kernels, tuple(chains)]
    return tuple(dict.fromkeys([*ways, *join_two(outputs, loops, stores), part_batches(loops, stores, parallel)]))


def part_stores(loops: tuple[Loop, ...], stores: tuple[Store, ...], parallel: tuple[Axis, ...]) -> tuple[Kernel, ...]:
    """Before: loops with sums for several outputs. After: a kernel for each output whose sums over features no other
    output's contain; what those rest on is computed by each. One more for those that need no loop, and sum by
    themselves.
    """
    features = frozenset(roles(parallel, loops, stores).features)
    steps = {s.name: s for loop in loops for s in loop.steps}
    needs = {s.name: _needed(ref_names(s.expr), steps) for s in stores}

    def wide(names: frozenset[str]) -> frozenset[str]:
        return frozenset(n for n in names if features & set(steps[n].axes))

    groups: list[tuple[frozenset[str], list[Store]]] = []
    alone = [s for s in stores if not needs[s.name] and reductions(s.expr)] if any(needs.values()) else []
    for s in sorted((s for s in stores if s not in alone), key=lambda s: -len(wide(needs[s.name]))):
        own = needs[s.name]
        at = min(range(len(groups)), key=lambda n: len(own - groups[n][0]), default=None)
        if at is None or wide(own) - groups[at][0]:
            groups.append((own, [s]))
        else:
            groups[at] = (groups[at][0] | own, [*groups[at][1], s])
    groups += [(frozenset(), alone)] if alone else []
    return tuple((_only(names, loops), tuple(s for s in stores if s in group)) for names, group in groups)


def part_batches(loops: tuple[Loop, ...], stores: tuple[Store, ...], parallel: tuple[Axis, ...]) -> tuple[Kernel, ...]:
    """Before: loops with sums of each head, and sums that all heads share, which a program of each head would compute.
    After: a kernel for the outputs that have the same axes of the batch; what those rest on is computed by each.
    """
    batch = frozenset(roles(parallel, loops, stores).batch)
    steps = {s.name: s for loop in loops for s in loop.steps}
    groups: dict[frozenset[Axis], tuple[Store, ...]] = {}
    for s in stores:
        own = batch & {*s.axes}
        groups[own] = (*groups.get(own, ()), s)
    needs = (_needed((n for s in own for n in ref_names(s.expr)), steps) for own in groups.values())
    return tuple((_only(names, loops), own) for names, own in zip(needs, groups.values(), strict=True))


def join_two(
    kernels: tuple[Kernel, ...], loops: tuple[Loop, ...], stores: tuple[Store, ...]
) -> Iterator[tuple[Kernel, ...]]:
    """Ways in which two of several parts of one kernel (`loops`, `stores`) stay together that take one reduction."""
    steps = {kernel: tuple(s for loop in kernel[0] for s in loop.steps) for kernel in kernels}
    for pair in combinations(kernels, 2) if len(kernels) > 2 else ():
        if _reductions(steps[pair[0]]) & _reductions(steps[pair[1]]):
            names = frozenset(s.name for kernel in pair for s in steps[kernel])
            both = _only(names, loops), tuple(s for s in stores if any(s in kernel[1] for kernel in pair))
            yield (both, *(kernel for kernel in kernels if kernel not in pair))


def _needed(names: Iterable[str], steps: Mapping[str, Step]) -> frozenset[str]:
    """The steps of these names, and all that those refer to."""
    found = {n for n in names if n in steps}
    while more := {r for n in found for e in _exprs(steps[n]) for r in _refs(e) if r in steps} - found:
        found |= more
    return frozenset(found)


def _only(names: frozenset[str], loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
    kept = (replace(loop, steps=tuple(s for s in loop.steps if s.name in names)) for loop in loops)
    return tuple(loop for loop in kept if loop.steps)


def part_chains(
    loops: tuple[Loop, ...], stores: tuple[Store, ...], parallel: tuple[Axis, ...], name: str, compute: str
) -> tuple[Kernel, ...]:
    """Before: loops with accumulators of which some know nothing of the others. After: a kernel that stores what the
    first of them come to, and one that takes it from there.

    Returns: (loops, stores) of each kernel; as they were if there is but one chain, or if chains share a reduction,
    which both kernels would compute.
    """
    for n, loop in enumerate(loops):
        chain = _chain(loop.steps)
        others = tuple(s for s in loop.steps if s not in chain)
        around = (*loops[:n], *loops[n + 1 :])
        left = (*others, *(s for other in around for s in other.steps))
        if not left or _reductions(chain) & _reductions(left) or _are_tied(chain, around):
            continue
        own = frozenset(s.name for s in chain)
        kept, rest = _stored(stores, lambda e, own=own: ref_names(e) <= own, parallel, f"{name}_p", compute)
        again = (Loop(loop.axis, others),) if others else ()
        return ((Loop(loop.axis, chain),), kept), ((*loops[:n], *again, *loops[n + 1 :]), rest)
    return ((loops, stores),)


def _are_tied(chain: tuple[Step, ...], loops: tuple[Loop, ...]) -> bool:
    """Whether the steps of other loops refer to those of a chain, or it to them."""
    steps = tuple(s for loop in loops for s in loop.steps)
    ways = ((chain, steps), (steps, chain))
    return any(_refs(e) & {s.name for s in others} for some, others in ways for s in some for e in _exprs(s))


def part_join(
    loops: tuple[Loop, ...], stores: tuple[Store, ...], parallel: tuple[Axis, ...], name: str, compute: str
) -> tuple[Kernel, ...]:
    """Before: a loop, and results of its sums and of features from memory. After: a kernel that stores the sums; one,
    without a loop, that makes those results.
    """
    features = frozenset(roles(parallel, loops, stores).features)

    def is_own(e: Expr) -> bool:
        return not any(is_float(n.dtype) and features & free_axes(n) for n in loads(e))

    joining = tuple(s for s in stores if not is_own(s.expr))
    if not joining:
        return ((loops, stores),)
    kept, rest = _stored(joining, is_own, parallel, f"{name}_q", compute)
    return (loops, (*(s for s in stores if s not in joining), *kept)), ((), rest)


def _stored(
    stores: tuple[Store, ...], is_own: Callable[[Expr], bool], parallel: tuple[Axis, ...], name: str, compute: str
) -> tuple[tuple[Store, ...], tuple[Store, ...]]:
    """What `stores` need of a loop, as far as `is_own` says, as stores of their own; and `stores` that load it."""
    kept: dict[Expr, Store] = {}

    def visit(e: Expr) -> None:
        if not ref_names(e) or e in kept:
            return
        if is_own(e):
            axes = tuple(a for a in parallel if a in free_axes(e))
            kept[e] = Store(f"{name}{len(kept)}", axes, compute, e)
        else:
            for c in children(e):
                visit(c)

    for s in stores:
        visit(s.expr)
    loaded: dict[Expr, Expr] = {e: load(s.name, tuple(map(index, s.axes)), s.dtype) for e, s in kept.items()}
    rest = tuple(Store(s.name, s.axes, s.dtype, substitute(s.expr, {}, loaded), s.dims) for s in stores)
    return tuple(kept.values()), rest


def _chain(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The first step and all that are tied to it by references, in order."""
    names = {s.name for s in steps}
    ties = {s.name: {s.name, *(r for e in _exprs(s) for r in _refs(e) & names)} for s in steps}
    found = {steps[0].name}
    while more := {n for tied in ties.values() if tied & found for n in tied} - found:
        found |= more
    return tuple(s for s in steps if s.name in found)


def _reductions(steps: tuple[Step, ...]) -> set[Reduce]:
    return {n for s in steps for e in _exprs(s) for n in walk(e) if isinstance(n, Reduce)}


def _exprs(step: Step) -> tuple[Expr, ...]:
    if isinstance(step, Accumulator):
        return (step.update,) if step.correct is None else (step.update, step.correct)
    return (step.value,)


def _refs(e: Expr) -> set[str]:
    """The steps that an expression refers to."""
    return {n.name.removesuffix(".old") for n in walk(e) if isinstance(n, Ref)}
