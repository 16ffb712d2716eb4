"""Structural fusion: the members of a region are inlined into what it returns.

Inlining is substitution of index expressions, so an axis that is parallel in a producer and reduced
over by its consumer becomes the consumer's loop axis by itself (the paper's dimension demotion).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from ..build import op, row_major, substitute
from ..dtype import is_float
from ..expr import Axis, Expr, Reduce, free_axes, index, loads, reductions, sources
from ..program import PART, Program, Value
from .region import Region
from .resolve_views import inlined, root_of

# Ways of naming the axes of a further output that are tried.
MAX_RENAMINGS = 512
# Reductions, one over what the other was computed for, that are written out in terms of operands.
MAX_STAGES = 4
# Elements along the axes that only some outputs of a kernel have.
MAX_FEATURES = 256


@dataclass(frozen=True)
class Output:
    """A tensor a kernel stores: `expr` gives its elements over `axes`.

    Attributes:
      dims: index and extent of each dimension, in terms of `axes`; empty if the axes are the dimensions, in order.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    expr: Expr
    dims: tuple[tuple[Expr, int], ...] = ()

    @property
    def index(self) -> tuple[Expr, ...]:
        return tuple(i for i, _ in self.dims) if self.dims else tuple(map(index, self.axes))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.dims) if self.dims else tuple(a.extent for a in self.axes)


@dataclass(frozen=True)
class Fused:
    """What one kernel computes: outputs over shared axes, reading only operands."""

    outputs: tuple[Output, ...]


def fuse(program: Program, region: Region) -> tuple[Fused, ...]:
    """A region's values → its outputs as expressions of operands, grouped by the reductions they share."""
    stage, stored = _stages(program, region)
    rounded = _returned_scores(program, region)
    groups: list[Fused] = []
    for n in sorted({stage[name] for name in stored}):
        early = [name for name in region.members if stage[name] <= n and (name not in stored or stage[name] == n)]
        made = _written_out(program, early, rounded)
        groups += _shared([made[name] for name in early if name in stored])
    made = _written_out(program, [n for n in (*region.members, *region.outputs) if n not in stored], rounded)
    return (*groups, *_shared([made[name] for name in region.outputs if name in made]))


def _written_out(program: Program, names: Iterable[str], rounded: Set[str]) -> dict[str, Value]:
    """The values in terms of what is not among them; each comes after those that it reads.

    Args:
      rounded: those that others read in their own 16 bits.
    """
    made: dict[str, Value] = {}
    for v in (program.by_name[name] for name in names):
        assert v.expr is not None
        expr = inlined(v.expr, made)
        made[v.name] = Value(v.name, v.axes, v.dtype, op("rounded", expr, dtype=v.dtype) if v.name in rounded else expr)
    return made


def _returned_scores(program: Program, region: Region) -> set[str]:
    """The scores, in 16 bits, that a forward pass returns: the backward pass reads them as they were rounded, and what
    is kept of rows has to be of the same."""
    returned = {root_of(program, name) for name in program.outputs} if program.saved else set[str]()
    return {name for name in region.large & returned if program.by_name[name].dtype == "bf16"}


def _stages(program: Program, region: Region) -> tuple[dict[str, int], set[str]]:
    """How many reductions each member of a region builds on, each a sum over what the one before was computed for (rows
    and columns normalised in turn); and those of them that kernels store for later ones, where there are more than
    MAX_STAGES.

    Written out in terms of operands they would double with each stage; few are left to `cut` to judge.
    """
    stage: dict[str, int] = {}
    stored: set[str] = set()
    # Of each member, its axes along which it follows those of a reduction that it was made with.
    follows: dict[str, dict[str, frozenset[Axis]]] = {}
    for name in region.members:
        v = program.by_name[name]
        assert v.expr is not None
        own, made_with, stage[name] = frozenset(v.axes), dict[str, frozenset[Axis]](), 0
        for n in (n for n in loads(v.expr) if n.source in follows):
            read = program.by_name[n.source]
            stage[name] = max(stage[name], stage[n.source])
            for source, axes in follows[n.source].items():
                along = frozenset().union(*(free_axes(i) for a, i in zip(read.axes, n.index, strict=True) if a in axes))
                made_with[source] = made_with.get(source, frozenset()) | along & own
                if along - own:
                    stored.add(source)
                    stage[name] = max(stage[name], stage[source] + 1)
            if read.op == PART:
                stage[name] = max(stage[name], stage[n.source] + 1)
        if reductions(v.expr) and name not in region.large:
            made_with[name] = own
        follows[name] = made_with
    parts = {name for name in region.members if program.by_name[name].op == PART}
    return stage, parts | stored if max(stage.values()) > MAX_STAGES + 2 * len(parts) else parts


