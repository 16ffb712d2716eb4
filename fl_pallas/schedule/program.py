"""The Program: one value per tensor of the captured graph, each a pure expression over its axes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import SourceLoc
from .dtype import compute_dtype
from .expr import Axis, Expr, loads

PART = "a scan's sums"
"""The operation of what kernels store of a running sum: sums of blocks, and of what comes before each (scans.py)."""


@dataclass(frozen=True)
class Value:
    """A tensor of the program.

    Attributes:
      name: unique in the program (the FX node's name).
      axes: its dimensions, outermost first.
      dtype: PyTorch's element type.
      expr: its elements over `axes`, reading other values by Load; None for graph inputs and for
        `extern` values, which PyTorch computes.
      op: the operation that made it, for messages ("aten.bmm"); "input" for graph inputs.
      reads: names of the values it is computed from.
      why: for extern values, why it has no expression.
      borrowed: for extern values, whether it is a view: its memory is another's.
      turned: whether PyTorch lays it in another order than that of its dimensions: a view that is PyTorch's to make.
      scanned: for extern values that are running sums of one float tensor, the dimension they run along.
      projection: a product with a weight (linear, addmm) that belongs to PyTorch unless fed by a blow-up or normalised.
      where: the user's source line.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    expr: Expr | None = None
    op: str = "input"
    reads: tuple[str, ...] = ()
    why: str = ""
    borrowed: bool = False
    scanned: int | None = None
    turned: bool = False
    projection: bool = False
    where: SourceLoc | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.extent for a in self.axes)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_view(self) -> bool:
        """Whether the value only renames indices of one other value."""
        return self.expr is not None and type(self.expr).__name__ == "Load"


# Why PyTorch computes what a forward pass keeps.
KEPT = "it is kept for the backward pass"
# Why PyTorch puts several tensors together (side_by_side.py).
BESIDE = "tensors are put side by side"


@dataclass(frozen=True)
class Program:
    """Values in execution order, and the names of those that are returned.

    Attributes:
      facts: inputs of which is known what they are: each with its elements in terms of other inputs.
      saved: outputs that are kept for a backward pass, and that the caller does not see.
      tokens: matrices among the inputs that a forward pass has made, and not of weights alone.
    """

    values: tuple[Value, ...]
    outputs: tuple[str, ...] = field(default=())
    facts: tuple[Value, ...] = field(default=())
    saved: frozenset[str] = frozenset()
    tokens: frozenset[str] = frozenset()

    @cached_property
    def by_name(self) -> dict[str, Value]:
        return {v.name: v for v in self.values}

    @cached_property
    def given(self) -> tuple[Value, ...]:
        """The inputs."""
        return tuple(v for v in self.values if v.op == "input")

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """For each value, the names of the values that read it."""
        users: dict[str, list[str]] = {v.name: [] for v in self.values}
        for v in self.values:
            for r in v.reads:
                users[r].append(v.name)
        return {k: tuple(u) for k, u in users.items()}

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each value in the order of execution."""
        return {v.name: n for n, v in enumerate(self.values)}

    @cached_property
    def above(self) -> dict[str, int]:
        """For each value, the places of those that it depends on, as the bits of a number."""
        above: dict[str, int] = {}
        for v in self.values:
            bits = 0
            for r in v.reads:
                bits |= above[r] | 1 << self.places[r]
            above[v.name] = bits
        return above

    @cached_property
    def below(self) -> dict[str, int]:
        """For each value, the places of those that depend on it, as the bits of a number."""
        below: dict[str, int] = {}
        for v in reversed(self.values):
            bits = 0
            for u in self.users[v.name]:
                bits |= below[u] | 1 << self.places[u]
            below[v.name] = bits
        return below


def _named(program: Program, bits: int) -> set[str]:
    """The names of values, of whose places some number has bits."""
    found = set[str]()
    while bits:
        lowest = bits & -bits
        found.add(program.values[lowest.bit_length() - 1].name)
        bits ^= lowest
    return found


def compute_of(program: Program) -> str:
    """The floating type that kernels of a program compute in; what PyTorch computes has no say, nor have views."""
    return compute_dtype([v.dtype for v in program.values if v.axes and v.expr is not None and not v.is_view])


def value_axes(shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """The axes a0, a1, … of a value of this shape."""
    return tuple(Axis(f"a{i}", n) for i, n in enumerate(shape))


def reads_of(expr: Expr) -> tuple[str, ...]:
    """Names of the values `expr` loads, in order of first use."""
    return tuple(dict.fromkeys(n.source for n in loads(expr)))


def depends(program: Program, targets: Set[str], sources: Set[str]) -> bool:
    """Whether a value of `targets` depends on one of `sources`."""
    bits = 0
    for name in sources:
        bits |= 1 << program.places[name]
    return any(program.above[t] & bits for t in targets - sources)


def read_by(program: Program, members: Set[str]) -> Iterator[Value]:
    """What members read, last first; members may be added meanwhile, of what was given."""
    return _around(program, members, -1, lambda v: v.reads)


def reading(program: Program, members: Set[str]) -> Iterator[Value]:
    """What reads members, in the order of execution; members may be added meanwhile, of what was given."""
    return _around(program, members, 1, lambda v: program.users[v.name])


def _around(
    program: Program, members: Set[str], way: int, beside: Callable[[Value], tuple[str, ...]]
) -> Iterator[Value]:
    queue = [way * program.places[name] for m in members for name in beside(program.by_name[m])]
    heapq.heapify(queue)
    before = None
    while queue:
        n = heapq.heappop(queue)
        if n != before:
            v = program.values[way * n]
            yield v
            if v.name in members:
                for name in beside(v):
                    heapq.heappush(queue, way * program.places[name])
        before = n


def enclosed(program: Program, names: Set[str]) -> set[str]:
    """What depends on one of these values, and another of them depends on."""
    below = above = 0
    for name in names:
        below |= program.below[name]
        above |= program.above[name]
    return _named(program, below & above)


def left_to_pytorch(program: Program, names: frozenset[str], why: str) -> Program:
    """`program`, some of whose values no kernel computes."""
    values = (replace(v, expr=None, why=why) if v.name in names else v for v in program.values)
    return replace(program, values=tuple(values))


def with_parameters(program: Program, names: frozenset[str]) -> Program:
    """`program` with the inputs that are parameters marked as such."""
    return replace(program, values=tuple(replace(v, op="parameter") if v.name in names else v for v in program.values))
