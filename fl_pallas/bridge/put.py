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
    lead, at = _neighbours(indices)
    before, size = x.shape[:lead], math.prod(x.shape[lead : lead + len(at)])
    rest = x.shape[lead + len(at) :]
    places = torch.broadcast_shapes(*(i.shape for i in at))
    if not at or x.numel() * math.prod(places) > MOST:
        return torch.ops.fl_pallas.put_sum.default(x, indices, values)
    place = torch.zeros((), dtype=torch.int64, device=x.device)
    for i, n in zip(at, x.shape[lead:]):
        place = place * n + torch.where(i < 0, i + n, i)
    values = values.expand(*before, *places, *rest).reshape(math.prod(before), 1, place.numel(), -1)
    is_there = place.reshape(-1, 1) == torch.arange(size, device=x.device).reshape(-1, 1, 1)
    wide = torch.float32 if x.dtype.is_floating_point and x.dtype.itemsize < 4 else x.dtype
    sums = torch.where(is_there, values.to(wide), 0).sum(2, dtype=wide)
    return (x + sums.reshape(x.shape)).to(x.dtype)


def _neighbours(indices: Sequence[Tensor | None]) -> tuple[int, list[Tensor]]:
    """How many dimensions come before those that are indexed, and the indices of these; none of them if they do not lie
    side by side, or there are masks."""
    given = [d for d, i in enumerate(indices) if i is not None]
    at = [i for i in indices if i is not None]
    whole = all(i.dtype in (torch.int64, torch.int32) for i in at)
    beside = bool(given) and given[-1] - given[0] + 1 == len(given)
    return (given[0], at) if whole and beside else (0, [])
