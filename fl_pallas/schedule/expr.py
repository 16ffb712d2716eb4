"""Expressions over named axes: the nodes, interned so that equality is identity, in another process too.

An expression is a pure scalar function of the indices of its free axes. Integer expressions serve
as indices, masks and bias distances alike; there is no second language for addresses.

Floating types: a node keeps PyTorch's type, but inside a fused region every floating value is held
in the region's compute type (float32 or float64), so casts between floating types leave no node.
Only `Reduce.dtype` narrows arithmetic: a sum of products of type bf16 multiplies bf16 operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary


@dataclass(frozen=True)
class Axis:
    """A named axis with a positive extent. Two axes are the same if name, extent and size are.

    Attributes:
      size: where the extent is known at launch only; `extent` is then one that was seen, or, of an axis that is
        taken whole, the room there is for it, which is more.
    """

    name: str
    extent: int
    size: Size | None = None

    def __hash__(self) -> int:
        # (Much quicker than that of three fields, and asked millions of times.)
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Const:
    value: bool | int | float
    dtype: str

    def __reduce__(self) -> Any:
        return const, (self.value, self.dtype)


@dataclass(frozen=True, eq=False)
class Size:
    """An integer that is known when a kernel is launched: `unit` times the `number`-th of its sizes.

    Attributes:
      hint: a value that was seen.
    """

    number: int
    unit: int
    hint: int
    dtype: str = "i64"

    def __reduce__(self) -> Any:
        return size, (self.number, self.unit, self.hint, self.dtype)


@dataclass(frozen=True, eq=False)
class Index:
    """The index along an axis, 0 to extent - 1 (an iota)."""

    axis: Axis
    dtype: str = "i64"

    def __reduce__(self) -> Any:
        return index, (self.axis,)


@dataclass(frozen=True, eq=False)
class Load:
    """One element of a value or operand, `index` giving one integer expression per dimension."""

    source: str
    index: tuple[Expr, ...]
    dtype: str

    def __reduce__(self) -> Any:
        return load, (self.source, self.index, self.dtype)


@dataclass(frozen=True, eq=False)
class Op:
    """A pointwise operation; `name` is a row of the tables in `pointwise.py`."""

    name: str
    args: tuple[Expr, ...]
    dtype: str

    def __reduce__(self) -> Any:
        return raw_op, (self.name, self.args, self.dtype)


@dataclass(frozen=True, eq=False)
class Reduce:
    """A reduction of `body` over `axis` (bound here). kind: sum, max, min, prod, any, all."""

    kind: str
    axis: Axis
    body: Expr
    dtype: str

    def __reduce__(self) -> Any:
        return raw_reduce, (self.kind, self.axis, self.body, self.dtype)


@dataclass(frozen=True, eq=False)
class Ref:
    """A value held in registers by the plan, one element per index of `axes`: an accumulator or statistic."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str

    def __reduce__(self) -> Any:
        return ref, (self.name, self.axes, self.dtype)


Expr = Const | Size | Index | Load | Op | Reduce | Ref

_interned: WeakValueDictionary = WeakValueDictionary()


def _intern(cls: type, key: tuple[object, ...], *fields: object) -> Expr:
    """The node of these fields; `key` tells them apart, children by their `id`: they live as long as their parent."""
    node = _interned.get(key)
    if node is None:
        node = cls(*fields)
        _interned[key] = node
    return node


def const(value: bool | int | float, dtype: str) -> Expr:
    # 0, 0.0, -0.0 and False hash alike, and NaN differs from itself: keep the type and the text.
    return _intern(Const, (Const, type(value), repr(value), dtype), value, dtype)


def size(number: int, unit: int, hint: int, dtype: str = "i64") -> Size:
    return _intern(Size, (Size, number, unit, hint, dtype), number, unit, hint, dtype)  # type: ignore[return-value]


def index(axis: Axis) -> Expr:
    """The index along `axis`; the constant 0 when there is only one."""
    return const(0, "i64") if axis.extent == 1 else _intern(Index, (Index, axis), axis, "i64")


def load(source: str, idx: tuple[Expr, ...], dtype: str) -> Expr:
    return _intern(Load, (Load, source, dtype, *map(id, idx)), source, tuple(idx), dtype)


def raw_op(name: str, args: tuple[Expr, ...], dtype: str) -> Expr:
    """An Op node as given, with no simplification (see `build.op`)."""
    return _intern(Op, (Op, name, dtype, *map(id, args)), name, tuple(args), dtype)


