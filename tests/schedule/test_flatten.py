"""Sums over parts of rows, and over the rows of a part, are sums over all rows."""

from __future__ import annotations

import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import explain


def in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Chunks of queries as an axis of their own, which keys have not."""
    parts = q.unflatten(2, (4, -1)).permute(2, 0, 1, 3, 4)
    return (parts @ k.mT / 4).softmax(-1) @ v


def test_gradients_of_keys_are_sums_over_all_queries(device: torch.device) -> None:
    q, k, v = (torch.randn(2, 2, 64, 16, device=device) for _ in range(3))
    check_gradients(in_chunks, fl.compile(in_chunks, fallback="error"), (q, k, v))


def test_pytorch_adds_nothing_up(device: torch.device) -> None:
    told = explain(
        in_chunks,
        *(torch.randn(2, 8, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)),
    )
    backward = told.graphs[1]
    assert not any("sum" in name for name, _ in backward.left) and not backward.fallbacks
    assert [len(k) for k in backward.schedule.kernels] == [2]
