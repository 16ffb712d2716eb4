"""Attention under a mask that a test gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mask = Callable[..., Tensor]


def attention(mask: Mask, hidden: float = float("-inf")) -> Callable[..., Tensor]:
    """Softmax attention; `mask(i, j, *data)` gives [i, j], or that of each head."""

    def fn(q: Tensor, k: Tensor, v: Tensor, *data: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2], device=q.device)[:, None]
        j = torch.arange(k.shape[-2], device=k.device)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(~mask(i, j, *data), hidden).softmax(-1) @ v

    return fn
