"""What PyTorch itself has no functional form of, and what it cannot trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain


def without_oneself(x: Tensor) -> Tensor:
    scores = x @ x.mT
    scores.fill_diagonal_(float("-inf"))
    return scores.softmax(-1) @ x


def wrapped(x: Tensor) -> Tensor:
    """A tall matrix, whose diagonal begins again below the square."""
    scores = x @ x[:13].mT
    return scores.fill_diagonal_(-3.0, wrap=True).softmax(-1) @ x[:13]


def dilated(x: Tensor) -> Tensor:
    """Heads see every first, second, fourth and eighth key: powers of integers."""
    step = 2 ** torch.arange(4, device=x.device)[:, None, None]
    i = torch.arange(x.shape[-2], device=x.device)
    keep = ((i[:, None] - i) % step == 0) & (i[:, None] >= i)
    return torch.where(keep, x @ x.mT, float("-inf")).softmax(-1) @ x


def of_three_features(x: Tensor) -> Tensor:
    """A kernel for each of few features, multiplied: one of them may be 0."""
    apart = (x[:, None, :3] - x[:, :3]).abs()
    return torch.relu(1 - apart / 2).prod(-1) @ x + torch.prod(apart, 2, keepdim=True).mean(1)


@pytest.mark.parametrize("fn", [without_oneself, wrapped, dilated, of_three_features])
def test_fused(fn: Callable[[Tensor], Tensor], device: torch.device) -> None:
    compiled = fl.compile(fn, fallback="error")
    x = torch.randn(100, 8, device=device)
    run_and_check(fn, compiled, (x,), name="diagonal")
    check_gradients(fn, compiled, (x,))
    assert explain(fn, x).kernel_count == 1


def test_powers_of_integers(device: torch.device) -> None:
    """Negative ones too: 0, but for those of 1 and -1."""
    base = torch.tensor([-3, -1, 1, 2, 7], device=device)
    power = torch.tensor([-3, -2, 0, 1, 5, 11], device=device)

    def fn(q: Tensor, k: Tensor) -> Tensor:
        return ((base[:, None] ** power) * (q @ k.mT)).softmax(-1) @ k

    inputs = torch.randn(5, 4, device=device), torch.randn(6, 4, device=device)
    run_and_check(fn, fl.compile(fn, fallback="error"), inputs, name="powers")


def test_what_cannot_be_traced(device: torch.device) -> None:
    """PyTorch has no functional form of polygamma_: it runs the graph, and the warning says why."""

    def fn(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).abs().add(1).polygamma_(1).softmax(-1) @ k

    q, k = torch.randn(40, 8, device=device), torch.randn(50, 8, device=device)
    with pytest.warns(fl.FallbackWarning, match="PyTorch cannot trace it.*polygamma_"):
        torch.testing.assert_close(fl.compile(fn)(q, k), fn(q, k))
    with pytest.raises(fl.Unsupported, match="cannot trace"):
        fl.compile(fn, fallback="error")(q, k)
