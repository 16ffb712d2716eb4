"""Decays between projections (RetNet) and biases of tables (HSTU): what regions end with, and what kernels take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import explain

pytestmark = pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")


def retention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wg: Tensor, wo: Tensor, decay: Tensor) -> Tensor:
    """x [b,n,c], weights [c,·], decay [h], the logarithms; the parallel form, a row's decays divided by their sum."""
    q, k, v = ((x @ w).unflatten(-1, (len(decay), -1)).transpose(1, 2) for w in (wq, wk, wv))
    i = torch.arange(x.shape[1], device=x.device)
    gap = (i[:, None] - i).to(x.dtype)
    mask = torch.exp(torch.where(gap >= 0, gap, float("inf")) * decay[:, None, None])
    mask = mask / mask.sum(-1, keepdim=True).sqrt()
    scores = q @ k.mT * mask.to(q.dtype)
    scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
    y = (scores @ v).transpose(1, 2)
    y = F.layer_norm(y, y.shape[-1:]).flatten(2)
    return (F.silu(x @ wg) * y) @ wo


def weights(n: int, c: int) -> list[Tensor]:
    torch.manual_seed(n)
    made = [torch.randn(2, n, c), *(torch.randn(c, m * c) / c**0.5 for m in (1, 1, 2, 2)), torch.randn(2 * c, c)]
    return [*made, -(2.0 ** -torch.arange(3, 7).float())]


def test_a_region_ends_with_its_scores() -> None:
    """Rows of decays have sums of their own; their heads do not take the output's projection along."""
    args = [x.bfloat16().requires_grad_() for x in weights(1024, 256)]
    found = explain(retention, *args)
    assert [len(g.kernels) for g in found.graphs] and found.graphs[0].kernels and found.graphs[1].kernels
    assert not found.fallbacks


@pytest.mark.parametrize("n", [35, 150])
def test_retention(n: int, device: torch.device) -> None:
    args = [x.to(device).requires_grad_() for x in weights(n, 32)]
    check_gradients(retention, fl.compile(retention, dynamic=False), args)


def biased(q: Tensor, k: Tensor, v: Tensor, times: Tensor, table: Tensor, places: Tensor) -> Tensor:
    """q, k, v [b,n,h,d], times [b,n], a table of buckets of time and one of distances, both for all heads (HSTU)."""
    n = q.shape[1]
    i = torch.arange(n, device=q.device)
    gap = (times[:, :, None] - times[:, None]).abs().clamp(min=1).float()
    bias = places[i - i[:, None] + len(places) // 2] + table[(gap.log() / 0.301).long().clamp(0, len(table) - 1)]
    scores = F.silu(torch.einsum("bnhd,bmhd->bhnm", q, k) / 4 + bias[:, None]) / n
    return torch.einsum("bhnm,bmhd->bnhd", scores.tril(), v)


def tables(n: int, reach: int, buckets: int) -> list[Tensor]:
    torch.manual_seed(n)
    times = torch.randint(0, 40, (2, n)).cumsum(1)
    return [*(torch.randn(2, n, 4, 16) for _ in range(3)), times, torch.randn(buckets), torch.randn(2 * reach - 1)]


def test_places_that_a_sequence_has_not_take_no_time() -> None:
    """Of 8191 distances 2047 are between 1024 tokens: by an estimate of all, PyTorch had both passes."""
    args = [x.bfloat16().requires_grad_() if x.is_floating_point() else x for x in tables(1024, 4096, 65)]
    found = explain(biased, *args)
    assert [bool(g.kernels) for g in found.graphs] == [True, True]


@pytest.mark.parametrize("n", [35, 90])
def test_tables_for_all_heads(n: int, device: torch.device) -> None:
    args = [x.to(device) for x in tables(n, 100, 9)]
    args = [x.requires_grad_(x.is_floating_point()) for x in args]
    check_gradients(biased, fl.compile(biased, dynamic=False), args)
