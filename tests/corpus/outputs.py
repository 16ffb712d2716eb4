"""More than one output, or more than one reduction over the keys. q, k, v are [b,h,s,d]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, qkv, qkv_and


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k)
    return scores.softmax(-1) @ v, torch.logsumexp(scores, dim=-1)


def with_max(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """A dict of outputs: the row's largest weight is 1 / sum exp(s - max)."""
    weights = _scores(q, k).softmax(-1)
    return {"out": weights @ v, "confidence": weights.amax(-1)}


def with_entropy(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    logp = F.log_softmax(_scores(q, k), dim=-1)
    p = logp.exp()
    return p @ v, -(p * logp).sum(dim=-1)


def two_sums(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Two values under one softmax; u [b,h,s,8]."""
    weights = _scores(q, k).softmax(-1)
    return weights @ v, weights @ u


def value_variance(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the values under the weights, by the second moment."""
    weights = _scores(q, k).softmax(-1)
    mean = weights @ v
    return mean, weights @ (v * v) - mean * mean


def value_variance_centred(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same, centred: the second sum depends on the first."""
    weights = _scores(q, k).softmax(-1)
    mean = weights @ v
    return mean, (weights[..., None] * (v[:, :, None] - mean[:, :, :, None]) ** 2).sum(-2)


def expected_distance(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mean attention distance, as papers plot it."""
    weights = _scores(q, k).softmax(-1)
    i = torch.arange(q.shape[-2], device=q.device, dtype=q.dtype)
    return weights @ v, (weights * (i[:, None] - i[None, :]).abs()).sum(-1)


def entropy_normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three reductions in a chain: max, sum, entropy; the output is divided by the last."""
    logp = F.log_softmax(_scores(q, k), dim=-1)
    p = logp.exp()
    return p @ v / (1.0 - (p * logp).sum(-1, keepdim=True))


def effective_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """1 / sum p^2: how many keys a row attends to."""
    p = _scores(q, k).softmax(-1)
    return p @ v, 1.0 / p.square().sum(-1)


def norm_after(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """LayerNorm over the head's output, w, b [d]."""
    return F.layer_norm(_scores(q, k).softmax(-1) @ v, (v.shape[-1],), w, b)


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Gated attention (Qwen): sigmoid(gate) * out, gate [b,h,s,d]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) * torch.sigmoid(gate)


def residual(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """x [b,s,h*d] plus the merged heads."""
    return x + (_scores(q, k).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


def two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of one attention asks again: two kernels."""
    first = _scores(q, k).softmax(-1) @ v
    return _scores(first, k).softmax(-1) @ v


def hopfield_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two retrieval steps, then a read-out: what finishes one attention is read by the next."""
    for _ in range(2):
        q = torch.softmax(_scores(q, k), -1) @ k
    return torch.softmax(_scores(q, k), -1) @ v


def attention_difference(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Two attentions of other normalisers, and their difference."""
    return torch.softmax(_scores(q, k), -1) @ v - g * (torch.sigmoid(_scores(k, q)) @ v)


def gated_and_plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """An output that is returned as it is, too."""
    out = torch.softmax(_scores(q, k), -1) @ v
    return out, out * torch.sigmoid(out)


def any_and_count(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boolean and integer reductions beside the sum: does a row see a score over 1, and how many."""
    scores = _scores(q, k)
    over = scores > 1.0
    return scores.sigmoid() @ v, over.any(dim=-1), over.sum(dim=-1)


def scores_sum_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No second product: a pooled statistic of the scores, weighted by the values' first entry."""
    return (torch.tanh(_scores(q, k)) * v[..., None, :, 0]).mean(-1)


CASES = (
    Case("with_lse", with_lse, qkv(d=32)),
    Case("with_max", with_max, qkv()),
    Case("with_entropy", with_entropy, qkv()),
    Case("two_sums", two_sums, qkv_and(lambda g: g.normal(1, 2, g.seq, 8))),
    Case("value_variance", value_variance, qkv()),
    Case("value_variance_centred", value_variance_centred, qkv(h=1), kernels=None),
    Case("expected_distance", expected_distance, qkv()),
    Case("entropy_normalised", entropy_normalised, qkv()),
    Case("effective_keys", effective_keys, qkv()),
    Case("norm_after", norm_after, qkv_and(lambda g: g.uniform(16, low=0.5), lambda g: g.normal(16)), kernels=1),
    Case("gated", gated, qkv_and(lambda g: g.normal(1, 2, g.seq, 16))),
    Case("residual", residual, qkv_and(lambda g: g.normal(2, g.seq, 32), b=2)),
    Case("two_layers", two_layers, qkv(), kernels=2),
    Case("hopfield_steps", hopfield_steps, qkv(), kernels=3),
    Case("attention_difference", attention_difference, qkv_and(lambda g: g.normal(1, 2, g.seq, 16))),
    Case("gated_and_plain", gated_and_plain, qkv(b=2)),
    Case("any_and_count", any_and_count, qkv()),
    Case("scores_sum_only", scores_sum_only, qkv()),
)
