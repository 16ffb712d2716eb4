"""Biases and scores other than a plain dot product. q, k, v are [b,h,s,d]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, Draw, qkv, qkv_and


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes [h]; causal."""
    i = torch.arange(q.shape[-2], device=q.device)
    distance = i[None, :] - i[:, None]
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + slopes[:, None, None] * distance
    return scores.masked_fill(distance > 0, float("-inf")).softmax(-1) @ v


def t5_bucket(relative_position: Tensor, num_buckets: int = 32, max_distance: int = 100) -> Tensor:
    """T5's bidirectional buckets. At T5's own max_distance of 128 the edges at 16, 32 and 64 hang on the last
    bit of `log`, which is no property to test a compiler by; hence 100."""
    num_buckets //= 2
    buckets = (relative_position > 0).to(torch.long) * num_buckets
    n = torch.abs(relative_position)
    max_exact = num_buckets // 2
    large = max_exact + (
        torch.log(n.float() / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    ).to(torch.long)
    large = torch.min(large, torch.full_like(large, num_buckets - 1))
    return buckets + torch.where(n < max_exact, n, large)


def t5_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [32,h]: the bias of each bucket; T5 does not scale."""
    context = torch.arange(q.shape[-2], device=q.device)[:, None]
    memory = torch.arange(k.shape[-2], device=q.device)[None, :]
    bias = F.embedding(t5_bucket(memory - context), table).permute(2, 0, 1).unsqueeze(0)
    return F.softmax(q @ k.transpose(3, 2) + bias, dim=-1) @ v


def relative_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [h,2*32+1]: a bias by clipped distance (Shaw, scalar form)."""
    i = torch.arange(q.shape[-2], device=q.device)
    distance = (i[None, :] - i[:, None]).clamp(-32, 32) + 32
    return (q @ k.mT / math.sqrt(q.shape[-1]) + table[:, distance]).softmax(-1) @ v


def relative_keys(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [2*8+1,d]: Shaw's relative keys, an embedding a distance."""
    i = torch.arange(q.shape[-2], device=q.device)
    rel = table[(i[None, :] - i[:, None]).clamp(-8, 8) + 8]
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rel)
    return (scores / math.sqrt(q.shape[-1])).softmax(-1) @ v


def relative_vectors(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """table [2*n-1,d]: an embedding of every distance."""
    i = torch.arange(q.shape[-2], device=q.device)
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, table[i[:, None] - i + len(i) - 1])
    return (scores / math.sqrt(q.shape[-1])).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma 2, causal."""
    scores = 5.0 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 5.0)
    mask = torch.triu(torch.ones_like(scores[0, 0], dtype=torch.bool), diagonal=1)
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def dense_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """bias [1,h,sq,sk], learned."""
    return (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rope(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """cos, sin [s,d]; causal."""
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rope_interleaved(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """cos, sin [s,d/2]; pairs of neighbours are turned (GPT-J)."""

    def turn(x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    return (turn(q) @ turn(k).mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def cosine(q: Tensor, k: Tensor, v: Tensor, logit_scale: Tensor) -> Tensor:
    """Swin v2: logit_scale [h,1,1], clamped."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.clamp(logit_scale, max=math.log(100.0)).exp()
    return scores.softmax(dim=-1) @ v


def qk_norm(q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor) -> Tensor:
    """wq, wk [d]: RMSNorm of queries and keys."""
    q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * wq
    k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6) * wk
    return F.scaled_dot_product_attention(q, k, v)


