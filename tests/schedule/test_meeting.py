"""Sums of rows that meet sums of columns in one result."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.unrun import explain


def qkv(seq: int = 96) -> list[Tensor]:
    return [torch.randn(1, 2, seq, 16) for _ in range(3)]


def decayed(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
    c = torch.nn.functional.logsigmoid(f).cumsum(-1)
    return (q @ k.mT + c[..., :, None] - c[..., None, :]).softmax(-1) @ v


def both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.sigmoid(q @ k.mT)
    return p @ v + p.mT @ v


def test_what_other_kernels_have_at_hand_is_left_to_them() -> None:
    """The gradient of decays: a sum where the queries' gradient is made, and one where the keys' is."""
    given = [t.requires_grad_() for t in (*qkv(), torch.randn(1, 2, 96))]
    _, backward = explain(decayed, *given).graphs
    rows, columns = ({s.name for s in kernel.stores} for kernel in backward.kernels)
    assert len(rows) >= 2 and len(columns) >= 3
    assert backward.schedule is not None
    returned = backward.schedule.regions[0].outputs
    shapes = [s.shape for kernel in backward.kernels for s in kernel.stores if s.name in returned]
    assert shapes.count((1, 2, 96)) == 2


def test_where_nothing_else_is_made_one_kernel_has_both() -> None:
    (forward,) = explain(both_ways, *qkv()).graphs
    (kernel,) = forward.kernels
    assert len(kernel.stores) == 1
