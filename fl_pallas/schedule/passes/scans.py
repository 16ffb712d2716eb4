"""Running sums over scores, in blocks of keys: what comes before a block is summed up, and a tile adds its own.

`c[i, j] = sum(x[i, k] for k <= j)`, with x of the size of the scores, becomes

    blocks[i, n] = sum of x[i, k] over the n-th block of keys
    before[i, n] = sum of blocks[i, m], m < n
    c[i, j]      = before[i, j // BLOCK] + what the tile of j has of x, up to j

of which the first two are stored, S / BLOCK numbers a row, and the last is an operation on tiles (`running`), so that
kernels go over keys, or queries, in whatever order they like: forward, backward, by parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..build import difference, op, reduce, select, substitute
from ..expr import Axis, Const, Expr, Load, Op, Reduce, const, free_axes, index, load, loads, reductions
from ..inner import factors
from ..integer import linear
from ..program import PART, Program, Value, reads_of
from ..scan import BLOCK
from .again import grow_again
from .joins import join
from .region import Growth, Region
from .remainders import Scan, from_the_end, remainder
from .resolve_views import inline_load, inlined, resolve_views
from .rounded import grow_rounded

# As many blocks are summed up for each of them.
FEW = 16


def grow_scanned(viewed: Program) -> tuple[Program, Program, Growth, frozenset[str]]:
    """A Program with its views → it with scans over scores opened, and with what is computed again behind operations of
    PyTorch's; what `grow_rounded` makes of that, in that order.

    A scan of which a region does not compute all is PyTorch's.
    """
    found = scans(viewed)
    while True:
        opened = opened_scans(viewed, found)
        opened, program, growth, rounded = grow_again(opened, *grow_rounded(opened))
        kept = {n: scan for n, scan in found.items() if any(_computes(program, r, n) for r in growth.regions)}
        if kept == found:
            return opened, program, growth, rounded
        found = kept


def _computes(program: Program, region: Region, name: str) -> bool:
    blocks, before, back = _parts(name)
    parts = {p for p in (blocks, before) if p in program.by_name}
    return (back if back in program.by_name else name) in region.large and {*region.members} >= parts


def _parts(name: str) -> tuple[str, str, str]:
    return f"{name}_blocks", f"{name}_before", f"{name}_back"


def scans(program: Program) -> dict[str, Scan]:
    """Running sums of what is computed from a join: PyTorch's scans, products with a triangle of ones, and what such a
    sum leaves of all."""
    found: dict[str, Scan] = {}
    below: set[str] = set()
    # What is made of positions alone.
    placed: dict[str, Value] = {}
    resolved = resolve_views(program)
    for v in resolved.values:
        if v.expr is not None and not reductions(v.expr) and placed.keys() >= {*v.reads}:
            placed[v.name] = v
        elif join(program, v) is not None or not below.isdisjoint(v.reads):
            scan = _by_pytorch(program, v) if v.scanned is not None else _by_triangle(v, placed)
            scan = remainder(resolved, v, found) if scan is None else scan
            if scan is not None and not below.isdisjoint(n.source for n in loads(scan.read)):
                found[v.name] = scan
            below.add(v.name)
    return found


def _by_pytorch(program: Program, v: Value) -> Scan:
    at, source = v.scanned, program.by_name[v.reads[0]]
    assert at is not None
    read = load(source.name, tuple(map(index, v.axes)), source.dtype)
    while isinstance(read, Load) and program.by_name[read.source].is_view:
        read = inline_load(read, program.by_name[read.source])
    assert isinstance(read, Load)
    back = any(linear(i)[0].get(index(v.axes[at]), 0) < 0 for i in read.index)
    # What is turned round before, and after, runs from the other end.
    return Scan(substitute(read, {v.axes[at]: from_the_end(v.axes[at])}) if back else read, at, back)


def _by_triangle(v: Value, placed: Mapping[str, Value]) -> Scan | None:
    """`sum[k](x[i, k] * (1 where k <= j, else 0))`: the running sum of x; None for anything else."""
    e = v.expr
    if not isinstance(e, Reduce) or e.kind != "sum" or placed.keys().isdisjoint(v.reads):
        return None
    found = factors(inlined(e.body, placed))
    for triangle, x in (found, found[::-1]) if len(found) == 2 else ():
        ends = [a for a in v.axes if a.extent == e.axis.extent and a in free_axes(triangle)]
        if len(ends) == 1 and isinstance(x, Load) and ends[0] not in free_axes(x) and e.axis in free_axes(x):
            which = _side(triangle, e.axis, ends[0])
            if which is not None and free_axes(triangle) == {e.axis, ends[0]}:
                return Scan(substitute(x, {e.axis: index(ends[0])}), v.axes.index(ends[0]), *which)
    return None


def _side(e: Expr, k: Axis, j: Axis) -> tuple[bool, bool] | None:
    """Of ones on one side of a diagonal, and zeros on the other: whether the ones are at k >= j, and whether on the
    diagonal too. None for anything else."""
    if not isinstance(e, Op) or e.name != "select" or not all(isinstance(n, Const) for n in e.args[1:]):
        return None
    test, numbers = e.args[0], tuple(n.value for n in e.args[1:] if isinstance(n, Const))
    if not isinstance(test, Op) or test.name not in ("lt", "le", "gt", "ge") or {*numbers} != {0, 1}:
        return None
    terms, c = difference(*test.args)
    sign = terms.get(index(k), 0)
    if abs(sign) != 1 or terms != {index(k): sign, index(j): -sign}:
        return None
    # sign · (k - j) <= most, or >= least, where there are ones.
    above = test.name in ("gt", "ge")
    limit = -c + {"lt": -1, "le": 0, "gt": 1, "ge": 0}[test.name]
    if numbers == (0, 1):
        above, limit = not above, limit + (-1 if above else 1)
    if sign < 0:
        above, limit = not above, -limit
    return (above, limit == 0) if limit in (0, 1 if above else -1) else None


def opened_scans(program: Program, found: Mapping[str, Scan]) -> Program:
    """A Program with what is computed of scans, in three values each."""
    if not found:
        return program
    values: list[Value] = []
    for v in program.values:
        values += _opened(v, found[v.name]) if v.name in found else [v]
    return replace(program, values=tuple(values))


def _opened(v: Value, scan: Scan) -> list[Value]:
    at, back, read = scan.at, scan.back, scan.read
    axis, place = v.axes[at], index(v.axes[at])
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
        own = select(inside, substitute(read, {axis: key}), const(0.0, read.dtype))
        made.append(stored(blocks, reduce("sum", each, own, held)))

        def sum_of_blocks(earlier: Expr) -> Expr:
            return reduce("sum", m, select(earlier, of_block(blocks, index(m)), const(0.0, held)), held)

        if count <= FEW or held == "f64":
            made.append(stored(before, sum_of_blocks(op("gt" if back else "lt", index(m), index(n), dtype="bool"))))
        else:
            # As running sums themselves, of what tiles of blocks come before.
            here, there = (op("floordiv", index(a), const(BLOCK, "i64"), dtype="i64") for a in (n, m))
            outer = sum_of_blocks(op("gt" if back else "lt", there, here, dtype="bool"))
            sums = (of_block(blocks, index(n)), index(n), outer, const(count, "i64"))
            made.append(stored(before, op("later" if back else "earlier", *sums, dtype=held)))
        outside = of_block(before, op("floordiv", place, const(BLOCK, "i64"), dtype="i64"))
    sums = (read, place, outside, const(axis.extent, "i64"))
    kinds = ("less_back", "running_back") if back else ("less", "running")
    expr = op(kinds[scan.whole], *sums, dtype=v.dtype)
    if (total := scan.total) is not None:
        if isinstance(total, Reduce):
            axes = (*v.axes[:at], Axis(axis.name, 1), *v.axes[at + 1 :])
            made.append(Value(f"{v.name}_total", axes, v.dtype, total, PART, reads_of(total), where=v.where))
            place = (const(0, "i64") if k == at else index(a) for k, a in enumerate(axes))
            total = load(made[-1].name, tuple(place), v.dtype)
        # PyTorch's NaN, where the total is not finite. (Less itself it may be its own rounding, on a GPU.)
        off = op("add", expr, op("mul", total, const(0.0, v.dtype), dtype=v.dtype), dtype=v.dtype)
        expr = select(op("eq", expr, total, dtype="bool"), expr, off)
    expr = op("neg", expr, dtype=v.dtype) if scan.negated else expr
    if v.scanned is not None and back:
        made.append(Value(other_way, v.axes, v.dtype, expr, v.op, reads_of(expr), where=v.where))
        expr = substitute(load(other_way, tuple(map(index, v.axes)), v.dtype), {axis: from_the_end(axis)})
    return [*made, replace(v, expr=expr, reads=reads_of(expr), scanned=None, why="")]