def forgetting(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
    """Forgetting Transformer: log_f [b,h,s], already cumulative."""
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + log_f[..., :, None] - log_f[..., None, :]
    i = torch.arange(q.shape[-2], device=q.device)
    return scores.masked_fill(i[:, None] < i[None, :], float("-inf")).softmax(-1) @ v


def forgetting_gates(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """gate [b,h,s]; the sum over time is linear in size and stays with PyTorch."""
    return forgetting(q, k, v, torch.cumsum(F.logsigmoid(gate), dim=-1))


def talking_heads(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    """mix [h,h], before the softmax."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,hg->bgij", scores, mix).softmax(-1) @ v


def gaussian_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of the negative squared distance, by torch.cdist's formula written out."""
    square = (q * q).sum(-1, keepdim=True) - 2 * q @ k.mT + (k * k).sum(-1)[..., None, :]
    return (-0.1 * square).softmax(-1) @ v


def gaussian_by_difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same scores by differences, with a Nadaraya-Watson normaliser."""
    weights = torch.exp(-0.1 * ((q[:, :, :, None] - k[:, :, None]) ** 2).sum(-1))
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


def l1_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = (q.unsqueeze(3) - k.unsqueeze(2)).abs().sum(-1)
    return F.softmax(-distance / q.shape[-1], dim=-1) @ v


def bahdanau(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Additive scores tanh(q_i + k_j) @ w, w [d]."""
    return F.softmax(torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ w, dim=-1) @ v


def adaptive_temperature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A temperature of each row's own, from the row's largest score."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    temperature = 1.0 + scores.amax(-1, keepdim=True).relu()
    return (scores / temperature).softmax(-1) @ v


def standardised_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of scores with the row's mean taken off and its deviation divided out."""
    scores = q @ k.mT
    centred = scores - scores.mean(-1, keepdim=True)
    return (centred / (centred.pow(2).mean(-1, keepdim=True) + 1.0).sqrt()).softmax(-1) @ v


def polynomial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights (q.k / sqrt(d))^4, normalised by their sum: PolySketchFormer's exact form, causal."""
    weights = torch.tril((q @ k.mT / math.sqrt(q.shape[-1])) ** 4)
    return weights @ v / (1.0 + weights.sum(-1, keepdim=True))


def _slopes(g: Draw) -> Tensor:
    return g.values(0.25, 0.0625)


def _rope(g: Draw, d: int, repeat: bool) -> tuple[Tensor, ...]:
    freq = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(g.seq, dtype=torch.float64)[:, None] * freq
    angle = torch.cat((angle, angle), -1) if repeat else angle
    return tuple(t.to(g.dtype).to(g.device) for t in (angle.cos(), angle.sin()))


def gaussian_window(centres: Tensor, v: Tensor) -> Tensor:
    """Weights by each row's own centre among positions (integers); centres [b,h,s] from 0 to 1, v [b,h,s,d]."""
    j = torch.arange(v.shape[-2], device=v.device)
    w = torch.exp(-((j - centres[..., None] * v.shape[-2]) ** 2) / 8)
    return (w / w.sum(-1, keepdim=True)) @ v


def by_time_apart(times: Tensor, v: Tensor) -> Tensor:
    """Weights by how far apart moments are; times [s] are integers, v [b,h,s,d]."""
    return (-0.1 * (times[:, None] - times).abs()).softmax(-1).to(v.dtype) @ v


def waves(e: Tensor) -> Tensor:
    """Phases less positions, added up by row; e [b,h,s]."""
    return (e[..., None, :] - torch.arange(e.shape[-1], device=e.device)[:, None]).sin().sum(-1)


CASES = (
    Case("alibi", alibi, qkv_and(_slopes)),
    Case("t5_bias", t5_bias, qkv_and(lambda g: g.normal(32, 2))),
    Case("relative_table", relative_table, qkv_and(lambda g: g.normal(2, 65))),
    Case("relative_keys", relative_keys, qkv_and(lambda g: g.normal(17, 16)), kernels=None),
    Case("relative_vectors", relative_vectors, qkv_and(lambda g: g.normal(2 * g.seq - 1, 16))),
    Case("softcap", softcap, qkv(d=32)),
    Case("dense_bias", dense_bias, qkv_and(lambda g: g.normal(1, 2, g.seq, g.seq), b=2)),
    Case("rope", rope, lambda g: (*qkv(d=32)(g), *_rope(g, 32, True))),
    Case("rope_interleaved", rope_interleaved, lambda g: (*qkv(d=32)(g), *_rope(g, 32, False))),
    Case("cosine", cosine, qkv_and(lambda g: g.uniform(2, 1, 1, low=1.0, high=3.0))),
    Case("qk_norm", qk_norm, qkv_and(lambda g: g.uniform(16, low=0.5, high=1.5), lambda g: g.uniform(16, low=0.5))),
    Case("forgetting", forgetting, qkv_and(lambda g: -g.uniform(1, 2, g.seq, high=0.2).cumsum(-1))),
    Case("forgetting_gates", forgetting_gates, qkv_and(lambda g: g.normal(1, 2, g.seq) + 3)),
    Case("talking_heads", talking_heads, qkv_and(lambda g: g.normal(2, 2)), kernels=None),
    Case("gaussian_kernel", gaussian_kernel, qkv()),
    Case("gaussian_by_difference", gaussian_by_difference, qkv(h=1)),
    Case("l1_distance", l1_distance, qkv(h=1)),
    Case("bahdanau", bahdanau, qkv_and(lambda g: g.normal(16), h=1)),
    Case("adaptive_temperature", adaptive_temperature, qkv()),
    Case("standardised_scores", standardised_scores, qkv()),
    Case("polynomial", polynomial, qkv()),
    Case("gaussian_window", gaussian_window, lambda g: (g.uniform(1, 2, g.seq), g.normal(1, 2, g.seq, 16))),
    Case("by_time_apart", by_time_apart, lambda g: (g.ints(0, 1000, g.seq), g.normal(1, 2, g.seq, 16))),
    Case("waves", waves, lambda g: (g.normal(1, 2, g.seq),)),
)
