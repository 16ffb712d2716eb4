"""Scores that a loop of many steps refines: each step is read several times by the next, and is planned once.

A pass that looked at an expression as at a tree would take a time that doubles with each step, and end none of these.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule import build

from .oracle import check_gradients
from .unrun import unrun

STEPS = 16


def sines(s: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        s = s + 0.1 * torch.sin(s)
    return s.softmax(-1)


def choices(s: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        s = torch.where(s > 0, s * 0.9, s * 1.1 - 0.01 * s.abs())
    return s.softmax(-1)


def extremes(s: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        s = torch.maximum(s, -s * 0.5) - 0.1 * torch.minimum(s, s * 0.2)
    return s.softmax(-1)


def ratios(s: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        s = s / (1 + 0.01 * s * s) - 0.1 * (s + 1) / (2 + s.abs())
    return s.softmax(-1)


def polynomials(s: Tensor, steps: int) -> Tensor:
    x = torch.tanh(s)
    a, b = torch.ones_like(x), x
    for _ in range(steps):
        a, b = b, 1.2 * x * b - a
    return b.softmax(-1)


def newton(s: Tensor, steps: int) -> Tensor:
    """Lambert's W: w exp(w) = exp(s)."""
    s = s.exp()
    w = torch.log1p(s)
    for _ in range(steps // 4):
        w = w - (w * w.exp() - s) / (w.exp() * (w + 1))
    return w / w.sum(-1, keepdim=True)


def bisection(s: Tensor, steps: int) -> Tensor:
    """Entmax of 1.5, by a threshold for each row."""
    most = s.amax(-1, keepdim=True)
    low, high = most - 1, most - 0.1
    with torch.no_grad():
        for _ in range(steps):
            middle = (low + high) / 2
            enough = (s - middle).clamp(min=0).pow(2).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    p = (s - low.detach()).clamp(min=0).pow(2)
    return p / p.sum(-1, keepdim=True)


def fed_back(s: Tensor, steps: int) -> Tensor:
    for _ in range(steps // 4):
        m = (s * s).mean(-1, keepdim=True)
        s = s * m.sqrt() / (1 + m) + 0.5 * s.tanh()
    return s.softmax(-1)


EVERY = [sines, choices, extremes, ratios, polynomials, newton, bisection, fed_back]


def attention(weights: Callable[[Tensor, int], Tensor], steps: int) -> Callable[..., Tensor]:
    return lambda q, k, v: weights(q @ k.mT * q.shape[-1] ** -0.5, steps) @ v


def made(size: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, size, 16, generator=generator).to(device) for _ in range(3)]


@pytest.mark.parametrize("weights", EVERY)
def test_many_steps_are_planned(weights: Callable[[Tensor, int], Tensor]) -> None:
    inputs = [x.requires_grad_() for x in made(48, torch.device("cpu"))]
    with unrun():
        explained = fl.explain(attention(weights, STEPS), *inputs)
    assert explained.kernels and not explained.fallbacks
    assert str(explained)


@pytest.mark.parametrize("weights", EVERY)
def test_few_steps_are_right(weights: Callable[[Tensor, int], Tensor], device: torch.device) -> None:
    fn = attention(weights, 4)
    check_gradients(fn, fl.compile(fn, fallback="error"), made(48, device))


def forward_algorithm(emitted: Tensor, transitions: Tensor) -> Tensor:
    """What a conditional random field is normalised by: each step is in the maximum and in the sum of the next."""
    a = emitted[:, 0]
    for t in range(1, emitted.shape[1]):
        a = (a[:, :, None] + transitions).logsumexp(1) + emitted[:, t]
    return a.logsumexp(-1)


def emissions(steps: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(device) for shape in ((3, steps, 9), (9, 9))]


def test_sums_inside_of_sums_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each substitution visits a few nodes for each step, where all paths to them are millions."""
    monkeypatch.setattr(build, "MAX_STEPS", 100 * STEPS)
    inputs = [x.requires_grad_() for x in emissions(STEPS // 2, torch.device("cpu"))]
    with unrun():
        explained = fl.explain(forward_algorithm, *inputs)
    assert explained.kernels and not explained.fallbacks


def test_sums_inside_of_sums_are_right(device: torch.device) -> None:
    compiled = fl.compile(forward_algorithm, fallback="error")
    check_gradients(forward_algorithm, compiled, emissions(4, device))
