"""What is summed over a batch, or over heads, after it was summed over rows or columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import unrun


def far(q: Tensor, k: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    return (i[:, None] - j).abs().to(q.dtype)


def slopes(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """ALiBi's, learned: w [h,3]."""
    return (q @ k.mT / 4 - w[:, :1, None].exp() * far(q, k) / 16).softmax(-1) @ v


def fading(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """A bias of three learned numbers a head, one of them in a denominator."""
    a, b, c = w[..., None, None].unbind(1)
    return (q @ k.mT / 4 + a * torch.exp(-b.abs() * far(q, k)) / (1 + c * c * far(q, k))).softmax(-1) @ v


def slopes_and_sink(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """gpt-oss's sink beside them: a logit without a value."""
    scores = q @ k.mT / 4 - w[:, :1, None].exp() * far(q, k) / 16
    sink = w[:, 1, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


def coordinates(q: Tensor, k: Tensor, v: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Attention between points x [b,n,3], which move by the mean weights of all heads (EGNN's update)."""
    between = x[:, :, None] - x[:, None]
    weights = (q @ k.mT / 4 - w[:, :1, None].exp() * between.square().sum(-1)[:, None]).softmax(-1)
    return weights @ v, x + (weights.mean(1)[..., None] * between).sum(-2)


def inputs(length: int, features: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [*[(2, 4, length, features)] * 3, (4, 3), (2, length, 3)]
    return [(torch.randn(s, generator=generator) / 2).to(dtype).to(device) for s in shapes]


ALL = {"slopes": slopes, "fading": fading, "slopes and sink": slopes_and_sink, "coordinates": coordinates}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    given = inputs(75, 16, dtype, device)
    check_gradients(ALL[name], fl.compile(ALL[name]), given if name == "coordinates" else given[:4])


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_stored_for_a_pair(name: str, device: torch.device) -> None:
    given = [t.requires_grad_() for t in inputs(512, 64, torch.bfloat16, device)]
    with unrun():
        graphs = fl.explain(ALL[name], *(given if name == "coordinates" else given[:4])).graphs
    assert not any(graph.fallbacks for graph in graphs)
    stores = [s for graph in graphs for plan in graph.kernels for s in plan.stores]
    assert not any(s.shape.count(512) > 1 for s in stores)


@pytest.mark.parametrize("fn", [slopes, fading, slopes_and_sink])
def test_rows_sums_join_the_queries_kernel(fn: Callable, device: torch.device) -> None:
    """Scores' gradients are computed twice: for queries, with all that rows give besides, and for keys."""
    given = [t.requires_grad_() for t in inputs(512, 64, torch.bfloat16, device)[:4]]
    with unrun():
        *_, backward = fl.explain(fn, *given).graphs
    over = [loop for plan in backward.kernels for loop in plan.loops if "tangents_1" in str(loop.steps)]
    assert len(over) == 2
