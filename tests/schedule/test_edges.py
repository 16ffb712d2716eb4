"""Keys of pairs (relation-aware attention, graph transformers): scores of queries and a given feature of each pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import unrun


def by_einsum(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("bhid,bijd->bhij", q, edges)
    return (scores / 4).softmax(-1) @ v


def for_each_head(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    every = edges[:, None].expand(-1, q.shape[1], -1, -1, -1)
    return ((q @ k.mT + torch.einsum("bhid,bhijd->bhij", q, every)) / 4).softmax(-1) @ v


def by_sum(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    return (((k[:, :, None] + edges[:, None]) * q[:, :, :, None]).sum(-1) / 4).softmax(-1) @ v


def given(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [*[(2, 2, n, 16)] * 3, (2, n, n, 16)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


@pytest.mark.parametrize("needed", [3, 4])
@pytest.mark.parametrize("fn", [by_einsum, for_each_head, by_sum])
def test_both_passes_fuse(fn: Callable, needed: int) -> None:
    """With a gradient of the edges, too; they are what is largest."""
    inputs = given(64)
    with unrun():
        explanation = fl.explain(fn, *(t.requires_grad_(k < needed) for k, t in enumerate(inputs)))
    forward, backward = explanation.graphs
    assert len(forward.kernels) == 1 and 2 <= len(backward.kernels) <= 4 and not explanation.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [by_einsum, for_each_head, by_sum])
def test_gradients(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    for n in (33, 70):
        check_gradients(fn, fl.compile(fn, fallback="error"), [t.to(device) for t in given(n, dtype)])


def gated_edges(q: Tensor, k: Tensor, v: Tensor, e: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """Edge-augmented graph transformer: a bias and a gate of each pair, from the pair's features by two layers."""
    s = (q @ k.mT * q.shape[-1] ** -0.5 + (e @ bias).permute(0, 3, 1, 2)).softmax(-1)
    return s * torch.sigmoid((e @ gate).permute(0, 3, 1, 2)) @ v


@pytest.mark.long
def test_gradients_of_two_layers_of_pairs_are_stored(device: torch.device) -> None:
    """What both give back to the pairs is PyTorch's, and so are the layers' weights."""
    shapes = *((1, 4, 40, 8),) * 3, (1, 40, 40, 24), (24, 4), (24, 4)
    inputs = [torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]
    forward, backward = fl.explain(gated_edges, *inputs).graphs
    assert [len(forward.kernels), len(backward.kernels)] == [1, 3] and dict(backward.left)["aten.mm.default"] == 4
    check_gradients(gated_edges, fl.compile(gated_edges), inputs)
