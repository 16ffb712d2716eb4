"""What expressions of positions alone come to, at some positions: to tell how much of something a mask leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

import numpy as np

from .dtype import is_float
from .expr import Axis, Const, Expr, Index, Op, Reduce, walk

Array = np.ndarray
_ONE: dict[str, Callable[..., Array]] = {
    "neg": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.round,
    "sign": np.sign, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "log1p": np.log1p,
    "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "not": np.invert, "isnan": np.isnan,
    "isinf": np.isinf,
}  # fmt: skip
_TWO: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "quotient": np.divide, "pow": np.power,
    "max": np.maximum, "min": np.minimum, "floordiv": np.floor_divide, "mod": np.mod, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "any": np.logical_or, "all": np.logical_and, "sum": np.add, "max": np.maximum, "min": np.minimum,
}  # fmt: skip
# Indices that are reduced one after the other, at most.
MAX_REDUCED = 64


def is_of_positions(e: Expr, given: Collection[Expr] = ()) -> bool:
    """Whether `at_positions` knows all that `e` is made of, but for what is given."""
    return all(
        isinstance(n, (Const, Index))
        or n in given
        or isinstance(n, Reduce) and n.kind in _REDUCTIONS and n.axis.extent <= MAX_REDUCED
        or isinstance(n, Op) and (n.name in _ONE or n.name in _TWO or n.name in ("select", "cast"))
        for n in walk(e)
    )  # fmt: skip


def at_positions(e: Expr, places: Mapping[Axis, Array]) -> Array:
    """`e`, for which `is_of_positions` holds, where its axes have these indices, which are broadcast.

    Floats are computed in 32 bits, and may differ from a kernel's in the last one.
    """

    @functools.cache
    def value(e: Expr) -> Array:
        if isinstance(e, Const):
            return np.asarray(e.value, _type(e.dtype))
        if isinstance(e, Index):
            return places[e.axis]
        if isinstance(e, Reduce):
            each = (at_positions(e.body, {**places, e.axis: np.asarray(n)}) for n in range(e.axis.extent))
            return functools.reduce(_REDUCTIONS[e.kind], each)
        assert isinstance(e, Op)
        args = [value(a) for a in e.args]
        if e.name == "select":
            return np.where(*args)
        return (args[0] if e.name == "cast" else (_ONE.get(e.name) or _TWO[e.name])(*args)).astype(_type(e.dtype))

    with np.errstate(all="ignore"):
        return value(e)


def _type(dtype: str) -> type:
    return np.float32 if is_float(dtype) else np.bool_ if dtype == "bool" else np.int64
