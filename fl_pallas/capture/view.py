"""Views and copies as index arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..schedule import build
from ..schedule.expr import Expr, const
from .tensor import (
    ZERO,
    At,
    Indices,
    Number,
    Spec,
    Tensor,
    constant,
    element,
    every,
    integer,
    normal_dims,
    replaced,
    within,
)

aten = torch.ops.aten


def regroup(shape: Sequence[int], idx: Indices, into: Sequence[int]) -> Indices:
    """Indices into a tensor of shape `into` of the element at `idx` of its row-major reshape to `shape`.

    Dimensions are matched in the smallest groups of equal product, so only those that are really
    split or joined meet a division.
    """
    source = ((n, i) for n, i in zip(shape, idx) if n != 1)
    targets = [d for d, n in enumerate(into) if n != 1]
    found: dict[int, Expr] = {}
    while targets:
        group = [targets.pop(0)]
        size = into[group[0]]
        extent, flat = next(source)
        while extent != size:
            if extent < size:
                n, i = next(source)
                extent, flat = extent * n, integer("add", integer("mul", flat, n), i)
            else:
                group.append(targets.pop(0))
                size *= into[group[-1]]
        for d in group:
            size //= into[d]
            quotient = integer("floordiv", flat, size)
            found[d] = quotient if d == group[0] else integer("mod", quotient, into[d])
    return tuple(found.get(d, ZERO) for d in range(len(into)))


def _reshape(out: Spec, x: Tensor, *_: Any) -> At:
    return lambda idx: x.at(regroup(out.shape, idx, x.shape))


def _broadcast(out: Spec, x: Tensor, *_: Any, **__: Any) -> At:
    """The same elements, broadcast to the result's shape and cast to its type."""
    return lambda idx: element(x, idx, out.dtype)


def _permute(out: Spec, x: Tensor, dims: Sequence[int]) -> At:
    order = [d % len(x.shape) for d in dims]
    return lambda idx: x.at(tuple(idx[order.index(d)] for d in range(len(order))))


def _transpose(out: Spec, x: Tensor, a: int = 0, b: int = 1) -> At:
    if len(x.shape) < 2:
        return x.at
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return _permute(out, x, order)


def _strided(x: Tensor, dim: int, start: int, step: int = 1) -> At:
    """Elements start, start + step, … along `dim`."""
    d = dim % len(x.shape)
    return lambda idx: x.at(replaced(idx, d, integer("add", integer("mul", idx[d], step), start)))


