"""A tensor as a function of its indices: what the rules take and give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from ..errors import Unsupported
from ..schedule import build
from ..schedule.dtype import is_float
from ..schedule.expr import Axis, Expr, const
from .dtypes import short_dtype, torch_dtype

Number = bool | int | float
Indices = tuple[Expr, ...]
At = Callable[[Indices], Expr]

ZERO = const(0, "i64")
_fresh = itertools.count()


@dataclass(frozen=True)
class Spec:
    """What PyTorch says of a result: its shape and the short name of its type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tensor(Spec):
    """A tensor whose element at `idx` (one integer expression per dimension) is `at(idx)`.

    Attributes:
      whole: of integers that are made of indices alone, the same in terms of those; None for others.
    """

    at: At
    whole: At | None = None


Operand = Tensor | Number


def fresh_axis(extent: int) -> Axis:
    """An axis to reduce over, distinct from all others (`build.reduce` gives it its final name)."""
    if extent == 0:
        raise Unsupported("reduction", "empty tensor")
    return Axis(f"%k{next(_fresh)}", extent)


def constant(value: Number, dtype: str) -> Expr:
    """A Python number as a constant of `dtype`."""
    if is_float(dtype):
        return const(float(value), dtype)
    return build.cast(const(value, "f64" if isinstance(value, float) else "i64"), dtype)


def element(x: Operand, idx: Indices, dtype: str | None = None) -> Expr:
    """The element of `x`, broadcast from the right to the dimensions of `idx`, as `dtype` (default: its own)."""
    if not isinstance(x, Tensor):
        return constant(x, dtype or short_dtype(torch.result_type(x, x)) or "f32")
    kept = idx[len(idx) - len(x.shape) :]
    e = x.at(tuple(ZERO if n == 1 else i for n, i in zip(x.shape, kept)))
    return build.cast(e, dtype or x.dtype)


def common_dtype(a: Operand, b: Operand) -> str:
    """The type PyTorch computes in when `a` meets `b`."""

    def stand_in(x: Operand) -> torch.Tensor | Number:
        if not isinstance(x, Tensor):
            return x
        return torch.empty((1,) * len(x.shape), dtype=torch_dtype(x.dtype), device="meta")

    return short_dtype(torch.result_type(stand_in(a), stand_in(b))) or "f32"


def normal_dims(dim: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """`dim` as sorted non-negative dimensions of a tensor of this rank; None and [] mean all."""
    dims = (dim,) if isinstance(dim, int) else dim
    if not dims:
        return tuple(range(rank))
    return tuple(sorted({d % rank for d in dims})) if rank else ()


def integer(name: str, a: Expr, b: Expr | int) -> Expr:
    """Index arithmetic: `name` (add, sub, mul, floordiv, mod or a comparison) on `a` and `b`."""
    right = const(b, "i64") if isinstance(b, int) else b
    return build.op(name, a, right, dtype="bool" if name in build.COMPARISONS else "i64")


def every(*tests: Expr) -> Expr:
    """Whether all tests hold."""
    return reduce(lambda a, b: build.op("and", a, b, dtype="bool"), tests, build.TRUE)


def within(i: Expr, extent: int) -> Expr:
    """0 <= i < extent."""
    return every(integer("ge", i, 0), integer("lt", i, extent))


def replaced(idx: Indices, dim: int, i: Expr) -> Indices:
    """`idx` with the index of one dimension (non-negative) replaced."""
    return (*idx[:dim], i, *idx[dim + 1 :])
