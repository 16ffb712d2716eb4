"""Log-probabilities of what labels pick of each row: neither pass stores those of all the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl

from .oracle import check_gradients
from .unrun import unrun

ROWS, CLASSES = 96, 400


def gathered(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """As losses of reinforcement learning read them."""
    return (h @ w.mT).log_softmax(-1).gather(-1, y[..., None]).squeeze(-1)


def weights(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return (h @ w.mT).softmax(-1).gather(-1, y[..., None]).squeeze(-1)


def three(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return (h @ w.mT).log_softmax(-1).gather(-1, torch.stack([y, y - 1, y // 2], -1))


def indexed(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    i = torch.arange(y.shape[-1], device=y.device)
    return (h @ w.mT).log_softmax(-1)[torch.arange(len(y), device=y.device)[:, None], i, y - CLASSES]


def added_up(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """The label of one row may be that of another: each has its own sum."""
    i = torch.arange(y.shape[-1], device=y.device)
    return (h[0] @ w.mT).tanh()[i[:, None], torch.stack([y[0], y[0], y[1]], -1)].sum(-1)


@pytest.mark.parametrize("fn", [gathered, weights, three, indexed, added_up])
def test_labels(fn: Callable[..., Tensor], device: torch.device) -> None:
    made = torch.Generator().manual_seed(0)
    h, w = torch.randn(2, ROWS, 16, generator=made), torch.randn(CLASSES, 16, generator=made)
    y = torch.randint(1, CLASSES, (2, ROWS), generator=made)
    inputs = [h.to(device), w.to(device), y.to(device)]
    with unrun():
        explained = fl.explain(fn, h.requires_grad_(), w.requires_grad_(), y)
    assert not explained.fallbacks
    assert not any({ROWS, CLASSES} <= {a.extent for a in s.axes} for p in explained.kernels for s in p.stores)
    check_gradients(fn, fl.compile(fn, fallback="error"), [x.detach() for x in inputs])
