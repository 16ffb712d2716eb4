"""Tensors made from indices (ranges, fills, triangles), and tensors read at data-dependent indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import Unsupported
from ..schedule import build
from ..schedule.dtype import is_float
from ..schedule.expr import Expr
from .tensor import At, Indices, Number, Spec, Tensor, constant, element, integer, replaced

aten, prims = torch.ops.aten, torch.ops.prims


def _progression(out: Spec, start: Number, step: Number) -> At:
    """start + step · index, in the result's type."""
    if not is_float(out.dtype) and not (isinstance(start, int) and isinstance(step, int)):
        raise Unsupported("aten.arange", "an integer range with fractional bounds")

    def at(idx: Indices) -> Expr:
        scaled = build.op("mul", build.cast(idx[0], out.dtype), constant(step, out.dtype), dtype=out.dtype)
        return build.op("add", scaled, constant(start, out.dtype), dtype=out.dtype)

    return at


def _filled(out: Spec, value: Number) -> At:
    return lambda idx: constant(value, out.dtype)


def _triangle(comparison: str) -> Callable[..., At]:
    def rule(out: Spec, x: Tensor, diagonal: int = 0) -> At:
        def at(idx: Indices) -> Expr:
            kept = integer(comparison, integer("sub", idx[-1], idx[-2]), diagonal)
            return build.select(kept, x.at(idx), constant(0, out.dtype))

        return at

    return rule


def _eye(out: Spec, *_: Any, **__: Any) -> At:
    return lambda idx: build.cast(integer("eq", idx[0], idx[1]), out.dtype)


def position(index: Tensor, idx: Indices) -> Expr:
    """The element of an index tensor, broadcast to the dimensions of `idx`."""
    if index.dtype in ("bool", "u8"):
        raise Unsupported("aten.index", "a mask as an index: its shape depends on data")
    return element(index, idx, "i64")


def _index(out: Spec, x: Tensor, indices: Sequence[Tensor | None]) -> At:
    """x[indices]: None keeps a dimension; the index tensors, broadcast together, replace the others.

    Their common dimensions stand where the first index tensor stood, or first of all when the
    index tensors are not neighbours.
    """
    given = {d: t for d, t in enumerate(indices) if t is not None}
    lead, extents = index_dims(given)
    rank = len(extents)

    def at(idx: Indices) -> Expr:
        where, rest = idx[lead : lead + rank], iter((*idx[:lead], *idx[lead + rank :]))
        return x.at(
            tuple(wrapped(position(given[d], where), n) if d in given else next(rest) for d, n in enumerate(x.shape))
        )

    return at


def index_dims(given: Mapping[int, Tensor]) -> tuple[int, tuple[int, ...]]:
    """Where the common dimensions of index tensors stand in what is read at them, and their extents."""
    lead = min(given) if max(given) - min(given) + 1 == len(given) else 0
    return lead, tuple(torch.broadcast_shapes(*(t.shape for t in given.values())))


def wrapped(i: Expr, extent: int) -> Expr:
    """A position that may count from the end, counted from the front."""
    return build.select(integer("lt", i, 0), integer("add", i, extent), i)


def _gather(out: Spec, x: Tensor, dim: int, index: Tensor, **_: Any) -> At:
    if not x.shape:
        return lambda idx: x.at(())
    d = dim % len(x.shape)
    return lambda idx: x.at(replaced(idx, d, position(index, idx)))


def _index_select(out: Spec, x: Tensor, dim: int, index: Tensor) -> At:
    if not x.shape:
        return lambda idx: x.at(())
    d = dim % len(x.shape)
    return lambda idx: x.at(replaced(idx, d, position(index, (idx[d],))))


def _embedding(out: Spec, weight: Tensor, indices: Tensor, *_: Any) -> At:
    return lambda idx: weight.at((position(indices, idx[:-1]), idx[-1]))


_EMPTY = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
_ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros)

RULES: dict[Any, Callable[..., Any]] = {
    # Any value serves for the elements of an empty tensor.
    **dict.fromkeys((*_ZEROS, *_EMPTY), lambda out, *_, **__: _filled(out, 0)),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), lambda out, *_, **__: _filled(out, 1)),
    **dict.fromkeys((aten.full_like, aten.full), lambda out, _, value, **__: _filled(out, value)),
    aten.fill: lambda out, x, value: lambda idx: element(value, idx, out.dtype),
    aten.new_full: lambda out, x, size, value, **_: _filled(out, value),
    aten.scalar_tensor: lambda out, value, **_: _filled(out, value),
    aten.arange.default: lambda out, end, **_: _progression(out, 0, 1),
    aten.arange.start: lambda out, start, end, **_: _progression(out, start, 1),
    aten.arange.start_step: lambda out, start, end, step=1, **_: _progression(out, start, step),
    prims.iota.default: lambda out, length, *, start, step, **_: _progression(out, start, step),
    aten.tril: _triangle("le"),
    aten.triu: _triangle("ge"),
    aten.eye: _eye,
    aten.index: _index,
    aten._unsafe_index: _index,
    aten.gather: _gather,
    aten.index_select: _index_select,
    aten.embedding: _embedding,
}
