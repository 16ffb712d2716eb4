"""Programs that cannot fuse whole: PyTorch computes them, rightly and with a reason. q, k, v are [b,h,s,d]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, qkv, qkv_and


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def sparsemax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Martins and Astudillo, by sorting each row."""
    scores = _scores(q, k)
    ordered = torch.sort(scores, dim=-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1, device=q.device, dtype=q.dtype)
    mean = (torch.cumsum(ordered, dim=-1) - 1) / rank
    support = (ordered > mean).sum(dim=-1, keepdim=True)
    tau = mean.gather(-1, support - 1)
    return torch.clamp(scores - tau, min=0) @ v


def running_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Monotonic attention: each key is reached if no earlier one was taken."""
    taken = torch.sigmoid(_scores(q, k))
    reached = torch.cumprod(1 - taken, dim=-1)
    return (taken * F.pad(reached[..., :-1], (1, 0), value=1.0)) @ v


def selected_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """keep bool [s]: the keys are picked by a mask, so their number is data."""
    return _scores(q, k[:, :, keep]).softmax(-1) @ v[:, :, keep]


CASES = (
    Case("sparsemax", sparsemax, qkv(), kernels=None, falls_back="sort"),
    Case("running_product", running_product, qkv(), kernels=None, falls_back="cumprod"),
    Case(
        "selected_keys",
        selected_keys,
        qkv_and(lambda g: g.bools(g.seq) | (torch.arange(g.seq, device=g.device) == 0)),
        kernels=None,
        falls_back="nonzero|index|data",
    ),
)