def raw_reduce(kind: str, axis: Axis, body: Expr, dtype: str) -> Expr:
    """A Reduce node as given; `axis` must not be bound by an enclosing reduction of the same name."""
    return _intern(Reduce, (Reduce, kind, axis, id(body), dtype), kind, axis, body, dtype)


def ref(name: str, axes: tuple[Axis, ...], dtype: str) -> Expr:
    return _intern(Ref, (Ref, name, tuple(axes), dtype), name, tuple(axes), dtype)


def children(e: Expr) -> tuple[Expr, ...]:
    # (Faster than `isinstance`, and asked millions of times.)
    if type(e) is Op:
        return e.args
    if type(e) is Load:
        return e.index
    if type(e) is Reduce:
        return (e.body,)
    return ()


def free_axes(e: Expr) -> frozenset[Axis]:
    """Axes the value of `e` depends on: those used and not bound by a reduction inside `e`."""
    cached = e.__dict__.get("_free")
    if cached is None:
        if isinstance(e, Index):
            cached = frozenset((e.axis,))
        elif isinstance(e, Ref):
            cached = frozenset(e.axes)
        else:
            cached = frozenset().union(*(free_axes(c) for c in children(e)))
            if isinstance(e, Reduce):
                cached = cached - {e.axis}
        object.__setattr__(e, "_free", cached)
    return cached


def ref_names(e: Expr) -> frozenset[str]:
    """Names of the references inside `e`."""
    cached = e.__dict__.get("_refs")
    if cached is None:
        cached = frozenset((e.name,)) if isinstance(e, Ref) else frozenset().union(*map(ref_names, children(e)))
        object.__setattr__(e, "_refs", cached)
    return cached


def sources(e: Expr) -> frozenset[str]:
    """Names of what `e` loads."""
    cached = e.__dict__.get("_sources")
    if cached is None:
        cached = frozenset(n.source for n in loads(e))
        object.__setattr__(e, "_sources", cached)
    return cached


def walk(e: Expr) -> Iterator[Expr]:
    """Every distinct node of `e`, children before parents."""
    yield from _below(e)
    yield e


def _below(e: Expr) -> tuple[Expr, ...]:
    """The distinct nodes inside `e`, children before parents, found once: passes walk over an expression again and
    again. (Without `e`, which would keep itself alive.)"""
    cached = e.__dict__.get("_below")
    if cached is None:
        found: dict[Expr, None] = {}
        opened, stack = set[Expr](), [*reversed(children(e))]
        while stack:
            node = stack[-1]
            if node in opened:
                stack.pop()
                found[node] = None
            else:
                opened.add(node)
                stack += [c for c in reversed(children(node)) if c not in opened]
        cached = tuple(found)
        object.__setattr__(e, "_below", cached)
    return cached


def reductions(e: Expr) -> list[Reduce]:
    """Every distinct reduction inside `e`, inner before outer."""
    return [*_inside(e)[0]]


def outermost(e: Expr) -> frozenset[Reduce]:
    """The reductions of `e` that are reached through no other; itself, if it is one."""
    if isinstance(e, Reduce):
        return frozenset((e,))
    cached = e.__dict__.get("_outermost")
    if cached is None:
        cached = frozenset().union(*map(outermost, children(e)))
        object.__setattr__(e, "_outermost", cached)
    return cached


def loads(e: Expr) -> list[Load]:
    """Every distinct load inside `e`."""
    return [*_inside(e)[1]]


def outer_loads(e: Expr) -> list[Load]:
    """Every distinct load of `e` that is not inside of a reduction, nor of another load's index."""
    found: dict[Load, None] = {}
    seen, stack = set[Expr](), [e]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Load):
            found[node] = None
        elif not isinstance(node, Reduce):
            stack += reversed(children(node))
    return [*found]


def divides(node: Load) -> bool:
    """Whether an index of a load divides: a view that cuts or joins axes."""
    return any(isinstance(n, Op) and n.name in ("floordiv", "mod") for i in node.index for n in walk(i))


def _inside(e: Expr) -> tuple[tuple[Reduce, ...], tuple[Load, ...]]:
    """The reductions and the loads inside `e`, found once: passes ask for them again and again."""
    cached = e.__dict__.get("_inside")
    if cached is None:
        nodes = [*walk(e)]
        found = tuple(n for n in nodes if isinstance(n, Reduce))
        cached = found, tuple(n for n in nodes if isinstance(n, Load))
        object.__setattr__(e, "_inside", cached)
    return cached
