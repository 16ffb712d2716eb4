"""Constructors that simplify: the only way the compiler makes Op and Reduce nodes.

Every rule here is exact, NaN and infinity included, so a built expression equals the written one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..errors import Unsupported
from . import integer
from .dtype import is_float, is_int, is_narrow_float
from .expr import (
    Axis,
    Const,
    Expr,
    Index,
    Load,
    Op,
    Reduce,
    children,
    const,
    free_axes,
    index,
    load,
    raw_op,
    raw_reduce,
    walk,
)
from .scan import BACK, BLOCK, RUNNING, WHOLE, place_of

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
TRUE, FALSE = const(True, "bool"), const(False, "bool")
# Below, every floating type has each whole number and the next.
EXACT = 2**8
# Nodes that one substitution may visit: a second's work.
MAX_STEPS = 500_000


def op(name: str, *args: Expr, dtype: str) -> Expr:
    """The pointwise operation `name` on `args`, simplified where that is exact.

    Args:
      name: add sub mul div quotient neg abs max min pow exp exp2 expm1 log log2 log1p sqrt rsqrt sin cos tan asin
        acos atan atan2 tanh sigmoid erf rounded floor ceil round trunc sign floordiv mod isnan isinf lt le gt ge eq
        ne and or xor not shl shr select cast uniform joined. `and`/`or`/`xor`/`not` are bitwise on integers.
      args: operands, already of the type the operation computes in; `select` takes (condition, then, else);
        `uniform`, a random number in [0, 1), integers: (key, first row, row, column), see philox.py; `rounded` is to
        bfloat16, and `round` to integers; `joined` is the float32 that these are the parts of; a `quotient` is a `div`
        that stays one, rounded as PyTorch's.
      dtype: type of the result.
    """
    if name in COMPARISONS:
        return _compare(name, *args)
    if is_int(dtype) and name in ("add", "sub", "neg"):
        return integer.from_linear(integer.linear(raw_op(name, args, dtype)), dtype)
    rule = _RULES.get(name)
    out = rule(args, dtype) if rule else None
    return raw_op(name, args, dtype) if out is None else out


def difference(a: Expr, b: Expr) -> integer.Linear:
    """`a` - `b` of integers as a linear form, with what divisions leave joined."""
    return integer.linear(op("sub", a, b, dtype="i64"))


def _mul(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    a, b = args
    if isinstance(a, Const) and not isinstance(b, Const):
        a, b = b, a
    if is_int(dtype) and isinstance(b, Const):
        return integer.from_linear(integer.linear(raw_op("mul", (a, b), dtype)), dtype)
    if isinstance(b, Const) and b.value == 1:
        return a
    folded = _fold(args, dtype, lambda x, y: x * y)
    return folded if folded is not None else raw_op("mul", (a, b), dtype)


def _fold(args: tuple[Expr, ...], dtype: str, f: Callable[..., float]) -> Expr | None:
    if not all(isinstance(a, Const) for a in args):
        return None
    values = [a.value for a in args if isinstance(a, Const)]
    try:
        return const(f(*values), dtype)
    except (OverflowError, ValueError, ZeroDivisionError):
        return None


def _of_either(a: Expr, dtype: str, f: Callable[[float], float]) -> Expr | None:
    """A function of a number, or of one of several, by conditions: the logarithm of a mask of ones and zeros."""
    if not isinstance(a, Op) or a.name != "select":
        return _fold((a,), dtype, f)
    condition, *numbers = a.args
    then, other = (_of_either(n, dtype, f) for n in numbers)
    return None if then is None or other is None else select(condition, then, other)


def _add(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    a, b = args
    if isinstance(a, Const) and a.value == 0:
        return b
    if isinstance(b, Const) and b.value == 0:
        return a
    return _fold(args, dtype, lambda x, y: x + y)


def _sub(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    if isinstance(args[1], Const) and args[1].value == 0:
        return args[0]
    return _fold(args, dtype, lambda x, y: x - y)


def _div(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    if isinstance(args[1], Const) and args[1].value == 1:
        return args[0]
    return _fold(args, dtype, lambda x, y: x / y)


def _extreme(name: str, args: tuple[Expr, ...], dtype: str) -> Expr | None:
    """The one of two integers that is always the larger, or the smaller: positions that are clamped to a table which
    has a row for each of them."""
    a, b = args
    span = integer.linear_bounds(integer.linear(raw_op("sub", args, "i64"))) if is_int(dtype) else None
    if span is None or span[0] < 0 < span[1]:
        return None
    return a if (span[0] >= 0) == (name == "max") else b


def _abs(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    (a,) = args
    return op("abs", a.args[0], dtype=dtype) if isinstance(a, Op) and a.name in ("neg", "abs") else None


def _floordiv(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    a, n = args
    if is_int(dtype) and isinstance(n, Const) and n.value > 0:
        return integer.floordiv(a, int(n.value), dtype)
    return None


def _mod(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    a, n = args
    if is_int(dtype) and isinstance(n, Const) and n.value > 0:
        return integer.mod(a, int(n.value), dtype)
    return None


def _compare(name: str, a: Expr, b: Expr) -> Expr:
    if isinstance(b, Const) and (whole := _whole(a)) is not None and abs(b.value) < EXACT and b.value == int(b.value):
        # Rounding keeps order, and small numbers: a distance in bfloat16 is negative where it was.
        a, b = whole, const(int(b.value), whole.dtype)
    if is_int(a.dtype) and is_int(b.dtype):
        difference = integer.linear(raw_op("sub", (a, b), "i64"))
        span = integer.linear_bounds(difference)
        if span is not None:
            outcomes = {COMPARISONS[name](d, 0) for d in _corners(span)}
            if len(outcomes) == 1 and (
                name not in ("eq", "ne") or span[0] == span[1] or 0 not in range(span[0], span[1] + 1)
            ):
                return const(outcomes.pop(), "bool")
    folded = _fold((a, b), "bool", COMPARISONS[name])
    if folded is not None:
        return folded
    if isinstance(b, Const) and isinstance(a, Op) and a.name == "select":
        _, then, other = a.args
        if isinstance(then, Const) and isinstance(other, Const):
            return select(a.args[0], _compare(name, then, b), _compare(name, other, b))
    return raw_op(name, (a, b), "bool")


def _whole(e: Expr) -> Expr | None:
    """The integer that a float is of; None if it is of none."""
    if isinstance(e, Op) and e.name == "cast" and is_float(e.dtype) and e.args[0].dtype in ("i32", "i64"):
        return e.args[0]
    return None


def _corners(span: tuple[int, int]) -> tuple[int, int]:
    return span


def whole_power(x: Expr, n: int) -> Expr:
    """x to the n-th, n from 1 on, by squaring."""
    if n == 1:
        return x
    half = whole_power(x, n // 2)
    square = op("mul", half, half, dtype=x.dtype)
    return op("mul", square, x, dtype=x.dtype) if n % 2 else square


def select(condition: Expr, then: Expr, other: Expr) -> Expr:
    """`then` where `condition`, else `other`."""
    if isinstance(condition, Const):
        return then if condition.value else other
    if then is other:
        return then
    if isinstance(condition, Op) and condition.name == "not":
        return select(condition.args[0], other, then)
    if isinstance(then, Op) and then.name == "select" and then.args[0] is condition:
        then = then.args[1]
    if isinstance(other, Op) and other.name == "select" and other.args[0] is condition:
        other = other.args[2]
    if then.dtype == "bool":
        if then is TRUE and other is FALSE:
            return condition
        if then is FALSE and other is TRUE:
            return negate(condition)
    return raw_op("select", (condition, then, other), then.dtype)


def negate(condition: Expr) -> Expr:
    """The logical negation of a bool expression."""
    if isinstance(condition, Const):
        return const(not condition.value, "bool")
    if isinstance(condition, Op):
        if condition.name == "not":
            return condition.args[0]
        if condition.name in NEGATED and is_int(condition.args[0].dtype):
            return _compare(NEGATED[condition.name], *condition.args)
    return raw_op("not", (condition,), "bool")


def _not(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    return negate(args[0]) if dtype == "bool" else None


def _and(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    return _absorb(args, dtype, neutral=True)


def _or(args: tuple[Expr, ...], dtype: str) -> Expr | None:
    return _absorb(args, dtype, neutral=False)


def _absorb(args: tuple[Expr, ...], dtype: str, neutral: bool) -> Expr | None:
    a, b = args
    if dtype != "bool":
        return None
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if bool(x.value) is neutral else x
    if negate(a) is b:
        return const(not neutral, "bool")
    return a if a is b else None


def cast(e: Expr, dtype: str) -> Expr:
    """`e` as `dtype`. Between floating types no node is made: regions compute in one floating type.

    Raises: Unsupported for a type that nothing is rounded to.
    """
    if e.dtype == dtype or (is_float(e.dtype) and is_float(dtype)):
        return e
    if is_narrow_float(dtype):
        raise Unsupported("a cast", f"no kernel rounds to {dtype}")
    if isinstance(e, Const):
        return const(_converted(e.value, dtype), dtype)
    if e.dtype == "bool":
        return select(e, const(_converted(1, dtype), dtype), const(_converted(0, dtype), dtype))
    if dtype == "bool":
        return op("ne", e, const(_converted(0, e.dtype), e.dtype), dtype="bool")
    if is_int(e.dtype) and is_int(dtype):
        return wrapped(e, dtype) if dtype in integer.NARROW else e if _fits(e, dtype) else raw_op("cast", (e,), dtype)
    return raw_op("cast", (e,), dtype)


def wrapped(e: Expr, dtype: str) -> Expr:
    """The integer that a type of few bits holds in place of `e`, which is computed as if there were room: `uint8` 254
    for 3 - 5."""
    if _fits(e, dtype):
        return e
    low, high = integer.RANGES[dtype]
    up = op("sub", e, const(low, "i64"), dtype="i64")
    return op("add", op("mod", up, const(high - low + 1, "i64"), dtype="i64"), const(low, "i64"), dtype="i64")


def _fits(e: Expr, dtype: str) -> bool:
    span, (low, high) = integer.bounds(e), integer.RANGES[dtype]
    return dtype == "i64" or (span is not None and low <= span[0] and span[1] <= high)


def _converted(value: bool | int | float, dtype: str) -> bool | int | float:
    if dtype == "bool":
        return bool(value)
    if is_float(dtype):
        return float(value)
    return int(value) if math.isfinite(value) else 0


_RULES: dict[str, Callable[[tuple[Expr, ...], str], Expr | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda args, dtype: _of_either(args[0], dtype, lambda x: -x),
    "max": lambda args, dtype: _extreme("max", args, dtype),
    "min": lambda args, dtype: _extreme("min", args, dtype),
    "abs": _abs,
    "floordiv": _floordiv,
    "mod": _mod,
    "select": lambda args, dtype: select(*args),
    "cast": lambda args, dtype: cast(args[0], dtype),
    "not": _not,
    "and": _and,
    "or": _or,
    "sqrt": lambda args, dtype: _of_either(args[0], dtype, math.sqrt),
    "exp": lambda args, dtype: _of_either(args[0], dtype, math.exp),
    "log": lambda args, dtype: _of_either(args[0], dtype, lambda x: math.log(x) if x else -math.inf),
}


def reduce(kind: str, axis: Axis, body: Expr, dtype: str) -> Expr:
    """The reduction of `body` over `axis`, bound to a canonical name.

    Args:
      kind: sum, max, min, prod, any or all. max and min propagate NaN, as PyTorch's do.
      axis: an axis free in `body`.
      body: what is reduced.
      dtype: type of the result. For a sum of products of 16-bit floats, also the type in which the
        factors are multiplied (the sum itself is kept in float32).

    The bound axis is renamed to the first of r<n>, r<n>', … (n its extent) that is not free in the
    body, so that equal reductions become one node and reductions of one extent share a loop.
    """
    if axis not in free_axes(body):
        if kind == "sum":
            count = const(_converted(axis.extent, dtype), dtype)
            return op("mul", cast(body, dtype), count, dtype=dtype) if axis.extent != 1 else cast(body, dtype)
        if kind != "prod" or axis.extent == 1:
            return cast(body, dtype)
    target = _bound(axis, free_axes(body) - {axis})
    if target != axis:
        body = substitute(body, {axis: index(target)})
    return raw_reduce(kind, target, body, dtype)


def _bound(axis: Axis, taken: Collection[Axis]) -> Axis:
    """The axis that a reduction over `axis` binds, where all other axes of its body are `taken`."""
    names = (f"r{axis.extent}" + "'" * k for k in itertools.count())
    return next(a for a in (Axis(n, axis.extent) for n in names) if a not in taken)


def reduce_over(kind: str, axes: Sequence[Axis], body: Expr, dtype: str) -> Expr:
    """The reduction of `body` over several axes, the first of them outermost; as for `reduce`."""
    for axis in reversed(axes):
        body = reduce(kind, axis, body, dtype)
    return body


def row_major(indices: Iterable[Expr], axes: Iterable[Axis]) -> Expr:
    """The number of the element at `indices` of a tensor over `axes`, the last of them running fastest."""
    place: Expr = const(0, "i64")
    for i, a in zip(indices, axes, strict=True):
        place = op("add", op("mul", place, const(a.extent, "i64"), dtype="i64"), i, dtype="i64")
    return place


def dimensions(axis: Axis, strides: set[int]) -> list[Axis]:
    """The axes that `axis` flattens, by the strides along it of all but the last; itself if they do not divide it."""
    sides = [axis.extent, *sorted(strides - {axis.extent}, reverse=True), 1]
    if len(sides) < 3 or any(outer % inner for outer, inner in itertools.pairwise(sides)):
        return [axis]
    return [Axis(f"{axis.name}.{n}", outer // inner) for n, (outer, inner) in enumerate(itertools.pairwise(sides))]


def substitute(e: Expr, mapping: Mapping[Axis, Expr], replace: Mapping[Any, Expr] | None = None) -> Expr:
    """`e` with free axes replaced by integer expressions and, first of all, nodes by `replace`.

    A node of `replace` is looked up as it stands in `e`, before its own axes are replaced.

    Raises: Unsupported where reductions inside reductions make the expression too large to work on.
    """
    changed = {a: i for a, i in mapping.items() if i is not index(a)}
    return _Substitution(dict(replace or {})).of(e, changed, {})


class _Substitution:
    """What one call of `substitute` has made.

    Attributes:
      replace: what stands in the place of nodes.
      beside: the axes of that, which it keeps.
      scopes: what has been made, by what the axes of a reduction's body become. (A body is met as often as it is read,
        by a maximum and by the sum about it, and what is inside of it then as often as all paths to it.)
      left: how many nodes may still be visited.
    """

    def __init__(self, replace: dict[Expr, Expr]) -> None:
        self.replace = replace
        self.beside = frozenset[Axis]().union(*map(free_axes, replace.values()))
        self.scopes: dict[frozenset[tuple[Axis, Expr]], dict[Expr, Expr]] = {}
        self.left = MAX_STEPS

    def of(self, e: Expr, mapping: dict[Axis, Expr], memo: dict[Expr, Expr]) -> Expr:
        """`e` with axes replaced by `mapping`, of which `memo` holds what has been made."""
        made = memo.get(e) or self.replace.get(e)
        if made is not None:
            return made
        self.left -= 1
        if self.left < 0:
            raise Unsupported(
                "reductions inside reductions", f"more than {MAX_STEPS} steps to write one in terms of its operands"
            )
        if not self.replace and mapping.keys().isdisjoint(free_axes(e)):
            return e
        if isinstance(e, Index):
            out = mapping.get(e.axis, e)
        elif isinstance(e, Reduce):
            out = self._of_reduction(e, mapping, memo)
        elif isinstance(e, Op) and e.name in RUNNING:
            out = self._of_running(e, mapping, memo)
        else:
            out = with_children(e, tuple(self.of(c, mapping, memo) for c in children(e)))
        memo[e] = out
        return out

    def _of_reduction(self, e: Reduce, mapping: dict[Axis, Expr], memo: dict[Expr, Expr]) -> Expr:
        """A reduction elsewhere, bound at once to the axis that `reduce` would bind it to: with one more substitution
        for each there would be twice as many with each reduction that is inside of another."""
        axis, inner = e.axis, {a: mapping[a] for a in mapping.keys() & free_axes(e)}
        images = frozenset[Axis]().union(*(free_axes(inner.get(a, index(a))) for a in free_axes(e)))
        # (What stands in the place of nodes knows the axis by its name.)
        if axis in images or not self.replace:
            axis = _bound(axis, images | self.beside)
        if axis != e.axis:
            inner[e.axis] = index(axis)
        if axis != e.axis or e.axis in mapping:
            memo = self.scopes.setdefault(frozenset(inner.items()), {})
        else:
            inner = mapping
        body = self.of(e.body, inner, memo)
        return e if body is e.body else reduce(e.kind, axis, body, e.dtype)

    def _of_running(self, e: Op, mapping: dict[Axis, Expr], memo: dict[Expr, Expr]) -> Expr:
        """A running sum elsewhere: up to the next index, or the last, it is that up to an index, and an element, or
        without one. Tiles then have its blocks, and what it sums up knows nothing of where it ends."""
        there = with_children(e, tuple(self.of(c, mapping, memo) for c in e.args))
        assert isinstance(there, Op)
        before, after = place_of(e), place_of(there)
        if before is None or after is None or before[1]:
            return there
        axis, shift = after
        for a in free_axes(e.args[0]) - free_axes(e.args[1]):
            if axis in free_axes(mapping.get(a, index(a))):
                raise Unsupported("a running sum", "it is looked up along its rows")
        image = mapping.get(before[0], index(before[0]))
        back = op("sub", image, const(shift, "i64"), dtype="i64") if abs(shift) == 1 else image
        # From the end, what is behind the last index that is looked at would be missing in its block.
        if not _is_of_blocks(e, before[0], back) and (e.name in BACK or not _is_plain(e.args[0], before[0])):
            raise Unsupported("a running sum", "of a part of its indices more would be known than of what it sums up")
        if abs(shift) != 1:
            return there
        at = {**mapping, before[0]: back}
        args = tuple(self.of(c, at, {}) for c in e.args)
        name = _NEIGHBOUR.get((e.name, shift))
        if name is not None:
            return raw_op(name, args, e.dtype)
        if e.name not in WHOLE:
            return there
        return op("add", raw_op(e.name, args, e.dtype), there.args[0], dtype=e.dtype)


def _is_of_blocks(e: Op, axis: Axis, image: Expr) -> bool:
    """Whether an index in the place of the axis of a running sum stands for all that this goes over in a block before
    it comes to it. What is known of it then holds for these."""
    if isinstance(image, Index) and (image.axis.extent, image.axis.size) == (axis.extent, axis.size):
        return True
    span, count = integer.bounds(substitute(e.args[1], {axis: image})), e.args[3]
    if span is None:
        return False
    if e.name in BACK:
        return (span[1] + 1) % BLOCK == 0 or isinstance(count, Const) and span[1] >= count.value - 1
    return span[0] % BLOCK == 0


def _is_plain(e: Expr, axis: Axis) -> bool:
    """Whether an expression has an axis in indices of loads alone, as it is or shifted: nothing is known by it."""
    if isinstance(e, Load):
        return all(t is index(axis) or axis not in free_axes(t) for i in e.index for t in integer.linear(i)[0])
    return not isinstance(e, Index) and all(_is_plain(c, axis) for c in children(e) if axis in free_axes(c))


# A running sum up to so many indices further, and what it is up to an index.
_NEIGHBOUR = {
    ("running", -1): "earlier",
    ("running_back", 1): "later",
    ("earlier", 1): "running",
    ("later", -1): "running_back",
}


def with_children(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node `e` over other children, as simple as can be; itself if they are its own."""
    if args == children(e):
        return e
    if isinstance(e, Reduce):
        return reduce(e.kind, e.axis, args[0], e.dtype)
    if isinstance(e, Load):
        return load(e.source, args, e.dtype)
    assert isinstance(e, Op)
    return op(e.name, *args, dtype=e.dtype)


def rewrite(e: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """`e` with `rule` applied to every node, children first; nodes that do not change are kept."""
    memo: dict[Expr, Expr] = {}
    for node in walk(e):
        memo[node] = rule(with_children(node, tuple(memo[c] for c in children(node))))
    return memo[e]
