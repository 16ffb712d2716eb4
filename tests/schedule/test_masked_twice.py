"""Scores that a mask fills with a number before the softmax, and weights with 0 behind it (ESPnet, many encoders)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.plan import Accumulator
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain


def filled(fill: float | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """None: with the least number of the scores' type."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        least = torch.finfo(q.dtype).min if fill is None else fill
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~keep[:, None, None], least)
        return scores.softmax(-1).masked_fill(~keep[:, None, None], 0) @ v

    return attend


def of_pairs(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """A mask of queries and keys, negated once."""
    gone = ~(keep[:, None, None] & keep[:, None, :, None])
    scores = (q @ k.mT / 4).masked_fill(gone, torch.finfo(q.dtype).min)
    return torch.where(gone, 0, scores.softmax(-1)) @ v


def after_zeros(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Filled with a number that counts, and divided by what is left."""
    weights = (q @ k.mT / 4).masked_fill(~keep[:, None, None], 0.0).softmax(-1) * keep[:, None, None]
    return (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v


def drawn(length: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of three sequences the last is masked whole."""
    gen = torch.Generator().manual_seed(0)
    qkv = [torch.randn(3, 2, length, 16, generator=gen).to(device, dtype) for _ in range(3)]
    lengths = torch.tensor([length, length // 3, 0])
    return [*qkv, (torch.arange(length) < lengths[:, None]).to(device)]


FORMS = [filled(-1e4), filled(-math.inf), filled(None), of_pairs, after_zeros]
NAMES = ["number", "infinity", "least", "pairs", "zeros"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fn", FORMS, ids=NAMES)
def test_right(fn: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> None:
    run_and_check(fn, fl.compile(fn), drawn(70, device, dtype))


@pytest.mark.parametrize("fn", [FORMS[0], of_pairs, after_zeros], ids=["number", "pairs", "zeros"])
def test_gradients(fn: Callable[..., Tensor], device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn), drawn(70, device))


@pytest.mark.parametrize("fn", [FORMS[0], of_pairs], ids=["number", "pairs"])
def test_one_maximum_serves_both(fn: Callable[..., Tensor]) -> None:
    (graph,) = explain(fn, *drawn(300, torch.device("cpu"), torch.bfloat16)).graphs
    (kernel,) = (p for p in graph.kernels if not p.name.endswith("_tiles"))
    steps = [s for loop in kernel.loops for s in loop.steps if isinstance(s, Accumulator)]
    assert [s.kind for s in steps if s.kind == "max"] == ["max"]


@pytest.mark.parametrize("fn", [FORMS[0], FORMS[1], of_pairs], ids=["number", "infinity", "pairs"])
def test_row_sums_are_known(fn: Callable[..., Tensor]) -> None:
    """By the result that the forward pass keeps: no kernel of the backward pass has another loop for them."""
    *qkv, keep = drawn(300, torch.device("cpu"), torch.bfloat16)
    graphs = explain(fn, *(x.requires_grad_() for x in qkv), keep).graphs
    assert all(len(p.loops) <= 1 for p in graphs[-1].kernels)
