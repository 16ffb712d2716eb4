"""What a layer's backward pass knows of each row: the sum that its result tells, the logarithm of its sum, stored once.

Results lie as tokens, and are handed to a projection; queries are groups of heads, rotated in part, or of two streams.
The kernel of queries has one loop over keys, with three products, and the one of keys loads numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import Op, free_axes, walk
from fl_pallas.schedule.plan import Accumulator, KernelPlan
from tests.oracle import check_gradients
from tests.unrun import explain

HEADS, WIDTH = 4, 16


def heads(x: Tensor, n: int = HEADS) -> Tensor:
    return x.unflatten(-1, (n, WIDTH)).transpose(1, 2)


def softmax(scores: Tensor) -> Tensor:
    i = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(i > i[:, None], float("-inf")).softmax(-1)


def plain(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    q, k, v = (heads(x @ w[n]) for n in range(3))
    return (softmax(q @ k.mT / 4) @ v).transpose(1, 2).flatten(2)


def forgetting(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    q, k, v = (heads(x @ w[n]) for n in range(3))
    decay = (x @ g).sigmoid().log().cumsum(1).transpose(1, 2)
    scores = q @ k.mT / 4 + decay[..., :, None] - decay[..., None, :]
    return (softmax(scores) @ v).transpose(1, 2).flatten(2)


def grouped(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """Two heads of queries for one of keys, as a dimension of its own."""
    q = heads(x @ w[0]).unflatten(1, (2, -1))
    k, v = (heads(x @ w[n][:, : 2 * WIDTH], 2)[:, :, None] for n in (1, 2))
    return (softmax(q @ k.mT / 4) @ v).flatten(1, 2).transpose(1, 2).flatten(2)


def rotated_in_part(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    q, k, v = (heads(x @ w[n]) for n in range(3))
    a, b = (torch.linspace(0, n, x.shape[1], device=x.device)[:, None].to(x.dtype) for n in (1, 2))
    q, k = (torch.cat([t[..., :4] * a + t[..., 4:8] * b, t[..., 4:]], -1) for t in (q, k))
    return (softmax(q @ k.mT / 4) @ v).transpose(1, 2).flatten(2)


def two_streams(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """Text and image have weights of their own, and attend together."""
    text, image = x[:, :5], x[:, 5:]
    q, k, v = (torch.cat([heads(text @ w[n]), heads(image @ w[n].mT)], 2) for n in range(3))
    return ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)


def gated_blocks(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """What a gate comes behind is kept as PyTorch's product has it, batch and heads as one dimension; a mask of blocks
    divides rows as well."""
    q, k, v = (heads(x @ w[n]) for n in range(3))
    block = torch.arange(x.shape[1], device=x.device) // 8
    o = (q @ k.mT / 4).masked_fill(block[:, None] != block, float("-inf")).softmax(-1) @ v
    return (o * torch.sigmoid(q)).transpose(1, 2).flatten(2)


def capped_with_a_sink(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """Sums of parts in a sum of parts: rotated features, and keys beside a sink."""
    a = torch.linspace(0, 1, x.shape[1], device=x.device)[:, None].to(x.dtype)
    q, k, v = (heads(x @ w[n]) for n in range(3))
    q, k = (torch.cat([t[..., :4] * a, t[..., 4:]], -1) for t in (q, k))
    scores = torch.cat([(q @ k.mT / 4).tanh() * 5, g[0, :, None, None].expand(*q.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)


LAYERS: list[Callable[..., Tensor]] = [
    plain, forgetting, grouped, rotated_in_part, two_streams, gated_blocks, capped_with_a_sink,
]  # fmt: skip


def layer(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, g: attention(x, w, g) @ w[3]


def given(tokens: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    width = HEADS * WIDTH
    shapes = [(2, tokens, width), (4, width, width), (width, HEADS)]
    return [(torch.randn(s) / s[-1] ** 0.5).to(dtype).to(device) for s in shapes]


def steps(plan: KernelPlan) -> list[tuple[Op, bool]]:
    """The operations of a kernel's loops, and whether each is of what a loop brings."""
    found = [(s, loop.axis) for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    return [(n, axis in free_axes(n)) for s, axis in found for n in walk(s.update) if isinstance(n, Op)]


@pytest.mark.parametrize("attention", LAYERS)
def test_no_loop_is_over_what_rows_tell(attention: Callable[..., Tensor]) -> None:
    inputs = [t.requires_grad_() for t in given(256, torch.bfloat16)]
    backward = explain(layer(attention), *inputs).graphs[-1]
    by_rows, by_keys, *_ = backward.kernels
    assert len(by_rows.loops) == 1
    # A few tokens of another stream have a loop of their own, and rows of their own in it.
    looped = [n for n, looped in steps(by_keys) if looped and n.name in ("log", "div")]
    assert not looped or attention is two_streams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", LAYERS)
def test_gradients_of_layers(attention: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> None:
    fn = layer(attention)
    check_gradients(fn, fl.compile(fn), given(33, dtype, device))


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_a_norm_behind_shared_heads_is_no_sum_of_pairs(norm: Callable[..., Tensor]) -> None:
    """Keys repeated for the heads that share them are larger than what they are made of: their norm was taken for one
    of pairs, made for each row of scores, and the scores were stored."""

    def shared(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        q = norm(heads(x @ w[0]), [WIDTH])
        k, v = (heads(x @ w[n][:, : 2 * WIDTH], 2).repeat_interleave(2, 1) for n in (1, 2))
        return (softmax(q @ norm(k, [WIDTH]).mT / 4) @ v).transpose(1, 2).flatten(2)

    graphs = explain(layer(shared), *(t.requires_grad_() for t in given(256, torch.bfloat16))).graphs
    kernels = [p for g in graphs for p in g.kernels]
    assert len(graphs[0].kernels) == 1 and all(len(p.loops) <= 1 for p in kernels)
    assert max(math.prod(s.shape) for p in kernels for s in p.stores) == 2 * 256 * HEADS * WIDTH