def _shared(values: list[Value]) -> list[Fused]:
    """Values grouped by the reductions that they share."""
    rest = sorted(values, key=lambda v: -len(v.axes))
    groups: list[Fused] = []
    while rest:
        lead = rest.pop(0)
        group = [renamed(lead, tuple((Axis(f"x{i}", a.extent),) for i, a in enumerate(lead.axes)))]
        # What shares nothing with the first may share something with those that came to it.
        while found := next(((v, o) for v in rest if (o := join_group(v, group)) is not None), None):
            rest.remove(found[0])
            group.append(found[1])
        groups.append(Fused(tuple(group)))
    return groups


def renamed(v: Value, axes: tuple[tuple[Axis, ...], ...]) -> Output:
    """`v` over other axes: one for each dimension, or several that were flattened into it."""
    assert v.expr is not None
    places = [row_major(map(index, group), group) for group in axes]
    expr = substitute(v.expr, dict(zip(v.axes, places, strict=True)))
    whole = all(len(group) == 1 for group in axes)
    dims = () if whole else tuple((i, a.extent) for i, a in zip(places, v.axes, strict=True))
    return Output(v.name, tuple(a for group in axes for a in group), v.dtype, expr, dims)


def _what(n: Expr) -> tuple[str, frozenset[str]]:
    """What a reduction, or a load, is by any names of its axes."""
    return n.kind if isinstance(n, Reduce) else "", sources(n)


def labels(e: Expr) -> list[Expr]:
    """What the reductions of `e` load, where all that is labels and masks (of pairs that are counted)."""
    found = [n for r in reductions(e) for n in loads(r)]
    return [] if any(is_float(n.dtype) for n in found) else [*dict.fromkeys(found)]


def join_group(v: Value, group: list[Output]) -> Output | None:
    """`v` over the axes of `group`, renamed so that it shares most reductions; None if it shares none, and is no count
    of pairs by labels that reductions of the group load."""
    assert v.expr is not None
    lead, *others = group
    features = dict.fromkeys(a for o in others for a in o.axes if a not in lead.axes)
    asked: Callable[[Expr], Sequence[Expr]] = reductions
    shared: set[Expr] = {r for o in group for r in reductions(o.expr)}
    own = [(r, _what(r)) for r in reductions(v.expr)]
    if (counted := labels(v.expr)) and not {w for _, w in own} & {*map(_what, shared)}:
        asked, own = labels, [(n, _what(n)) for n in counted]
        shared = {n for r in shared for n in loads(r)}
    alike = [(free_axes(r), free_axes(s)) for s, what in ((s, _what(s)) for s in shared) for r, w in own if w == what]
    if not alike:
        return None
    taken = {a.name for o in group for a in o.axes}
    number = next(n for n in itertools.count(len(group)) if not any(name.endswith(f"_{n}") for name in taken))
    best: tuple[tuple[int, int], Output] | None = None
    runs = [lead.axes[i:k] for i in range(len(lead.axes)) for k in range(i + 1, len(lead.axes) + 1)]
    runs += [(a,) for a in features]
    # A batch folded into rows, where the first output has the rows before the batch.
    long = [a for a in lead.axes if a.extent > 1]
    runs += [pair for pair in itertools.permutations(long, 2) if pair not in runs]
    choices = [[r for r in runs if math.prod(b.extent for b in r) == a.extent] + [()] for a in v.axes]
    for pick in itertools.islice(itertools.product(*choices), MAX_RENAMINGS):
        used = [a for run in pick for a in run]
        extra = math.prod(a.extent for run, a in zip(pick, v.axes, strict=True) if not run)
        if len(set(used)) != len(used) or extra > MAX_FEATURES or (best and (len(own), -extra) <= best[0]):
            continue
        # Most ways are told apart by the axes of what may be shared, which is quicker than writing the value out.
        places = dict(zip(v.axes, (frozenset(a for a in run if a.extent > 1) for run in pick), strict=True))
        if not any(frozenset().union(*(places.get(a, {a}) for a in axes)) == of for axes, of in alike):
            continue
        fresh = (Axis(f"x{len(lead.axes) + i}_{number}", a.extent) for i, a in enumerate(v.axes))
        candidate = renamed(v, tuple(run or (new,) for run, new in zip(pick, fresh, strict=True)))
        # What is shared must have no axis of its own: it would be computed once for each.
        score = sum(n in shared for n in asked(candidate.expr))
        if asked is labels and (score < len(own) or extra > 1):
            continue
        if score and (best is None or (score, -extra) > best[0]):
            best = (score, -extra), candidate
    return best[1] if best else None
