"""Masks and biases of what pairs of tokens have in common: tags, roles, bits of hashes; and of coordinates."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import explain


def masked(q: Tensor, forbidden: Tensor) -> Tensor:
    return (q @ q.mT / 4).masked_fill(forbidden, -1e4).softmax(-1) @ q


def any_tag(q: Tensor, t: Tensor) -> Tensor:
    return masked(q, ~(t[:, :, None] & t[:, None]).any(-1))


def all_roles(q: Tensor, t: Tensor) -> Tensor:
    return masked(q, ~(~t[:, None] | t[:, :, None]).all(-1))


def hamming(q: Tensor, t: Tensor) -> Tensor:
    return masked(q, (t[:, :, None] != t[:, None]).sum(-1) > 4)


def jaccard(q: Tensor, t: Tensor) -> Tensor:
    both, either = t[:, :, None] & t[:, None], t[:, :, None] | t[:, None]
    return (q @ q.mT / 4 + (both.sum(-1) / either.sum(-1).clamp(min=1)).to(q.dtype)).softmax(-1) @ q


def shared_id(q: Tensor, t: Tensor) -> Tensor:
    ids = t.to(torch.int64) * torch.arange(1, 9, device=t.device)
    return masked(q, ~(ids[:, :, None, :, None] == ids[:, None, :, None, :]).flatten(-2).any(-1))


def either_id(q: Tensor, t: Tensor) -> Tensor:
    """The same asked of one set and then of the other."""
    ids = t[..., :4].to(torch.int64) * torch.arange(1, 5, device=t.device)
    return masked(q, ~(ids[:, :, None, :, None] == ids[:, None, :, None, :]).any(-1).any(-1))


def chessboard(q: Tensor, t: Tensor) -> Tensor:
    """Coordinates of tokens, as far apart as along the axis along which they are further."""
    at = t.unflatten(-1, (2, 4)).sum(-1)
    return masked(q, (at[:, :, None] - at[:, None]).abs().amax(-1) > 1)


def within_a_box(q: Tensor, t: Tensor) -> Tensor:
    """The same of coordinates that are floats, scaled."""
    at = t.unflatten(-1, (2, 4)).sum(-1).to(q.dtype)
    return masked(q, ((at[:, :, None] - at[:, None]) / 3).abs().max(-1).values > 0.4)


def near_the_largest(q: Tensor, t: Tensor) -> Tensor:
    """Mining: what counts is how far a score is from the row's largest, of which no gradient is asked."""
    s = q @ q.mT / 4 + t.sum(-1, dtype=q.dtype)[:, None]
    return torch.where(s - 0.1 < s.amax(-1, keepdim=True).detach(), s.exp(), 0).sum(-1)


PROGRAMS = (any_tag, all_roles, hamming, jaccard, shared_id, either_id, chessboard, within_a_box, near_the_largest)


@pytest.mark.parametrize("fn", PROGRAMS)
def test_fused(fn: Callable[..., Tensor], device: torch.device) -> None:
    """Both passes, and nothing of all pairs is stored or told."""
    torch.manual_seed(3)
    q = torch.randn(2, 65, 16, device=device, requires_grad=True)
    tags = torch.rand(2, 65, 8, device=device) > 0.6
    explained = explain(fn, q, tags)
    assert not explained.fallbacks and all(graph.kernels for graph in explained.graphs)
    stored = [s for graph in explained.graphs for plan in graph.kernels for s in plan.stores]
    assert all(prod(s.shape) < 65 * 65 for s in stored), f"{stored}"
    torch._dynamo.reset()
    check_gradients(fn, fl.compile(fn, fallback="error"), [q, tags])
