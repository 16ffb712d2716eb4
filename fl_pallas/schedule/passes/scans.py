"""Running sums over scores, in blocks of keys: what comes before a block is summed up, and a tile adds its own.

`c[i, j] = sum(x[i, k] for k <= j)`, with x of the size of the scores, becomes

    blocks[i, n] = sum of x[i, k] over the n-th block of keys
    before[i, n] = sum of blocks[i, m], m < n
    c[i, j]      = before[i, j // BLOCK] + what the tile of j has of x, up to j

of which the first two are stored, S / BLOCK numbers a row, and the last is an operation on tiles (`running`), so that
kernels go over keys, or queries, in whatever order they like: forward, backward, by parts.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from ..build import op, reduce, select, substitute
from ..expr import Axis, Expr, Load, const, index, load
from ..integer import linear
from ..program import PART, Program, Value, reads_of
from ..scan import BLOCK, RUNNING
from .grow_regions import Growth, Region
from .joins import join
from .resolve_views import inline_load, resolve_views
from .rounded import grow_rounded


def grow_scanned(viewed: Program) -> tuple[Program, Program, Growth, frozenset[str]]:
    """A Program with its views → it with scans over scores opened, what `grow_rounded` makes of that, in that order.

    A scan of which a region does not compute all is PyTorch's.
    """
    names = scans(viewed)
    while True:
        opened = opened_scans(viewed, names)
        program, growth, rounded = grow_rounded(opened)
        kept = {n for n in names if any(_computes(program, r, n) for r in growth.regions)}
        if kept == names:
            return opened, program, growth, rounded
        names = kept


def _computes(program: Program, region: Region, name: str) -> bool:
    blocks, before, back = _parts(name)
    parts = {p for p in (blocks, before) if p in program.by_name}
    return (back if back in program.by_name else name) in region.large and {*region.members} >= parts


def _parts(name: str) -> tuple[str, str, str]:
    return f"{name}_blocks", f"{name}_before", f"{name}_back"


def scans(program: Program) -> set[str]:
    """The scans that PyTorch would do of something computed from a join, or larger than all inputs."""
    found: set[str] = set()
    if not any(v.scanned is not None for v in program.values):
        return found
    below: set[str] = set()
    for v in resolve_views(program).values:
        if join(program, v) is not None or not below.isdisjoint(v.reads):
            below.add(v.name)
            if v.scanned is not None:
                found.add(v.name)
    return found


def opened_scans(program: Program, names: Set[str]) -> Program:
    """A Program with what is computed of scans, in three values each."""
    if not names:
        return program
    values: list[Value] = []
    for v in program.values:
        values += _opened(program, v) if v.name in names else [v]
    return replace(program, values=tuple(values))


def _opened(program: Program, v: Value) -> list[Value]:
    at, source = v.scanned, program.by_name[v.reads[0]]
    assert at is not None
    axis, place = v.axes[at], index(v.axes[at])
    last = op("sub", const(axis.extent - 1, "i64"), place, dtype="i64")
    read = load(source.name, tuple(map(index, v.axes)), source.dtype)
    while source.is_view:
        read = inline_load(read, source)
        assert isinstance(read, Load)
        source = program.by_name[read.source]
    # From the other end: what comes after a block, and in it.
    back = any(linear(i)[0].get(place, 0) < 0 for i in read.index)
    if back:
        read = substitute(read, {axis: last})
    held = "f64" if v.dtype == "f64" else "f32"
    blocks, before, other_way = _parts(v.name)
    made: list[Value] = []
    outside: Expr = const(0.0, held)
    count = -(-axis.extent // BLOCK)
    if count > 1:
        n, m, each = Axis(axis.name, count), Axis("%m", count), Axis("%each", BLOCK)
        axes = (*v.axes[:at], n, *v.axes[at + 1 :])

        def of_block(name: str, number: Expr) -> Expr:
            return load(name, tuple(number if k == at else index(a) for k, a in enumerate(axes)), held)

        def stored(name: str, expr: Expr) -> Value:
            return Value(name, axes, held, expr, PART, reads_of(expr), where=v.where)

        key = op("add", op("mul", index(n), const(BLOCK, "i64"), dtype="i64"), index(each), dtype="i64")
        inside = op("lt", key, const(axis.extent, "i64"), dtype="bool")
        own = select(inside, substitute(read, {axis: key}), const(0.0, source.dtype))
        made.append(stored(blocks, reduce("sum", each, own, held)))
        earlier = op("gt" if back else "lt", index(m), index(n), dtype="bool")
        others = select(earlier, of_block(blocks, index(m)), const(0.0, held))
        made.append(stored(before, reduce("sum", m, others, held)))
        outside = of_block(before, op("floordiv", place, const(BLOCK, "i64"), dtype="i64"))
    expr = op(RUNNING[back], read, place, outside, dtype=held)
    if back:
        made.append(Value(other_way, v.axes, v.dtype, expr, v.op, reads_of(expr), where=v.where))
        expr = substitute(load(other_way, tuple(map(index, v.axes)), v.dtype), {axis: last})
    return [*made, replace(v, expr=expr, reads=reads_of(expr), scanned=None, why="")]
