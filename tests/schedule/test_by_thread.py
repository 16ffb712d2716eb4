"""Sums of elements over a loop, for two parallel axes: each thread has its own, and neighbours are loaded together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels.cubin import compile_ttir
from fl_pallas.schedule.plan import is_by_thread
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check_gradients, run_and_check


def messages(nodes: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    """Gated sums over neighbours: nodes [i, d], others [j, d], weights [i, j]."""
    return (weights[:, :, None] * torch.relu(nodes[:, None] + others)).sum(1)


def largest_message(nodes: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, :, None] * torch.relu(nodes[:, None] + others)).amax(1)


def causal_messages(nodes: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    i = torch.arange(len(nodes), device=nodes.device)
    seen = i[:, None] >= torch.arange(len(others), device=nodes.device)
    return torch.where(seen[:, :, None], weights[:, :, None] * torch.tanh(nodes[:, None] + others), 0).sum(1)


def inputs(n: int, m: int, d: int, dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    return [torch.randn(*shape, device=device).to(dtype) for shape in ((n, d), (m, d), (n, m))]


@pytest.mark.parametrize("fn", [messages, largest_message, causal_messages])
@pytest.mark.parametrize(("sizes", "dtype"), [((40, 50, 24), torch.float32), ((70, 300, 64), torch.bfloat16)])
def test_right(
    fn: Callable[..., Tensor], sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    given = inputs(*sizes, dtype, device)
    run_and_check(fn, fl.compile(fn), given)
    check_gradients(fn, fl.compile(fn), given)


def test_threads_exchange_nothing() -> None:
    kernels = [
        k
        for k in kernels_made(messages, inputs(512, 512, 64, torch.bfloat16, "cpu"))
        if any(is_by_thread(k[0], loop) for loop in k[0].loops)
    ]
    assert kernels
    for plan, lower in kernels:
        cubin = compile_ttir(lower(plan), 90)
        assert "shfl" not in cubin.asm["ptx"] and cubin.stack == 0
