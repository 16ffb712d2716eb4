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


def stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A running sum over the scores, from the nearest key backwards."""
    scores = _scores(q, k)
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(-1)
    log_rest = F.logsigmoid(-scores).masked_fill(~keep, 0.0)
    later = log_rest.flip(-1).cumsum(-1).flip(-1) - log_rest
    return torch.exp(F.logsigmoid(scores) + later).masked_fill(~keep, 0.0) @ v


def selected_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """keep bool [s]: the keys are picked by a mask, so their number is data."""
    return _scores(q, k[:, :, keep]).softmax(-1) @ v[:, :, keep]


CASES = (
    Case("sparsemax", sparsemax, qkv(), kernels=None, falls_back="sort"),
    Case("stick_breaking", stick_breaking, qkv(), kernels=None, falls_back="cumsum"),
    Case(
        "selected_keys",
        selected_keys,
        qkv_and(lambda g: g.bools(g.seq) | (torch.arange(g.seq, device=g.device) == 0)),
        kernels=None,
        falls_back="nonzero|index|data",
    ),
)
