"""Weights made otherwise than by a softmax call, and semirings other than (+, x). q, k, v are [b,h,s,d]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, Draw, qkv, qkv_and


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def _causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v


def softmax_late_division(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k).masked_fill(~_causal(q, k), float("-inf"))
    weights = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def softmax_unsafe(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No maximum taken off."""
    weights = torch.exp(_scores(q, k))
    return weights @ v / weights.sum(-1, keepdim=True)


def softmax_base_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k) * math.log2(math.e)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def softmax_by_logs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.exp(F.log_softmax(_scores(q, k), dim=-1)) @ v


def softmax_by_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def softmax_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """1 + sum in the denominator: a key of score 0 and value 0, safely."""
    scores = _scores(q, k)
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    weights = torch.exp(scores - top)
    return weights @ v / (torch.exp(-top) + weights.sum(-1, keepdim=True))


def sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """gpt-oss: sinks [h], a logit that joins the softmax and is dropped after it; causal."""
    scores = _scores(q, k).masked_fill(~_causal(q, k), float("-inf"))
    sinks = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([scores, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1] @ v


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Apple's sigmoid attention, bias -log(n)."""
    return torch.sigmoid(_scores(q, k) - math.log(k.shape[-2])) @ v


def sigmoid_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bias by the number of keys each row sees."""
    n = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=q.dtype)[:, None]
    return torch.sigmoid(_scores(q, k) - torch.log(n)).masked_fill(~_causal(q, k), 0.0) @ v


def yoso(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """YOSO's expectation: how often two random hyperplanes put query and key on one side."""
    cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return F.normalize((1 - torch.acos(0.99 * cosine) / math.pi) ** 4 @ v, dim=-1)


def squared_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Primer / FLASH: relu(s)^2 / n, no row normaliser."""
    return (F.relu(_scores(q, k)) ** 2 / k.shape[-2]) @ v


def _on_a_grid(g: Draw) -> tuple[Tensor, ...]:
    """q, k, v in eighths: scores are exact in every type, and so is the side of the kink that each lies on."""
    return tuple((x * 8).round() / 8 for x in qkv()(g))


def relu_normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.relu(_scores(q, k))
    return (weights / (weights.sum(dim=-1, keepdim=True) + 1e-3)) @ v


def softplus_normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softplus(_scores(q, k)).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def l2_normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights divided by their Euclidean length."""
    return F.normalize(_scores(q, k), p=2, dim=-1) @ v


def linear_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos: feature map elu + 1, quadratic form."""
    weights = torch.tril((F.elu(q) + 1) @ (F.elu(k) + 1).mT)
    return weights @ v / (weights.sum(dim=-1, keepdim=True) + 1e-6)


def retention(q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor) -> Tensor:
    """RetNet's parallel form: log_gamma [h], decay gamma^(i-j)."""
    i = torch.arange(q.shape[-2], device=q.device)
    distance = (i[:, None] - i[None, :]).to(q.dtype)
    distance = torch.masked_fill(distance, i[:, None] < i[None, :], float("inf"))
    decay = torch.nan_to_num(torch.exp(distance * log_gamma[:, None, None]))
    return (_scores(q, k) * decay) @ v


def retention_power(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """The same by a power: gamma [h]."""
    i = torch.arange(q.shape[-2], device=q.device)
    distance = i[:, None] - i[None, :]
    decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0.0)
    return (_scores(q, k) * decay) @ v


def retention_normalised(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """With torchscale's row normaliser, max(|row sum|, 1)."""
    i = torch.arange(q.shape[-2], device=q.device)
    distance = i[:, None] - i[None, :]
    scores = _scores(q, k) * torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0.0)
    return (scores / scores.detach().sum(dim=-1, keepdim=True).abs().clamp(min=1)) @ v


def max_plus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tropical in both products: s_ij = max_d (q + k), out_id = max_j (s_ij + v_jd)."""
    scores = (q[:, :, :, None] + k[:, :, None]).amax(-1)
    return (scores[..., None] + v[:, :, None]).amax(-2)


def max_plus_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tropical scores under a softmax."""
    return (q[:, :, :, None] + k[:, :, None]).amax(-1).softmax(-1) @ v


def min_plus_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dot-product scores, out_id = min_j (v_jd - s_ij)."""
    return (v[:, :, None] - _scores(q, k)[..., None]).min(dim=-2).values


def max_times(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """max_j of softmax weight times a positive value."""
    return (_scores(q, k).softmax(-1)[..., None] * v.abs()[:, :, None]).amax(-2)


def thresholded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights below their row's mean are zeroed, the rest lose the mean: continuous, unlike a bare cut."""
    p = _scores(q, k).softmax(-1)
    mean = p.mean(dim=-1, keepdim=True)
    return torch.where(p > mean, p - mean, 0.0) @ v


def two_softmax_mixture(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """gate [b,h,s,1] mixes a local and a global softmax over the same scores."""
    scores = _scores(q, k)
    i = torch.arange(q.shape[-2], device=q.device)
    near = (i[:, None] - i[None, :]).abs() < 16
    g = torch.sigmoid(gate)
    weights = g * scores.masked_fill(~near, float("-inf")).softmax(-1) + (1 - g) * scores.softmax(-1)
    return weights @ v


def sharpened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax weights squared and normalised again: a second normaliser that depends on the first."""
    p = _scores(q, k).softmax(-1) ** 2
    return p / p.sum(-1, keepdim=True) @ v


def _gamma(g: Draw) -> Tensor:
    return 1 - 2 ** g.values(-3.0, -5.0)


CASES = (
    Case("softmax_by_hand", softmax_by_hand, qkv(d=32)),
    Case("softmax_late_division", softmax_late_division, qkv()),
    Case("softmax_unsafe", softmax_unsafe, qkv()),
    Case("softmax_base_2", softmax_base_2, qkv()),
    Case("softmax_by_logs", softmax_by_logs, qkv()),
    Case("softmax_by_lse", softmax_by_lse, qkv()),
    Case("softmax_one", softmax_one, qkv()),
    Case("sink", sink, qkv_and(lambda g: g.normal(2), b=2)),
    Case("sigmoid", sigmoid, qkv(d=32)),
    Case("sigmoid_causal", sigmoid_causal, qkv()),
    Case("yoso", yoso, qkv()),
    Case("squared_relu", squared_relu, qkv()),
    Case("relu_normalised", relu_normalised, _on_a_grid),
    Case("softplus_normalised", softplus_normalised, qkv()),
    Case("l2_normalised", l2_normalised, qkv()),
    Case("linear_causal", linear_causal, qkv()),
    Case("retention", retention, qkv_and(lambda g: _gamma(g).log())),
    Case("retention_power", retention_power, qkv_and(_gamma)),
    Case("retention_normalised", retention_normalised, qkv_and(_gamma)),
    Case("max_plus", max_plus, qkv(h=1)),
    Case("max_plus_scores", max_plus_scores, qkv(h=1)),
    Case("min_plus_values", min_plus_values, qkv(h=1)),
    Case("max_times", max_times, qkv(h=1)),
    Case("thresholded", thresholded, qkv()),
    Case("two_softmax_mixture", two_softmax_mixture, qkv_and(lambda g: g.normal(1, 2, g.seq, 1))),
    Case("sharpened", sharpened, qkv()),
)
