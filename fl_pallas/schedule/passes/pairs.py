"""Kernels of pairs, rows and columns of scores, before their axes are put in order: what two of them may share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..build import substitute
from ..expr import Axis, Expr, Load, Reduce, Ref, free_axes, sources, walk
from ..plan import Accumulator, KernelPlan, Loop, Store, operand_names, step_expressions
from .fuse import Fused
from .group_rows import Kernel
from .roles import roles


@dataclass(frozen=True)
class Streamed:
    """A kernel before its axes are put in order.

    Attributes:
      kernel: its parallel axes, loops and stores.
      notes: for fl.explain.
      part: what it computes; None if it loads what others store in place of some of that.
    """

    kernel: Kernel
    notes: tuple[str, ...]
    part: Fused | None = None


def reads(kernel: Streamed | KernelPlan, other: Streamed | KernelPlan) -> bool:
    """Whether a kernel loads what another stores."""
    stores = other.stores if isinstance(other, KernelPlan) else other.kernel[2]
    return not operands(kernel).isdisjoint(s.name for s in stores)


def operands(kernel: Streamed | KernelPlan) -> frozenset[str]:
    """Names of what a kernel loads."""
    if isinstance(kernel, KernelPlan):
        return frozenset(operand_names(kernel))
    _, loops, stores = kernel.kernel
    exprs = [e for loop in loops for s in loop.steps for e in step_expressions(s)]
    return frozenset[str]().union(*map(sources, (*exprs, *(s.expr for s in stores))))


def nodes_of_pairs(loop: Loop, parallel: tuple[Axis, ...]) -> list[Expr]:
    """The products and loads of a loop's index and parallel ones, those of most axes first."""
    own = {*parallel, loop.axis}
    nodes = (n for n in _nodes(loop) if isinstance(n, Load | Reduce) and loop.axis in free_axes(n) <= own)
    return sorted(dict.fromkeys(nodes), key=lambda n: -len(free_axes(n)))


def _nodes(loop: Loop) -> Iterable[Expr]:
    return (n for s in loop.steps if isinstance(s, Accumulator) for n in walk(s.update))


def are_features(axes: Collection[Axis], kernel: Kernel) -> bool:
    """Whether a program of a kernel has all of these axes."""
    return {a for a in axes if a.extent > 1} <= {*roles(*kernel).features}


def references(name: str, kernel: Kernel) -> set[Expr]:
    """The nodes that stand for an accumulator."""
    _, loops, stores = kernel
    nodes = [n for loop in loops for n in _nodes(loop)] + [n for s in stores for n in walk(s.expr)]
    return {n for n in nodes if isinstance(n, Ref) and n.name == name}


def as_parallel(
    s: Store, place: Mapping[Axis, Axis], mapping: Mapping[Axis, Expr], known: Mapping[Expr, Expr]
) -> Store:
    """A store over other axes: each of its own is another there (`place`), its index an expression (`mapping`), and
    nodes are replaced (`known`)."""
    dims = tuple((substitute(i, mapping), n) for i, n in s.dims)
    return replace(s, axes=tuple(place[a] for a in s.axes), expr=substitute(s.expr, mapping, known), dims=dims)
