"""Python floats that change from call to call: TorchDynamo passes them as tensors from the second on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fl_pallas as fl
from fl_pallas import backend
from tests.oracle import check, check_gradients

Variant = Callable[[Tensor, Tensor, Tensor, float], Tensor]
VALUES = (1.0, 2.5, 3.0, 0.75)


def temperature(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    return (q @ k.mT / t).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    return (torch.tanh(q @ k.mT / t) * t).softmax(-1) @ v


def scale(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=t / 4)


def filled(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    return (q @ k.mT / 4).masked_fill(i[:, None] < i, -t * 3).softmax(-1) @ v


def slope(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    """Integers times a number are of PyTorch's default type."""
    i = torch.arange(q.shape[2], device=q.device)
    return (q @ k.mT / 4 - (i[:, None] - i).abs() * max(t, 0.5)).softmax(-1) @ v


def power(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    weights = ((q @ k.mT / 4).abs() + 0.5) ** t
    return weights / weights.sum(-1, keepdim=True) @ v


def window(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    return (q @ k.mT / 4).masked_fill((i[:, None] - i).abs() > int(t * 4), -1e9).softmax(-1) @ v


def decay(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    """TorchDynamo captures it, and `scale`, for each value."""
    return (q @ k.mT * math.exp(-t)).softmax(-1) @ v


def made(q: Tensor, k: Tensor, v: Tensor, t: float) -> Tensor:
    return (q @ k.mT / 4 + torch.full((), t, device=q.device) * q.sum(-1, keepdim=True)).softmax(-1) @ v * t


def given(n: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(1, 2, n, 16, generator=generator) for _ in range(3)]


def check_number(fn: Variant, compiled: Variant, t: float, device: torch.device) -> None:
    q, k, v = (x.to(device) for x in given())
    check(lambda *x: fn(*x, t), [q, k, v], compiled(q, k, v, t))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each graph that is planned."""
    found: list[None] = []
    plan = backend.scheduled

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.append(None)
        return plan(*args, **kwargs)

    monkeypatch.setattr(backend, "scheduled", counting)
    return found


@pytest.mark.parametrize("fn", [temperature, softcap, filled, slope, power])
def test_one_graph_for_all_of_them(fn: Variant, planned: list[None], device: torch.device) -> None:
    compiled = fl.compile(fn, fallback="error")
    for t in VALUES:
        check_number(fn, compiled, t, device)
    assert len(planned) == 2, "one for the first value, one for all others"


@pytest.mark.parametrize("fn", [window, decay, made, scale])
def test_a_graph_for_each(fn: Variant, planned: list[None], device: torch.device) -> None:
    compiled = fl.compile(fn, fallback="error")
    for t in (*VALUES, *VALUES):
        check_number(fn, compiled, t, device)
    assert len(planned) <= 1 + len(VALUES), "one more where TorchDynamo takes the first value for one that changes"


@pytest.mark.parametrize("fn", [temperature, softcap, scale, filled, slope, power, window, decay, made])
def test_gradients(fn: Variant, device: torch.device) -> None:
    compiled = fl.compile(fn, fallback="error")
    for t in VALUES[:3]:
        check_gradients(lambda *x, t=t: fn(*x, t), lambda *x, t=t: compiled(*x, t), [x.to(device) for x in given()])


def test_dropout(device: torch.device) -> None:
    """A rate that changes: each has its own share of zeros."""

    def dropped(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        return F.dropout((q @ k.mT / 4).softmax(-1), p) @ v

    compiled = fl.compile(dropped, fallback="error")
    q, k, _ = (x.to(device) for x in given(64))
    for p in (0.1, 0.5, 0.9):
        weights = compiled(q, k, torch.eye(64, device=device).expand(1, 2, 64, 64), p)
        assert abs((weights == 0).float().mean().item() - p) < 0.03


@pytest.mark.long
def test_the_constant_of_a_layer(device: torch.device) -> None:
    class Layer(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.weight = 0.8 - 0.6 * math.exp(-0.3 * depth)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT / 4).softmax(-1) @ v - self.weight * ((q @ k.mT).softmax(-1) @ v)

    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.FallbackWarning)
        for depth in range(3):
            layer = Layer(depth)
            check_gradients(layer, fl.compile(layer), [x.to(device) for x in given()])


def test_masks_in_place(device: torch.device) -> None:
    """`&=`, `|=` and `^=` have no functional form in PyTorch."""

    def masked(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        i = torch.arange(q.shape[2], device=q.device)
        seen = ids[:, None] == ids
        seen &= i[:, None] >= i
        seen |= i == 0
        seen ^= (i[:, None] - i) == 3
        return (q @ k.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    ids = torch.arange(40, device=device) // 9
    inputs = [*(x.to(device) for x in given()), ids]
    check(masked, inputs, fl.compile(masked, fallback="error")(*inputs))
