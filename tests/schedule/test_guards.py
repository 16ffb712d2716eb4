"""What is 0 by choice is 0, whatever it would be: `where(t > 0, p * t.log(), 0)` is how users keep NaN out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check

S = 37
CAUSAL = torch.ones(S, S).tril().bool()


def cross_entropy(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return -torch.where(t > 0, (q @ k.mT / 4).softmax(-1) * t.log(), 0.0).sum(-1)


def weighed(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.where(t > 0, (q @ k.mT / 4).softmax(-1) / t, 0.0) @ v


def divergence(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Of given scores, masked, from a causal softmax: its mask is the one that guards."""
    causal = CAUSAL.to(q.device)
    given = t.masked_fill(~causal, -math.inf).log_softmax(-1).clone()
    p = (q @ k.mT / 4).masked_fill(~causal, -math.inf).softmax(-1)
    return -(p * given).masked_fill(~causal, 0.0).sum(-1)


def above_the_mean(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Guarded by the condition of the weights themselves, and by another."""
    p = (q @ k.mT / 4).masked_fill(t == 0, -math.inf).softmax(-1)
    return torch.where((t > 0) & (t < 0.6), p.pow(2) * t.rsqrt(), 0.0) @ v


def of_given_logarithms(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.where(t.isfinite(), (q @ k.mT / 4).softmax(-1) * t, 0.0) @ v


@pytest.mark.parametrize("fn", [cross_entropy, weighed, divergence, above_the_mean, of_given_logarithms])
def test_a_guarded_infinity(fn: Callable[..., Tensor], device: torch.device) -> None:
    """Of what the kernel computes, and of what it is given; and in gradients."""
    inputs = [torch.randn(S, 16, device=device) for _ in range(3)]
    t = torch.rand(S, S, device=device).clamp(min=0.3) - 0.3
    t = t.log() if fn is of_given_logarithms else t
    assert not fn(*inputs, t).isnan().any()
    run_and_check(fn, fl.compile(fn), [*inputs, t], name=fn.__name__)

    def of_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fn(q, k, v, t)

    check_gradients(of_others, fl.compile(of_others), inputs, name=fn.__name__)
