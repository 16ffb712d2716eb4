"""Views leave no trace: every load of a view becomes a load of what it views."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from ..build import substitute
from ..dtype import is_float, is_int, itemsize
from ..expr import Const, Expr, Load, Op, const, free_axes, load, loads, raw_op, reductions, sources
from ..program import Program, Value, reads_of
from .whole import in_floats

# How many times smaller a part is that is computed without the rest.
SMALL_PART = 4


def inline_load(node: Load, value: Value) -> Expr:
    """The expression of `value` at the indices of `node`."""
    assert value.expr is not None
    return substitute(value.expr, dict(zip(value.axes, node.index, strict=True)))


def inlined(e: Expr, values: Mapping[str, Value], made: dict[str, Value] | None = None) -> Expr:
    """`e` with its loads of `values` written out, and what those load of them; a load may be the index of another.

    Args:
      made: those of `values` that have been written out before; further ones are added.
    """
    made = {} if made is None else made
    wanted, stack = set[str](), [*sources(e)]
    while stack:
        name = stack.pop()
        if name in values and name not in made and name not in wanted:
            wanted.add(name)
            stack += values[name].reads
    for name in _in_order(wanted, values):
        v = values[name]
        assert v.expr is not None
        made[name] = replace(v, expr=_replaced(v.expr, made))
    return _replaced(e, made)


def _in_order(names: Set[str], values: Mapping[str, Value]) -> list[str]:
    """Names, each behind those that its value reads."""
    ordered: dict[str, None] = {}
    stack = [*names]
    while stack:
        before = [r for r in values[stack[-1]].reads if r in names and r not in ordered]
        stack += before
        if not before:
            ordered[stack.pop()] = None
    return [*ordered]


def _replaced(e: Expr, made: Mapping[str, Value]) -> Expr:
    while found := {n: inline_load(n, made[n.source]) for n in loads(e) if n.source in made}:
        e = substitute(e, {}, dict(found))
    return e


def resolve_views(program: Program, kept: Set[str] = frozenset(), rounded: Set[str] = frozenset()) -> Program:
    """`y = x.T; z[i,j] = y[i,j]` → `z[i,j] = x[j,i]`. Views that PyTorch still needs stay; so do constants.

    An axis that a value does not depend on (it was expanded before it was computed) is read at 0. What PyTorch rounds
    to 16 bits, and reads by an operation that kernels know nothing of (the largest k of it), is no view of what it was.

    Args:
      kept: views that stay, and are loaded as they are.
      rounded: casts that are no views.
    """
    out: dict[str, Value] = {}
    for v in program.values:
        if v.expr is not None:
            expr = raw_op("cast", (v.expr,), v.dtype) if v.name in rounded or _is_rounded(program, v) else v.expr
            while found := {
                n: new for n in loads(expr) if n.source not in kept and (new := _resolved(n, out[n.source])) is not n
            }:
                expr = substitute(expr, {}, dict(found))
            expr = in_floats(expr) if is_int(v.dtype) else expr
            alone = v.is_view and _is_alone(program, v)
            v = replace(v, expr=expr, reads=reads_of(expr))
            v = _picked(v) if alone else v
        out[v.name] = v
    values = (_picked(v) if _is_picked(program, v) else v for v in out.values())
    return replace(program, values=_live(tuple(values), program.outputs))


def is_narrower(v: Value) -> bool:
    """Whether `v` is a view of a float by fewer bits than that has: a cast."""
    return isinstance(v.expr, Load) and is_float(v.dtype) and itemsize(v.dtype) < itemsize(v.expr.dtype)


def _is_rounded(program: Program, v: Value) -> bool:
    return is_narrower(v) and any(program.by_name[r].expr is None for r in readers(program, v.name))


def _is_picked(program: Program, v: Value) -> bool:
    """Whether a result is a part of a computed value that is no result itself: a diagonal of scores, a column."""
    if not v.is_view or v.name not in program.outputs:
        return False
    root = program.by_name[root_of(program, v.name)]
    return root.expr is not None and root.name not in program.outputs and v.numel < root.numel


def is_small_part(v: Value, whole: Value) -> bool:
    """Whether `v`, of a part of `whole`, is worth computing without the rest, though kernels may find of all rows what
    a backward pass needs: half of what they compute then is scores."""
    return v.numel * SMALL_PART <= whole.numel


def _is_alone(program: Program, v: Value) -> bool:
    """Whether a view is a small part of a sum, or of a copy of it, and all that is read of it (a token's row)."""
    whole, seen = v, v.expr
    while isinstance(seen, Load):
        whole = program.by_name[seen.source]
        if len(program.users[whole.name]) > 1 or whole.name in program.outputs:
            return False
        seen = whole.expr.args[0] if isinstance(whole.expr, Op) and whole.expr.name == "cast" else whole.expr
    return seen is not None and bool(reductions(seen)) and is_small_part(v, whole)


def _picked(v: Value) -> Value:
    """`v` as a value of its own: as a view it would have all of what it is a part of stored."""
    assert v.expr is not None
    return replace(v, expr=raw_op("cast", (v.expr,), v.dtype))


def readers(program: Program, name: str) -> set[str]:
    """What reads a value, or views of it."""
    found: set[str] = set()
    for user in program.users[name]:
        found |= readers(program, user) if program.by_name[user].is_view else {user}
    return found


def _resolved(node: Load, value: Value) -> Expr:
    if value.is_view or isinstance(value.expr, Const):
        return inline_load(node, value)
    if value.expr is None:
        return node
    zero, used = const(0, "i64"), free_axes(value.expr)
    idx = tuple(i if a in used else zero for a, i in zip(value.axes, node.index, strict=True))
    return load(node.source, idx, node.dtype)


def _live(values: tuple[Value, ...], outputs: tuple[str, ...]) -> tuple[Value, ...]:
    """The values something needs: outputs, and what they and extern values read."""
    needed = set(outputs)
    kept = []
    for v in reversed(values):
        if v.name in needed:
            kept.append(v)
            needed.update(v.reads)
    return tuple(reversed(kept))


def root_of(program: Program, name: str) -> str:
    """The value that `name` views, directly or not; itself if it is no view."""
    while isinstance(seen := program.by_name[name].expr, Load):
        name = seen.source  # and not the positions, if they are data
    return name
