"""One new query against a long past: q [b,h,1,d], k, v [b,g,s,d], each key head serving h / g query heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import Problem, nbytes
from .variants import CAP, alibi_slopes, scores_of, weigh

WINDOW = 1024


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(scores_of(q, k).softmax(-1), v)


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh((CAP * torch.tanh(scores_of(q, k) / CAP)).softmax(-1), v)


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes [h], float32."""
    past = torch.arange(k.shape[-2], device=q.device) - (k.shape[-2] - 1)
    scores = scores_of(q, k).float() + slopes[:, None, None] * past
    return weigh(scores.softmax(-1).to(v.dtype), v)


def sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """sinks [h]: a score of each head that takes part in the softmax and has no value."""
    scores = scores_of(q, k)
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return weigh(weights, v)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The query sits at the end and sees the last WINDOW keys."""
    j = torch.arange(k.shape[-2], device=q.device)
    return weigh(scores_of(q, k).masked_fill(j < k.shape[-2] - WINDOW, -math.inf).softmax(-1), v)


def lengths(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """length [b]: how many keys of each batch element are there."""
    j = torch.arange(k.shape[-2], device=q.device)
    there = j < length[:, None, None, None]
    return weigh(scores_of(q, k).masked_fill(~there, -math.inf).softmax(-1), v)


DECODE: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (plain, softcap, alibi, sink, window, lengths)}


def decode(name: str, b: int, h: int, g: int, s: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """A variant on random tensors; only the keys that it needs count as bytes."""
    torch.manual_seed(0)
    q = torch.randn(b, h, 1, d, device=device, dtype=dtype)
    k, v = (torch.randn(b, g, s, d, device=device, dtype=dtype) for _ in range(2))
    slopes = alibi_slopes(h, device)
    sinks = torch.randn(h, device=device, dtype=dtype)
    length = torch.linspace(s, s // 2, b, device=device).to(torch.int32)
    extra, axes = {"alibi": ((slopes,), ("h",)), "sink": ((sinks,), ("h",)), "lengths": ((length,), ("b",))}.get(
        name, ((), ())
    )
    past = torch.arange(s, device=device) - (s - 1)
    score_mods = {
        "alibi": lambda score, b, h, i, j: score + slopes[h] * (j - (s - 1)),
        "softcap": lambda score, b, h, i, j: CAP * torch.tanh(score / CAP),
    }
    mask_mods = {
        "window": lambda b, h, i, j: j >= s - WINDOW,
        "lengths": lambda b, h, i, j: j < length[b],
    }

    def flex(attend: Callable[..., Any], mask: object, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import AuxRequest

        aux = AuxRequest(lse=True) if name == "sink" else None
        out = attend(q, k, v, score_mod=score_mods.get(name), block_mask=mask, enable_gqa=True, return_aux=aux)
        if name != "sink":
            return out
        out, found = out
        return out * torch.sigmoid(found.lse - sinks[:, None])[..., None].to(out.dtype)

    def sdpa() -> Callable[..., Tensor]:
        attend, start = F.scaled_dot_product_attention, max(0, s - WINDOW)
        if name == "window":
            return lambda q, k, v: attend(q, k[:, :, start:], v[:, :, start:], enable_gqa=True)
        bias = None
        if name == "alibi":
            bias = (slopes[:, None, None] * past).to(dtype)
        if name == "lengths":
            bias = (past + s - 1 < length[:, None])[:, None, None, :]
        return lambda q, k, v, *_: attend(q, k, v, attn_mask=bias, enable_gqa=True)

    keys = {"window": b * min(s, WINDOW), "lengths": int(length.sum())}.get(name, b * s)
    return Problem(
        plain=DECODE[name],
        inputs=(q, k, v, *extra),
        axes=("bhqd", "bgsd", "bgsd", *axes),
        out_axes=("bhqd",),
        flops=4 * keys * h * d,
        bytes=2 * keys * g * d * k.element_size() + nbytes(q, q, *extra),
        scores=b * h * s,
        flex=flex,
        mask_mod=mask_mods.get(name),
        mask_shape=(b if name == "lengths" else None, 1, s),
        sdpa=None if name in ("softcap", "sink") else sdpa,
    )