def _slice(out: Spec, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> At:
    return _strided(x, dim, slice(start, end).indices(x.shape[dim])[0], step)


def _select(out: Spec, x: Tensor, dim: int, position: int) -> At:
    d, i = dim % len(x.shape), const(position % x.shape[dim], "i64")
    return lambda idx: x.at((*idx[:d], i, *idx[d:]))


def _split(outs: tuple[Spec, ...], x: Tensor, _: Any, dim: int = 0) -> tuple[At, ...]:
    sizes = [out.shape[dim] for out in outs]
    return tuple(_strided(x, dim, sum(sizes[:k])) for k in range(len(sizes)))


def _unbind(outs: tuple[Spec, ...], x: Tensor, dim: int = 0) -> tuple[At, ...]:
    return tuple(_select(out, x, dim, k) for k, out in enumerate(outs))


def _chain(pieces: list[tuple[int, At]], dim: int) -> At:
    """Pieces one after another along `dim`: (extent, element at an index counted within the piece)."""

    def at(idx: Indices) -> Expr:
        i, end = idx[dim], sum(n for n, _ in pieces)
        out: Expr | None = None
        for n, piece in reversed(pieces):
            e = piece(replaced(idx, dim, integer("sub", i, end - n)))
            out = e if out is None else build.select(integer("lt", i, end), e, out)
            end -= n
        assert out is not None
        return out

    return at


def _cat(out: Spec, tensors: Sequence[Tensor], dim: int = 0) -> At:
    d = dim % len(out.shape)
    # An empty tensor adds nothing, and may even have another rank.
    return _chain([(t.shape[d], _broadcast(Spec(t.shape, out.dtype), t)) for t in tensors if t.numel], d)


def _stack(out: Spec, tensors: Sequence[Tensor], dim: int = 0) -> At:
    d = dim % len(out.shape)

    def layer(t: Tensor) -> At:
        return lambda idx: element(t, (*idx[:d], *idx[d + 1 :]), out.dtype)

    return _chain([(1, layer(t)) for t in tensors], d)


def _pad(out: Spec, x: Tensor, pad: Sequence[int], value: Number = 0) -> At:
    def at(idx: Indices) -> Expr:
        moved = list(idx)
        dims = [len(idx) - 1 - k for k in range(len(pad) // 2)]
        for d, before in zip(dims, pad[::2]):
            moved[d] = integer("sub", idx[d], before)
        inside = every(*(within(moved[d], x.shape[d]) for d in dims))
        return build.select(inside, x.at(tuple(moved)), constant(value, out.dtype))

    return at


def _flip(out: Spec, x: Tensor, dims: Sequence[int]) -> At:
    flipped = {d % len(x.shape) for d in dims}
    last = [const(n - 1, "i64") for n in x.shape]
    return lambda idx: x.at(tuple(integer("sub", last[d], i) if d in flipped else i for d, i in enumerate(idx)))


def _roll(out: Spec, x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> At:
    if not dims:
        rolled = _roll(Spec((x.numel,), x.dtype), flattened(x), shifts, (0,))
        return lambda idx: rolled(regroup(out.shape, idx, (x.numel,)))
    at = x.at
    for shift, dim in zip(shifts, dims):
        at = _rolled(at, dim % len(x.shape), -shift % x.shape[dim], x.shape[dim])
    return at


def _rolled(at: At, d: int, ahead: int, extent: int) -> At:
    return lambda idx: at(replaced(idx, d, integer("mod", integer("add", idx[d], ahead), extent)))


def flattened(x: Tensor) -> Tensor:
    """`x` as a one-dimensional tensor."""
    return Tensor((x.numel,), x.dtype, lambda idx: x.at(regroup((x.numel,), idx, x.shape)))


def _repeat(out: Spec, x: Tensor, repeats: Sequence[int]) -> At:
    lead = len(repeats) - len(x.shape)
    return lambda idx: x.at(tuple(integer("mod", i, n) for i, n in zip(idx[lead:], x.shape)))


def _repeat_interleave(out: Spec, x: Tensor, repeats: int, dim: int | None = None, **_: Any) -> At:
    y = flattened(x) if dim is None else x
    d = (dim or 0) % len(y.shape)
    return lambda idx: y.at(replaced(idx, d, integer("floordiv", idx[d], repeats)))


def _unfold(out: Spec, x: Tensor, dim: int, size: int, step: int) -> At:
    d = dim % len(x.shape)
    return lambda idx: x.at(replaced(idx[:-1], d, integer("add", integer("mul", idx[d], step), idx[-1])))


def _diagonal(out: Spec, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> At:
    first, second = dim1 % len(x.shape), dim2 % len(x.shape)

    def at(idx: Indices) -> Expr:
        ends = {
            first: integer("add", idx[-1], max(-offset, 0)),
            second: integer("add", idx[-1], max(offset, 0)),
        }
        rest = iter(idx[:-1])
        return x.at(tuple(ends[d] if d in ends else next(rest) for d in range(len(x.shape))))

    return at


def _slice_scatter(
    out: Spec, x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> At:
    d = dim % len(x.shape)
    first, stop, _ = slice(start, end).indices(x.shape[d])

    def at(idx: Indices) -> Expr:
        i = integer("sub", idx[d], first)
        inside = every(integer("ge", i, 0), integer("lt", idx[d], stop), integer("eq", integer("mod", i, step), 0))
        put = element(src, replaced(idx, d, integer("floordiv", i, step)), out.dtype)
        return build.select(inside, put, x.at(idx))

    return at


def _select_scatter(out: Spec, x: Tensor, src: Tensor, dim: int, position: int) -> At:
    (d,) = normal_dims(dim, len(x.shape))

    def at(idx: Indices) -> Expr:
        here = integer("eq", idx[d], position % x.shape[d])
        return build.select(here, element(src, (*idx[:d], *idx[d + 1 :]), out.dtype), x.at(idx))

    return at


def _diagonal_scatter(out: Spec, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> At:
    first, second = dim1 % len(x.shape), dim2 % len(x.shape)

    def at(idx: Indices) -> Expr:
        here = integer("eq", integer("sub", idx[second], idx[first]), offset)
        along = idx[first] if offset >= 0 else idx[second]
        rest = tuple(i for d, i in enumerate(idx) if d not in (first, second))
        return build.select(here, element(src, (*rest, along), out.dtype), x.at(idx))

    return at


def _in_zeros(scatter: Callable[..., At]) -> Callable[..., At]:
    """The gradient of a part of a tensor, which is put into zeros."""

    def put(out: Spec, gradient: Tensor, _: Sequence[int], *place: Any) -> At:
        zeros = Tensor(out.shape, out.dtype, lambda idx: constant(0, out.dtype))
        return scatter(out, zeros, gradient, *place)

    return put


_RESHAPES = (aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.unsqueeze, aten.squeeze)
_COPIES = (
    aten.expand, aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh, aten.lift_fresh_copy,
    aten._to_copy, aten.positive,
)  # fmt: skip

RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_COPIES, _broadcast),
    **dict.fromkeys((aten.transpose, aten.t, aten.numpy_T), _transpose),
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes), _split),
    aten.copy: lambda out, x, src, non_blocking=False: _broadcast(out, src),
    aten.permute: _permute,
    aten.slice: _slice,
    aten.select: _select,
    aten.unbind: _unbind,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.constant_pad_nd: _pad,
    aten.flip: _flip,
    aten.roll: _roll,
    aten.repeat: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.unfold: _unfold,
    aten.diagonal: _diagonal,
    aten.slice_scatter: _slice_scatter,
    aten.select_scatter: _select_scatter,
    aten.diagonal_scatter: _diagonal_scatter,
    aten.slice_backward: _in_zeros(_slice_scatter),
    aten.select_backward: _in_zeros(_select_scatter),
    aten.diagonal_backward: _in_zeros(_diagonal_scatter),
}
