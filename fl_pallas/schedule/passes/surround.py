"""What comes along with a region: what finishes its results, and producers that are large too or cost little."""

from __future__ import annotations

from ..dtype import is_float, itemsize
from ..expr import Axis, Expr, Load, Op, free_axes, loads, reductions, walk
from ..program import Program, Value, depends
from .joins import Sides, is_of_positions

# Float operations of a prologue that may be repeated in the loop (column side) or per row tile (row side).
MAX_COLUMN_OPS, MAX_ROW_OPS = 3, 12

AllSides = dict[str, tuple[Sides, ...]]


def with_epilogue(program: Program, members: set[str], others: set[str]) -> set[str]:
    """Add pointwise values that only finish what the region returns (gates, scalings, differences)."""
    members = set(members)
    for v in program.values:
        if v.name in members | others or v.expr is None or v.is_view or v.projection or not is_float(v.dtype):
            continue
        inner = [r for r in v.reads if r in members]
        if not inner or reductions(v.expr) or uses_division(v.expr):
            continue
        same_size = v.numel == max(program.by_name[r].numel for r in inner)
        if same_size and not depends(program, set(v.reads) - members, members):
            members.add(v.name)
    return members


def uses_division(e: Expr) -> bool:
    return any(divides(node) for node in loads(e))


def divides(node: Load) -> bool:
    """Whether an index of a load divides: a view that cuts or joins axes."""
    return any(isinstance(n, Op) and n.name in ("floordiv", "mod") for i in node.index for n in walk(i))


def with_prologue(program: Program, members: set[str], sides: AllSides, taken: set[str]) -> set[str]:
    """Add producers that would be as large as the blow-up, or are cheap enough to repeat; none that a region has."""
    members, sides = set(members), dict(sides)
    others = taken - members
    chosen_by = _choosing(program, members)
    for v in reversed(program.values):
        readers = [program.by_name[u] for u in program.users[v.name] if u in members]
        if v.name in members | others or v.expr is None or v.is_view or not readers:
            continue
        rows, cols, two_sided = _read_along(v, readers, sides)
        sides[v.name] = ((rows, cols),)
        expands = v.numel > sum(program.by_name[r].numel for r in v.reads)
        if two_sided or (expands and (not reductions(v.expr) or len(v.reads) == 1)) or _is_distance(program, v):
            fits = expands or not reductions(v.expr)
        elif reductions(v.expr) or v.projection or (is_float(v.dtype) and _read_across(v, readers)):
            fits = False
        elif v.name in chosen_by or (v.name in program.outputs and is_rounded(program, v, members)):
            # PyTorch makes it in any case, and not to the last bit as a kernel does: what it is compared with, or what
            # another pass makes of it, is of PyTorch's.
            fits = False
        else:
            fits = _cost(v.expr) <= (MAX_COLUMN_OPS if cols else MAX_ROW_OPS)
        if fits:
            members.add(v.name)
    return members


def is_rounded(program: Program, v: Value, readers: set[str]) -> bool:
    """Whether `readers` take `v` in 16 bits."""
    found = (program.by_name[u] for u in program.users[v.name] if u in readers)
    return is_float(v.dtype) and any(itemsize(t.dtype) == 2 and is_float(t.dtype) for u in found for t in (v, u))


def _choosing(program: Program, members: set[str]) -> set[str]:
    """The floats from which PyTorch finds, by operations that kernels know nothing of, what a region reads: the k-th
    largest, say."""
    found: set[str] = set()
    read: set[str] = {r for m in members for r in program.by_name[m].reads} - members
    for v in reversed(program.values):
        if v.name in found or (v.name in read and v.expr is None):
            found.update(v.reads)
        if v.name in read:
            read.update(v.reads)
    return {name for name in found if is_float(program.by_name[name].dtype)}


def _is_distance(program: Program, v: Value) -> bool:
    """Whether `v` is a table of two positions or more, and made of nothing else."""
    return sum(a.extent > 1 for a in v.axes) > 1 and is_of_positions(program, v)


def _read_across(v: Value, readers: list[Value]) -> bool:
    """Whether a reader's reduction runs over several axes of `v` at once: its tiles would not be contiguous."""
    return any(
        isinstance(n, Op) and n.name in ("floordiv", "mod") and r.axis in free_axes(n)
        for reader in readers
        if reader.expr is not None
        for r in reductions(reader.expr)
        for node in loads(r.body)
        if node.source == v.name
        for i in node.index
        for n in walk(i)
    )


def _read_along(v: Value, readers: list[Value], sides: AllSides) -> tuple[frozenset[Axis], frozenset[Axis], bool]:
    """Axes of `v` that the readers index along their rows and columns; whether one read has both, apart.

    A reader that grew from several joins has rows and columns in the terms of each; `v` is as large as the
    blow-up only if it is so in all of them.
    """
    rows: set[Axis] = set()
    cols: set[Axis] = set()
    two_sided = False
    for reader in readers:
        assert reader.expr is not None
        reduced = frozenset(r.axis for r in reductions(reader.expr))
        for node in (n for n in loads(reader.expr) if n.source == v.name):
            large = True
            for reader_rows, reader_cols in sides.get(reader.name, ((frozenset(), frozenset()),)):
                # What a member without columns reduces over runs along them.
                along_rows, along_cols = (
                    {a for a, i in zip(v.axes, node.index, strict=True) if free_axes(i) & side}
                    for side in (reader_rows, reader_cols or reduced)
                )
                apart = len(along_rows | along_cols) > 1 or divides(node)
                large &= bool(along_rows and along_cols) and apart
                rows |= along_rows
                cols |= along_cols
            two_sided |= large
    return frozenset(rows), frozenset(cols), two_sided


_COSTS = {
    "select": 4, "exp": 2, "log": 2, "tanh": 4, "sigmoid": 3, "sin": 4, "cos": 4, "tan": 4, "asin": 4,
    "acos": 4, "atan": 4, "atan2": 4, "pow": 4, "erf": 4, "uniform": 20,
}  # fmt: skip


def _cost(e: Expr) -> int:
    """Float operations of one element, a gather counted as two."""
    ops = sum(_COSTS.get(n.name, 1) for n in walk(e) if isinstance(n, Op) and is_float(n.dtype))
    return ops + sum(2 for n in loads(e) if any(isinstance(m, Load) for i in n.index for m in walk(i)))
