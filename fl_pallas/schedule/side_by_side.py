"""Tensors side by side: pieces of one are a view of it, and several that no kernel computes are PyTorch's to put there.

    cat(x.chunk(8, 2), 0)                            # x[a1, a0 // n * 8 + ..., a0 % n]
    sum(select_backward(g[h], h) for h in range(8))  # g, the gradient of heads in a Python loop
    stack([x @ w for w in heads])                    # PyTorch's

A kernel that reads one of many would ask of each element which of them it is of, and load a tile of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .build import difference, op, substitute
from .dtype import is_int
from .expr import Axis, Const, Expr, Index, Load, Op, const, index, load, loads, reductions
from .integer import from_linear, linear
from .passes.joins import join
from .passes.resolve_views import inline_load
from .program import Program, Value

# Fewer tensors are read where they lie (the halves of what is rotated).
FEWEST = 4


@dataclass(frozen=True)
class _Pieces:
    """What an element is loaded from, by its place along an axis: each piece ends where the next begins."""

    axis: Axis
    ends: tuple[int, ...]
    loads: tuple[Load, ...]


def _pieces(e: Expr | None) -> _Pieces | None:
    """None if an expression is anything else."""
    axes, ends, found = set[Axis](), list[int](), list[Load]()
    while isinstance(e, Op) and e.name == "select":
        test, piece, e = e.args
        if not (isinstance(test, Op) and test.name == "lt" and isinstance(piece, Load)):
            return None
        place, end = test.args
        if not (isinstance(place, Index) and isinstance(end, Const)):
            return None
        axes.add(place.axis)
        ends.append(int(end.value))
        found.append(piece)
    if not isinstance(e, Load) or len(axes) != 1:
        return None
    (axis,) = axes
    return _Pieces(axis, (*ends, axis.extent), (*found, e))


def rejoined(program: Program) -> Program:
    """A Program in which equal pieces of a tensor, one after another as they lie in it, are a view of it."""
    known: dict[str, Value] = {}
    sums: dict[str, Value] = {}
    unread: list[str] = []
    for v in program.values:
        pieces = _pieces(v.expr)
        if pieces is None and (found := _summed(v, sums)) is not None:
            sums[v.name] = found[0]
            pieces = found[1]
        whole = None if pieces is None else _whole(pieces, known)
        known[v.name] = v if whole is None else replace(v, expr=whole, reads=(whole.source,))
        unread += () if whole is None else v.reads
    readers = Counter(r for v in known.values() for r in v.reads)
    while unread:
        v = known.get(unread.pop())
        if v is not None and not readers[v.name] and v.expr is not None and v.name not in program.outputs:
            del known[v.name]
            readers.subtract(v.reads)
            unread += v.reads
    return replace(program, values=tuple(known.values()))


def _summed(v: Value, sums: Mapping[str, Value]) -> tuple[Value, _Pieces | None] | None:
    """A sum of tensors each of which is 0 but for a piece, written out, and the pieces if they leave nothing between;
    None if it is no such sum."""
    if not isinstance(v.expr, Op) or v.expr.name not in ("add", "select"):
        return None
    written = {n: inline_load(n, sums[n.source]) for n in loads(v.expr) if n.source in sums}
    v = replace(v, expr=substitute(v.expr, {}, dict(written)))
    found: list[tuple[Axis, int, int, Load]] = []
    terms = [v.expr]
    while terms:
        e = terms.pop()
        if not isinstance(e, Op):
            return None
        if e.name == "add":
            terms += e.args
            continue
        if e.name != "select" or not isinstance(e.args[1], Load) or not isinstance(e.args[2], Const):
            return None
        place = _interval(e.args[0])
        if place is None or e.args[2].value != 0:
            return None
        found.append((*place, e.args[1]))
    found.sort(key=lambda p: p[1])
    axes, starts, ends, pieces = zip(*found, strict=True)
    apart = len({*axes}) == 1 and starts == (0, *ends[:-1]) and ends[-1] == axes[0].extent
    return v, _Pieces(axes[0], ends, pieces) if apart else None


def _interval(test: Expr) -> tuple[Axis, int, int] | None:
    """Where along which axis a condition holds: from where on, and up to where; None for other conditions."""
    if isinstance(test, Op) and test.name == "and":
        left, right = map(_interval, test.args)
        if left is None or right is None or left[0] != right[0]:
            return None
        return left[0], max(left[1], right[1]), min(left[2], right[2])
    if not isinstance(test, Op) or test.name not in ("eq", "lt", "le", "gt", "ge") or not is_int(test.args[0].dtype):
        return None
    terms, c = difference(*test.args)
    (atom, sign), *others = terms.items() or [(None, 0)]
    if others or not isinstance(atom, Index) or abs(sign) != 1:
        return None
    # sign · i + c, compared with 0.
    axis, at = atom.axis, -c * sign
    if test.name == "eq":
        return axis, at, at + 1
    below = (test.name in ("lt", "le")) == (sign > 0)
    end = at + (test.name in ("le", "ge")) if below else at + (test.name in ("lt", "gt"))
    return (axis, 0, end) if below else (axis, end, axis.extent)


def _whole(pieces: _Pieces, known: Mapping[str, Value]) -> Load | None:
    """All pieces as one load, if they are of one tensor, and as far apart there as here."""
    axis, n = pieces.axis, pieces.ends[0]
    if pieces.ends != tuple(range(n, axis.extent + 1, n)):
        return None
    own = [_resolved(p, known) for p in pieces.loads]
    if len({p.source for p in own}) > 1:
        return None
    short = Axis(f"{axis.name}%", n)
    place, which = (op(name, index(axis), const(n, "i64"), dtype="i64") for name in ("mod", "floordiv"))
    found: list[Expr] = []
    steps: list[int] = []
    for d in range(len(own[0].index)):
        places = (op("add", index(short), const(n * k, "i64"), dtype="i64") for k in range(len(own)))
        terms, first = zip(*(linear(substitute(p.index[d], {axis: at})) for p, at in zip(own, places)), strict=True)
        steps.append(first[1] - first[0])
        if any(t != terms[0] for t in terms) or any(c != first[0] + k * steps[d] for k, c in enumerate(first)):
            return None
        start = substitute(from_linear((terms[0], first[0]), "i64"), {short: place})
        found.append(op("add", start, op("mul", which, const(steps[d], "i64"), dtype="i64"), dtype="i64"))
    # The same again is not the whole of anything, and what is turned round is read piece by piece.
    whole = load(own[0].source, tuple(found), own[0].dtype)
    return whole if isinstance(whole, Load) and min(steps) >= 0 < max(steps) else None


def _resolved(node: Load, known: Mapping[str, Value]) -> Load:
    """What a load of a view loads, or one of what is nothing else there (a gradient of which other pieces are 0)."""
    while (v := known[node.source]).is_view or isinstance(v.expr, Op) and v.expr.name == "select":
        seen = inline_load(node, v)
        if not isinstance(seen, Load):
            break
        node = seen
    return node


def side_by_side(program: Program) -> frozenset[str]:
    """Names of the values that are nothing but FEWEST tensors or more, one after another, each made of others than the
    rest, without joins."""
    made: dict[str, frozenset[str] | None] = {}
    found = set[str]()
    for v in program.values:
        pieces = _pieces(v.expr)
        parts = [made[p.source] for p in pieces.loads] if pieces is not None else []
        known = [p for p in parts if p is not None]
        if len(known) >= FEWEST and len(known) == len(parts) and _are_apart(known):
            found.add(v.name)
        if v.expr is None or v.projection or v.name in found:
            made[v.name] = frozenset({v.name})
            continue
        read = [m for r in v.reads if (m := made[r]) is not None]
        alone = len(read) == len(v.reads) and not reductions(v.expr) and join(program, v) is None
        made[v.name] = frozenset[str]().union(*read) if alone else None
    return frozenset(found)


def _are_apart(parts: list[frozenset[str]]) -> bool:
    """Whether each is made of something, and no two of the same."""
    return all(parts) and len(frozenset[str]().union(*parts)) == sum(map(len, parts))
