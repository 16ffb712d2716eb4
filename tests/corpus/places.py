"""Programs in which it counts where the extremum of the scores is. q, k, v are [b,h,s,d]; points are [b,s,d]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .case import Case, Draw, qkv


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def late_interaction(q: Tensor, d: Tensor) -> Tensor:
    """ColBERT's score of a query's tokens [b,t,d] and a document's [b,s,d]."""
    return (q @ d.transpose(-1, -2)).amax(-1).sum(-1)


def chamfer(x: Tensor, y: Tensor) -> Tensor:
    """The mean distance of each point from the nearest of the other set, both ways."""
    squares = (x[:, :, None] - y[:, None]).pow(2).sum(-1)
    return squares.min(-1).values.mean(-1) + squares.min(-2).values.mean(-1)


def hardest_triplets(x: Tensor, labels: Tensor) -> Tensor:
    """Hermans et al.: of each point its farthest fellow and its nearest stranger; cosine similarities."""
    x = x / x.norm(dim=-1, keepdim=True)
    alike = labels[:, None] == labels
    similarity = x @ x.T
    fellow = similarity.masked_fill(~alike, math.inf).amin(-1)
    stranger = similarity.masked_fill(alike, -math.inf).amax(-1)
    return torch.relu(stranger - fellow + 0.2)


def largest_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention, and how sure each row is: its largest weight."""
    p = _scores(q, k).softmax(-1)
    return p @ v, p.amax(-1)


def scaled_to_range(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that go from 0 to 1 in each row."""
    s = _scores(q, k)
    low, high = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)
    return (s - low) / (high - low + 1) @ v / s.shape[-1]


def straight_through(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hard attention, with the gradient of soft attention."""
    s = _scores(q, k)
    soft = s.softmax(-1)
    hard = (s == s.amax(-1, keepdim=True)).to(s.dtype)
    return (hard + soft - soft.detach()) @ v


def _labelled(g: Draw) -> tuple[Tensor, Tensor]:
    return g.normal(g.seq + 3, 32), torch.arange(g.seq + 3, device=g.device) % 3


CASES = (
    Case("late_interaction", late_interaction, lambda g: (g.normal(2, 32, 16), g.normal(2, g.seq, 16))),
    Case("chamfer", chamfer, lambda g: (g.normal(2, g.seq, 8), g.normal(2, g.seq + 2, 8)), kernels=2),
    Case("hardest_triplets", hardest_triplets, _labelled),
    Case("largest_weights", largest_weights, qkv()),
    Case("scaled_to_range", scaled_to_range, qkv()),
    Case("straight_through", straight_through, qkv()),
)
