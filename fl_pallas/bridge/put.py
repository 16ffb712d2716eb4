"""What is added up by position (the gradient of a table of biases), in the same order each time.

Inductor would take atomic operations: in whatever order they come, and in 16 bits where the numbers have them (2.11,
from sm_90 on: the gradient of a table of nine biases was 3 % off, PyTorch's own 0.5 %).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Up to so many comparisons of a position with a table's entries, each entry has a sum over all positions; beyond,
# PyTorch sorts the positions, which takes long where there are few different ones.
MOST = 2**31


@torch.library.custom_op(
    "fl_pallas::put_sum", mutates_args=(), schema="(Tensor x, Tensor?[] indices, Tensor values) -> Tensor"
)
def put_sum(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    """`x` with `values` added at `indices`, of which several may be the same: PyTorch's own."""
    return aten.index_put(x, indices, values, accumulate=True)


@put_sum.register_fake
def _(x: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    return torch.empty_like(x)


def by_sums(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions for Inductor, with that of `index_put` that adds up."""
    return {**table, aten.index_put.default: _put, aten._unsafe_index_put.default: _put}


def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    if not accumulate:
        return NotImplemented
    at = _first_dimensions(indices)
    size, rest = math.prod(x.shape[: len(at)]), x.shape[len(at) :]
    if not at or size * math.prod(torch.broadcast_shapes(*(i.shape for i in at))) * math.prod(rest) > MOST:
        return torch.ops.fl_pallas.put_sum.default(x, indices, values)
    place = torch.zeros((), dtype=torch.int64, device=x.device)
    for i, n in zip(at, x.shape):
        place = place * n + torch.where(i < 0, i + n, i)
    values = values.expand(*place.shape, *rest).reshape(1, place.numel(), -1)
    is_there = place.reshape(-1, 1) == torch.arange(size, device=x.device).reshape(-1, 1, 1)
    wide = torch.float32 if x.dtype.is_floating_point and x.dtype.itemsize < 4 else x.dtype
    sums = torch.where(is_there, values.to(wide), 0).sum(1, dtype=wide)
    return (x + sums.reshape(x.shape)).to(x.dtype)


def _first_dimensions(indices: Sequence[Tensor | None]) -> list[Tensor]:
    """The indices of a tensor's first dimensions; none if there are of other ones, or masks."""
    given = [i for i in indices if i is not None]
    are_first = all(i is not None for i in indices[: len(given)])
    return given if are_first and all(i.dtype in (torch.int64, torch.int32) for i in given) else []
