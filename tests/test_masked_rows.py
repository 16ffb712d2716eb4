"""Rows of which a mask leaves nothing, and what is made of their weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl

from .oracle import check_gradients, run_and_check

Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


def _renormalised(s: Tensor, keep: Tensor, v: Tensor) -> Tensor:
    w = s.softmax(-1).masked_fill(~keep, 0)
    return (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v


def _entropy(s: Tensor, keep: Tensor, v: Tensor) -> Tensor:
    w = s.softmax(-1)
    return -(w * (w + 1e-6).log()).sum(-1)


FORMS: dict[str, Weights] = {
    "filled with 0": lambda s, keep, v: s.softmax(-1).masked_fill(~keep, 0) @ v,
    "chosen": lambda s, keep, v: torch.where(keep, s.softmax(-1), 0.0) @ v,
    "multiplied": lambda s, keep, v: (s.softmax(-1) * keep) @ v,
    "moved first": lambda s, keep, v: (s - 200).softmax(-1).masked_fill(~keep, 0) @ v,
    "scaled": lambda s, keep, v: (s * 0.5 + 1).softmax(-1).masked_fill(~keep, 0) @ v,
    "other keys chosen": lambda s, keep, v: s.softmax(-1).masked_fill(keep.flip(-1), 0) @ v,
    "no NaN": lambda s, keep, v: s.softmax(-1).nan_to_num(0) @ v,
    "by logarithms": lambda s, keep, v: s.log_softmax(-1).exp() @ v,
    "by logsumexp": lambda s, keep, v: (s - s.logsumexp(-1, keepdim=True)).exp().masked_fill(~keep, 0) @ v,
    "by logsumexp, others": lambda s, keep, v: torch.where(keep.flip(-1), (s - s.logsumexp(-1, True)).exp(), 0.1) @ v,
    "by logsumexp, lower half": lambda s, keep, v: (s - s.logsumexp(-1, keepdim=True)).exp().tril() @ v,
    "above a threshold": lambda s, keep, v: torch.where(s.softmax(-1) > 0.01, s.softmax(-1), 0.0) @ v,
    "squared": lambda s, keep, v: s.softmax(-1).square() @ v,
    "rooted": lambda s, keep, v: (s.softmax(-1) + 1e-3).sqrt() @ v,
    "clamped": lambda s, keep, v: s.softmax(-1).clamp(0.001, 0.2) @ v,
    "renormalised": _renormalised,
    "twice": lambda s, keep, v: s.softmax(-1).softmax(-1) @ v,
    "entropy": _entropy,
    "variance": lambda s, keep, v: s.softmax(-1).var(-1),
    "ratio": lambda s, keep, v: (s.softmax(-1) / (1 + s.softmax(-1))) @ v,
    "sum of logarithms": lambda s, keep, v: s.log_softmax(-1).masked_fill(~keep, 0).sum(-1),
    "sum of columns": lambda s, keep, v: s.softmax(-1).masked_fill(~keep, 0).sum(-2),
}
LOW = {"-inf": -torch.inf, "-1e4": -1e4, "-1e9": -1e9, "least": torch.finfo(torch.float32).min}


def _program(form: str, low: str) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return FORMS[form]((q @ k.mT).masked_fill(~keep, LOW[low]), keep, v)

    return attention


def _inputs(device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v [2,2,50,16] and what is seen of keys: nothing by seven rows."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(2, 1, 50, 50, generator=generator) > 0.3
    keep[0, :, :7] = False
    return *(x.to(device) for x in torch.randn(3, 2, 2, 50, 16, generator=generator)), keep.to(device)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("form", FORMS)
def test_results_of_rows_that_see_nothing(form: str, low: str, device: torch.device) -> None:
    fn = _program(form, low)
    run_and_check(fn, fl.compile(fn, dynamic=False), _inputs(device), name=f"{form}, {low}")


@pytest.mark.parametrize("low", ["-inf", "-1e9"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_rows_that_see_nothing(form: str, low: str, device: torch.device) -> None:
    fn = _program(form, low)
    check_gradients(fn, fl.compile(fn, dynamic=False), _inputs(device), name=f"{form}, {low}")


def test_gradients_of_what_scales_rows_that_see_nothing(device: torch.device) -> None:
    """A sum over all rows is not asked for the exact sums of those that are chosen away."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, t: Tensor) -> Tensor:
        out = (q @ k.mT * t).masked_fill(~keep, -torch.inf).softmax(-1) @ v
        return torch.where(keep.any(-1, keepdim=True), out, 0)

    *qkv, keep = _inputs(device)
    t = torch.tensor([0.5, 0.25], device=device)[:, None, None].requires_grad_()
    x = [y.requires_grad_() for y in qkv]
    (found,) = torch.autograd.grad(fl.compile(attention, dynamic=False)(*x, keep, t).sum(), [t])
    (wanted,) = torch.autograd.grad(attention(*(y.double() for y in x), keep, t).sum(), [t])
    assert torch.allclose(found, wanted, rtol=1e-4)
