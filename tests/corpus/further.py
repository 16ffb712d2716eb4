"""Further programs, as papers and users write them: kernels of other shapes, moments, losses, in-place forms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, Inputs, qkv, qkv_and


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def taylor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Based: the exponential's second-order expansion, causal, normalised by its sum."""
    s = _scores(q, k)
    w = (1 + s + s * s / 2) * torch.ones(q.shape[-2], k.shape[-2], device=q.device, dtype=q.dtype).tril()
    return (w @ v) / w.sum(-1, keepdim=True)


def cosformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device, dtype=torch.float32)
    near = torch.cos(math.pi / 2 * (i[:, None] - i[None, :]) / q.shape[-2]).to(q.dtype)
    w = (F.relu(q) @ F.relu(k).mT) * near
    return w @ v / (w.sum(-1, keepdim=True) + 1)


def slot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slot attention: queries compete for keys, then each takes a mean."""
    a = torch.softmax(_scores(q, k), dim=-2) + 1e-3
    return (a / a.sum(-1, keepdim=True)) @ v


def mean_shift(q: Tensor, k: Tensor) -> Tensor:
    """One step towards the mode, under a Gaussian kernel."""
    distance = (q[..., :, None, :] - k[..., None, :, :]).pow(2).sum(-1)
    w = torch.exp(-distance / 8)
    return (w @ k) / w.sum(-1, keepdim=True)


def kerple(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    bias = -0.3 * torch.log(1 + 0.5 * (i[:, None] - i[None, :]).abs())
    return torch.softmax(_scores(q, k) + bias.to(q.dtype), -1) @ v


def shifted_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Swin: windows of 8 on a ring, shifted by 3, others pushed away by -100."""
    window = ((torch.arange(q.shape[-2], device=q.device) + 3) % q.shape[-2]) // 8
    return torch.softmax(_scores(q, k).masked_fill(window[:, None] != window[None, :], -100.0), -1) @ v


def product_of_softmaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    w = torch.softmax(s, -1) * torch.softmax(-0.5 * s, -1)
    return w @ v / w.sum(-1, keepdim=True)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.mT)
    s.div_(math.sqrt(q.shape[-1])).sub_(s.amax(-1, keepdim=True)).exp_()
    s.div_(s.sum(-1, keepdim=True))
    return s @ v


def written_by_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores under a mask over both sides, and rows under one over the batch and the queries, are written to."""
    b, _, n, d = q.shape
    i = torch.arange(n, device=q.device)
    s = q @ k.mT / math.sqrt(d)
    s[..., i[:, None] < i[None, :]] = -math.inf
    out = (s.softmax(-1) @ v).transpose(1, 2).contiguous()
    out[(i % 5 == 3).expand(b, n)] = 0
    return out


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = q.shape
    mask = torch.full((n, k.shape[-2]), -1e4, device=q.device, dtype=q.dtype).triu(1)
    flat = [t.reshape(b * h, -1, t.shape[-1]) for t in (q, k, v)]
    s = torch.baddbmm(mask.expand(b * h, -1, -1), flat[0], flat[1].mT, alpha=1 / math.sqrt(d))
    return torch.bmm(s.softmax(-1), flat[2]).view(b, h, n, -1)


def cubic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    return ((s**3 + s) @ v) / k.shape[-2]


def expected_position(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Where a query looks on average, as a share of the sequence, beside its output."""
    p = torch.softmax(_scores(q, k), -1)
    j = torch.arange(k.shape[-2], device=q.device, dtype=q.dtype) / k.shape[-2]
    return p @ v, p @ j


def scalable_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SSMax: scores grow with the logarithm of how many keys a query sees."""
    n = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=torch.float32)
    s = _scores(q, k) * torch.log(n + 1)[:, None].to(q.dtype)
    hidden = torch.ones(q.shape[-2], k.shape[-2], device=q.device, dtype=torch.bool).triu(1)
    return s.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def contrastive(q: Tensor, k: Tensor) -> Tensor:
    """InfoNCE over the sequence: log-sum-exp of a row less its diagonal."""
    logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / 0.5
    return torch.logsumexp(logits, -1) - logits.diagonal(dim1=-2, dim2=-1)


def two_hops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to what has attended (multi-hop attention; diffusion along a graph)."""
    i = torch.arange(q.shape[-2], device=q.device)
    p = _scores(q, k).masked_fill(i[:, None] < i, -math.inf).softmax(-1)
    return 0.9 * (p @ (0.9 * (p @ v) + 0.1 * v)) + 0.1 * v


def there_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys collect from queries what these take back from them."""
    p = _scores(q, k).softmax(-1)
    return p @ (p.mT @ v)


def co_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Each side attends to the other, and then to what the other has seen (dynamic coattention)."""
    s = _scores(q, k)
    to_keys, to_queries = s.softmax(-1), s.softmax(-2)
    return to_keys @ v, to_keys @ (to_queries.mT @ q)


def key_gate(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """gate [b,h,s,1]: how much of a key is open, in log space."""
    return torch.softmax(_scores(q, k) + F.logsigmoid(gate).mT, -1) @ v


def _pair(inputs: Inputs) -> Inputs:
    """q and k alone."""
    return lambda g: inputs(g)[:2]


CASES = (
    Case("taylor_scores", taylor, qkv()),
    Case("cosformer", cosformer, qkv()),
    Case("slot", slot, qkv(), kernels=2),
    Case("mean_shift", mean_shift, _pair(qkv())),
    Case("kerple", kerple, qkv()),
    Case("shifted_windows", shifted_windows, qkv()),
    Case("product_of_softmaxes", product_of_softmaxes, qkv()),
    Case("in_place", in_place, qkv()),
    Case("written_by_masks", written_by_masks, qkv(b=2)),
    Case("baddbmm", baddbmm, qkv()),
    Case("cubic", cubic, qkv()),
    Case("expected_position", expected_position, qkv()),
    Case("scalable_softmax", scalable_softmax, qkv()),
    Case("contrastive_rows", contrastive, _pair(qkv())),
    Case("two_hops", two_hops, qkv(), kernels=None),
    Case("there_and_back", there_and_back, qkv(), kernels=None),
    Case("co_attention", co_attention, qkv(), kernels=None),
    Case("key_gate", key_gate, qkv_and(lambda g: g.normal(1, 2, g.seq, 1))),
)
