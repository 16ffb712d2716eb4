"""Sequences so short that what kernels would store between them is larger than the scores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import explain


def table(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Tensor) -> Tensor:
    """Swin's and BEiT's: bias [places, heads], at [n, n]; each row would be summed up at each of the places."""
    return (q @ k.mT / 4 + bias[at.flatten()].view(*at.shape, -1).permute(2, 0, 1)).softmax(-1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """VITS's: vectors [2 · w + 1, d] of the distances within a window, padded, and turned to rows by a view; the
    weights are returned."""
    n, w = q.shape[-2], keys.shape[0] // 2
    by_row = F.pad(q @ F.pad(keys, (0, 0, n - w - 1, n - w - 1)).mT, (0, 1)).flatten(-2)
    scores = q @ k.mT / 4 + F.pad(by_row, (0, n - 1)).unflatten(-1, (n + 1, 2 * n - 1))[..., :n, n - 1 :]
    p = scores.softmax(-1)
    by_distance = F.pad(F.pad(p, (0, n - 1)).flatten(-2), (n, 0)).unflatten(-1, (n, 2 * n))[..., 1:]
    return p @ v + by_distance @ F.pad(values, (0, 0, n - w - 1, n - w - 1)), p


def capped_groups(qkv: Tensor) -> Tensor:
    """A number of a row is multiplied by two constants, one around the other; one went over to where it is stored."""
    batch, length, _ = qkv.shape
    q, k, v = (t.view(batch, length, -1, 8).transpose(1, 2) for t in qkv.split((32, 16, 16), -1))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.tanh(q @ k.mT * 8**-0.5 / 5) * 5
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 32)


def table_inputs(n: int) -> tuple[Tensor, ...]:
    return *(torch.randn(2, 2, n, 16) for _ in range(3)), torch.randn(124, 2), torch.randint(0, 124, (n, n))


def windowed_inputs(n: int) -> tuple[Tensor, ...]:
    return *(torch.randn(2, 2, n, 16) for _ in range(3)), torch.randn(9, 16), torch.randn(9, 16)


def capped_inputs(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, n, 64),)


CASES = {
    "table": (table, table_inputs),
    "windowed": (windowed, windowed_inputs),
    "capped_groups": (capped_groups, capped_inputs),
}


@pytest.mark.parametrize("n", [20, 37, 50])
@pytest.mark.parametrize("name", CASES)
def test_both_passes_are_fused(name: str, n: int) -> None:
    fn, make = CASES[name]
    inputs = tuple(t.requires_grad_(t.is_floating_point()) for t in make(n))
    forward, backward = explain(fn, *inputs).graphs
    assert forward.kernels and backward.kernels
    assert not any(f.what == "aten.bmm.default" for f in (*forward.fallbacks, *backward.fallbacks))


@pytest.mark.filterwarnings("ignore::fl_pallas.errors.FallbackWarning")
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, device: torch.device) -> None:
    fn, make = CASES[name]
    torch.manual_seed(0)
    inputs = tuple(t.to(device) for t in make(37))
    check_gradients(fn, fl.compile(fn), inputs, name=name)
