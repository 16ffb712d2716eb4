"""Scores again: what an operation of PyTorch's waits for, by a statistic of it, and what reads its result compute anew.

Before: `t = topk(max[i](s(i, j)))` and `exp(s(i, j)) where j in t`: s would be stored for the second, since no kernel
computes s, waits for PyTorch, and goes on. After: the second has an s of its own, and each is a region.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from ..build import COMPARISONS, substitute
from ..dtype import is_float, is_int
from ..expr import Const, Op, load, loads, outer_loads, reductions, walk
from ..program import PART, Program, Value, depends, reads_of
from .grow_regions import grown_from
from .itself import JUMPS
from .region import Growth, Rejected
from .resolve_views import root_of
from .rounded import grow_rounded

# Operations of PyTorch's, one after another, that scores are computed again behind.
MAX_TIMES = 16
# How many times smaller what is stored for PyTorch has to be than scores that are computed again.
FEW_OF = 4
# What has no value beyond an end of its domain.
_BOUNDED = ("sqrt", "rsqrt", "log", "log2", "log1p", "pow", "asin", "acos")

Grown = tuple[Program, Program, Growth, frozenset[str]]


def grow_again(viewed: Program, program: Program, growth: Growth, rounded: frozenset[str]) -> Grown:
    """What `grow_rounded` made of a Program with its views, or makes of one in which scores are computed again, if
    regions compute all of these; that Program first."""
    given: Grown = viewed, program, growth, rounded
    found, names = given, set[str]()
    done: set[tuple[str, str]] = set()
    for times in range(MAX_TIMES):
        viewed, program, growth, _ = found
        # (Of what is a few heads' alone, PyTorch's operation stands in the way for good.)
        left = {key: r for r in growth.rejected if (key := (_join(r).name, r.blocker.name)) not in done}
        ways = ((key, way) for key, r in left.items() if (way := _apart(viewed, program, r, f"_again{times}")))
        key, way = next(ways, (None, None))
        if key is None or way is None:
            break
        done.add(key)
        found = way[0], *grow_rounded(way[0])
        names |= way[1]
    _, program, growth, _ = found
    inside = {m for region in growth.regions for m in region.members}
    stored = {name for region in growth.regions for name in region.outputs}
    return found if names & program.by_name.keys() <= inside and stored.isdisjoint(names) else given


def _join(rejected: Rejected) -> Value:
    return rejected.join or rejected.value


def original(name: str) -> str:
    """The name of what a value computes again, which PyTorch knows; its own if it is none of these."""
    return re.sub(r"(_again\d+)+$", "", name)


def _apart(viewed: Program, program: Program, rejected: Rejected, suffix: str) -> tuple[Program, set[str]] | None:
    """`viewed`, in which what depends on the operation that stands in the way reads values of its own in the place of
    those of a region before it, and of others as large (a bias that both add); and their names. None if nothing of the
    region is read on both sides."""
    if rejected.blocker.expr is not None:
        return None
    large, size = grown_from(program, _join(rejected)), _join(rejected).numel
    blocker = {rejected.blocker.name}
    below = blocker | {v.name for v in viewed.values if depends(viewed, {v.name}, blocker)}
    ahead = [v for v in viewed.values if v.name not in below and v.expr is not None]
    region = {v.name for v in ahead if root_of(viewed, v.name) in large}
    before = region | {v.name for v in ahead if v.numel >= size or v.op == PART}
    asked = {r for v in viewed.values if v.name in below for r in v.reads if r in before}
    # What the operation reads is stored: scores, or a few heads' of many.
    waited_for = max((viewed.by_name[r].numel for r in rejected.blocker.reads if r in before), default=0)
    if asked.isdisjoint(region) or waited_for * FEW_OF > size:
        return None
    for v in reversed(viewed.values):
        if v.name in asked:
            asked |= before.intersection(v.reads)
    if _is_compared(viewed, asked, below):
        return None
    values: list[Value] = []
    for v in viewed.values:
        values.append(_reading(v, asked, suffix) if v.name in below else v)
        if v.name in asked:
            values.append(replace(_reading(v, asked, suffix), name=v.name + suffix))
    return replace(viewed, values=tuple(values)), {name + suffix for name in asked}


def _is_compared(viewed: Program, again: set[str], below: set[str]) -> bool:
    """Whether what is computed again is compared with what PyTorch found, by an operation that jumps where they are
    equal or has no value beyond: the last bit may be another, and a score not equal itself (the k-th largest)."""
    made = {*again}
    for v in (v for v in viewed.values if v.name in below and v.expr is not None):
        assert v.expr is not None
        if any(_meet(n, made, below) for n in walk(v.expr) if isinstance(n, Op) and _jumps(n)):
            return True
        if not reductions(v.expr) and not made.isdisjoint(v.reads):
            made.add(v.name)
    return False


def _jumps(n: Op) -> bool:
    return is_float(n.args[0].dtype) and (n.name in JUMPS or n.name in _BOUNDED or n.name == "cast" and is_int(n.dtype))


def _meet(n: Op, made: set[str], below: set[str]) -> bool:
    """Whether an operation takes what is `made`, other than in sums, and what lies `below`; and does not ask whether
    that is infinite."""
    if any(isinstance(a, Const) and math.isinf(a.value) for a in n.args):
        return False
    read = {m.source for m in (loads(n) if n.name in COMPARISONS else outer_loads(n))}
    return not read.isdisjoint(made) and not read.isdisjoint(below)


def _reading(v: Value, names: set[str], suffix: str) -> Value:
    """`v`, loading others in place of the values of these names."""
    if v.expr is None:
        return v
    found = {n: load(n.source + suffix, n.index, n.dtype) for n in loads(v.expr) if n.source in names}
    expr = substitute(v.expr, {}, dict(found))
    return replace(v, expr=expr, reads=reads_of(expr))
