"""The meaning of a Program, in numpy float64: what tests compare everything else with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fl_pallas.schedule.dtype import is_float
from fl_pallas.schedule.expr import Axis, Const, Expr, Index, Load, Op, Reduce
from fl_pallas.schedule.program import Program, Value

_OPS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "pow": np.power, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "rounded": np.asarray, "quotient": np.divide,
    "log": np.log, "log2": np.log2, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": np.vectorize(math.erf, otypes=[np.float64]), "floor": np.floor, "ceil": np.ceil, "round": np.round,
    "trunc": np.trunc, "sign": np.sign, "floordiv": np.floor_divide, "mod": np.mod, "isnan": np.isnan,
    "isinf": np.isinf, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "shl": np.left_shift, "shr": np.right_shift, "select": np.where,
    "uniform": lambda *words: _uniform(*words),
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "any": np.any, "all": np.all,
}  # fmt: skip
Scope = tuple[Axis, ...]


def _uniform(key: np.ndarray, first: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Philox2x32-7 of the counter (column, first + row); the upper 23 bits of its first word, as a number in [0, 1)."""
    key, a, b = (np.asarray(x % 2**32, np.uint64) for x in (key, column, first + row))
    for n in range(7):
        product = a * np.uint64(0xD256D193)
        bump = (key + np.uint64(n * 0x9E3779B9)) % np.uint64(2**32)
        a, b = (product >> np.uint64(32)) ^ bump ^ b, product % np.uint64(2**32)
    return (a >> np.uint64(9)) / 2**23


def storage(dtype: str) -> type:
    """The numpy type that stands for `dtype`: float64, int64 or bool."""
    return np.float64 if is_float(dtype) else np.bool_ if dtype == "bool" else np.int64


def evaluate(program: Program, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every value that has an expression, by name.

    Args:
      program: what to evaluate.
      feeds: an array for every input and extern value that a computed value reads.
    """
    known = {name: np.asarray(a) for name, a in feeds.items()}
    known = {n: a.astype(storage(program.by_name[n].dtype)) for n, a in known.items()}
    out: dict[str, np.ndarray] = {}
    for value in program.values:
        if value.expr is not None:
            out[value.name] = known[value.name] = evaluate_value(value, known)
    return out


def evaluate_value(value: Value, known: Mapping[str, np.ndarray]) -> np.ndarray:
    """One value, of its full shape, from the arrays of those it reads."""
    assert value.expr is not None
    with np.errstate(all="ignore"):
        array = _Evaluator(known).at(value.expr, value.axes)
    return np.broadcast_to(array, value.shape).astype(storage(value.dtype))


class _Evaluator:
    """Evaluates to arrays with one dimension per axis in scope, of extent 1 where nothing varies."""

    def __init__(self, known: Mapping[str, np.ndarray]):
        self.known = known
        self.memo: dict[tuple[Expr, Scope], np.ndarray] = {}

    def at(self, e: Expr, scope: Scope) -> np.ndarray:
        if (e, scope) not in self.memo:
            self.memo[e, scope] = self._compute(e, scope)
        return self.memo[e, scope]

    def _compute(self, e: Expr, scope: Scope) -> np.ndarray:
        if isinstance(e, Const):
            return np.full((1,) * len(scope), e.value, storage(e.dtype))
        if isinstance(e, Index):
            shape = [1] * len(scope)
            # The innermost binding of the axis is the one meant.
            shape[len(scope) - 1 - scope[::-1].index(e.axis)] = e.axis.extent
            return np.arange(e.axis.extent).reshape(shape)
        if isinstance(e, Load):
            source = self.known[e.source]
            assert len(e.index) == source.ndim, e
            # The branch of a select that is not taken may read out of range.
            where = tuple(np.clip(self.at(i, scope), 0, n - 1) for i, n in zip(e.index, source.shape))
            return source[where] if where else source.reshape((1,) * len(scope))
        if isinstance(e, Reduce):
            body = self.at(e.body, (*scope, e.axis))
            full = np.broadcast_to(body, (*body.shape[:-1], e.axis.extent))
            return _REDUCTIONS[e.kind](full, axis=-1).astype(storage(e.dtype))
        assert isinstance(e, Op), e
        args = [self.at(a, scope) for a in e.args]
        if e.name == "cast":
            return args[0].astype(storage(e.dtype))
        if e.name in ("and", "or", "xor", "not", "select"):
            assert args[0].dtype == np.bool_ or e.name != "select", e
        return _OPS[e.name](*args).astype(storage(e.dtype))
