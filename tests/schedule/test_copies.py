"""Heads side by side for the layer behind attention: stored so by the kernel, in both passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.capture import laid
from tests.oracle import check, check_gradients
from tests.unrun import unrun

BATCH, HEADS, SEQ, WIDTH = 2, 4, 40, 16


def draw(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [*[(BATCH, HEADS, SEQ, WIDTH)] * 3, (HEADS * WIDTH, HEADS * WIDTH)]
    return [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flat(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.linear(attend(q, k, v).transpose(1, 2).flatten(2), w)


def queries_first(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """As modules that take [queries, batch, features] do."""
    return attend(q, k, v).permute(2, 0, 1, 3).reshape(SEQ, BATCH, -1) @ w


def by_head(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """PyTorch's copy has the same feature of all heads side by side: no tile of a kernel has that."""
    return torch.einsum("bhsd,hde->bse", attend(q, k, v), w.unflatten(0, (HEADS, WIDTH)))


def read_twice(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    o = attend(q, k, v)
    return o.transpose(1, 2).flatten(2) @ w + o.amax(1).repeat(1, 1, HEADS)


def returned_too(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    o = attend(q, k, v)
    return o.transpose(1, 2).flatten(2) @ w, o


def read_by_a_kernel(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The keys of a second attention are what the first one returns, copied."""
    first = attend(q, k, v).transpose(1, 2).contiguous()
    return attend(q, first.transpose(1, 2), v).transpose(1, 2).flatten(2) @ w


COPIED: list[Callable] = [flat, queries_first]
OTHERS: list[Callable] = [by_head, read_twice, returned_too, read_by_a_kernel]


@pytest.mark.parametrize("fn", COPIED)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_nothing_is_copied(
    fn: Callable, training: bool, inside: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However PyTorch's own attention lays heads: on GPUs they lie side by side."""
    if inside:
        monkeypatch.setattr(laid, "_has_heads_inside", lambda fake: True)
    inputs = [t.requires_grad_(training) for t in draw(device)]
    with unrun():
        graphs = fl.explain(fn, *inputs).graphs
    assert len(graphs) == 1 + training
    assert not [name for graph in graphs for name, _ in graph.left if "clone" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [*COPIED, *OTHERS])
def test_gradients(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    inputs = draw(device, dtype)
    compiled = fl.compile(fn)
    with torch.no_grad():
        check(fn, inputs, compiled(*inputs))
    check(fn, inputs, compiled(*inputs))
    check_gradients(fn, compiled, inputs)
