"""Softmax attention: spellings, causality, grouped heads, layouts and head dims. q, k, v are [b,h,s,d]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Draw, qkv


def vanilla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v


def causal_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5
    keep = torch.tril(torch.ones(q.size(-2), k.size(-2), device=q.device))
    return F.softmax(scores.masked_fill(keep == 0, float("-inf")), dim=-1) @ v


def causal_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    i = torch.arange(q.shape[-2], device=q.device)
    j = torch.arange(k.shape[-2], device=q.device)
    scores = torch.where(i[:, None] >= j[None, :], scores, float("-inf"))
    return scores.softmax(-1) @ v


def causal_triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.triu(torch.full((q.shape[-2], k.shape[-2]), float("-inf"), device=q.device, dtype=q.dtype), diagonal=1)
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1]) + mask
    return torch.matmul(F.softmax(scores, dim=-1), v)


def causal_gpt2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT-2 in Hugging Face: the lowest finite number instead of -inf."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype, device=q.device)
    keep = torch.ones((q.size(-2), k.size(-2)), dtype=torch.bool, device=q.device).tril().view(1, 1, q.size(-2), -1)
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=q.device)
    weights = F.softmax(torch.where(keep, scores, lowest), dim=-1).type(v.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.05)


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def gqa_repeat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """k, v [b,2,s,d], repeated to q's heads."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return vanilla(q, k, v)


def repeat_kv(x: Tensor, n: int) -> Tensor:
    """[b,h,s,d] -> [b,h*n,s,d], as in Llama."""
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def gqa_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama in Hugging Face: softmax in float32, cast back."""
    n = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, repeat_kv(k, n).transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, repeat_kv(v, n)).transpose(1, 2).contiguous()


def gqa_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The group as an axis of its own: q is folded, k and v broadcast."""
    b, h, s, d = q.shape
    q = q.reshape(b, k.shape[1], -1, s, d)
    out = torch.softmax(q @ k[:, :, None].mT / math.sqrt(d), -1) @ v[:, :, None]
    return out.reshape(b, h, s, -1)


def bshd_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [b,s,h,d]; returns [b,s,h*d]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return vanilla(q, k, v).transpose(1, 2).flatten(-2)


def packed_qkv(qkv: Tensor) -> Tensor:
    """qkv [b,s,3,h,d], split by unbind."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return causal_where(q, k, v)


def chunked_projection(x: Tensor, w: Tensor, w_out: Tensor) -> Tensor:
    """x [b,s,32] through a joint projection w [96,32], two heads of 16, and back by w_out [32,32]."""
    b, s, c = x.shape
    q, k, v = (t.view(b, s, 2, c // 2).transpose(1, 2) for t in F.linear(x, w).chunk(3, dim=-1))
    return F.linear(causal_tril(q, k, v).transpose(1, 2).reshape(b, s, c), w_out)


def einsum_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)


def einsum_bshd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [b,s,h,d]."""
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def broadcast_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No matrix product in sight: products of broadcasts, summed."""
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def bmm_3d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [b*h,s,d] through torch.baddbmm, with an empty-bias start."""
    bias = torch.zeros(1, 1, 1, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.25)
    return torch.bmm(scores.softmax(-1), v)


def single_head_2d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [s,d]."""
    return torch.softmax(q @ k.T / math.sqrt(q.shape[-1]), dim=1) @ v


def transposed_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores kept as [b,h,key,query]: the softmax runs over the first of them."""
    scores = k @ q.mT / math.sqrt(q.shape[-1])
    return scores.softmax(dim=-2).mT @ v


def mha() -> nn.Module:
    """nn.MultiheadAttention with key padding."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            """x [b,s,32], padding bool [b,s], True where a key is padding."""
            return self.attn(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    return Layer()


def mha_weights() -> nn.Module:
    """nn.MultiheadAttention as it is called by default: weights, averaged over heads, come beside the result."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            """x [b,s,64]."""
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            return self.attn(x, x, x, attn_mask=hidden)

    return Layer()


def _cross(g: Draw) -> tuple[Tensor, ...]:
    s = 2 * g.seq + 3
    return g.normal(2, 2, g.seq, 16), g.normal(2, 2, s, 16), g.normal(2, 2, s, 16)


def _decode(g: Draw) -> tuple[Tensor, ...]:
    return g.normal(2, 2, 1, 32), g.normal(2, 2, g.seq, 32), g.normal(2, 2, g.seq, 32)


def _bshd(g: Draw) -> tuple[Tensor, ...]:
    return tuple(g.normal(2, g.seq, 2, 16) for _ in range(3))


def _strided(g: Draw) -> tuple[Tensor, ...]:
    """q transposed in its last two dims, k every second row of a longer tensor, v one head expanded to two."""
    q = g.normal(1, 2, 16, g.seq).transpose(-1, -2)
    k = g.normal(1, 2, 2 * g.seq, 24)[:, :, ::2, 4:20]
    v = g.normal(1, 1, g.seq, 16).expand(1, 2, g.seq, 16)
    return q, k, v


def _offset(g: Draw) -> tuple[Tensor, ...]:
    """Slices of one buffer that start at odd offsets."""
    x = g.normal(1, 2, g.seq + 3, 49)
    return x[:, :, 1:-2, :16], x[:, :, 2:-1, 17:33], x[:, :, 3:, 33:]


CASES = (
    Case("vanilla", vanilla, qkv(b=2, h=2, d=32)),
    Case("causal_tril", causal_tril, qkv(b=2)),
    Case("causal_where", causal_where, qkv(d=64)),
    Case("causal_triu", causal_triu, qkv(d=32)),
    Case("causal_gpt2", causal_gpt2, qkv(d=32)),
    Case("sdpa", sdpa, qkv(b=2)),
    Case("sdpa_causal", sdpa_causal, qkv(d=64)),
    Case("sdpa_scale", sdpa_scale, qkv(d=16)),
    Case("sdpa_gqa", sdpa_gqa, qkv(h=4, kv_heads=2)),
    Case("cross", vanilla, _cross),
    Case("sdpa_cross", sdpa, _cross),
    Case("decode_step", vanilla, _decode, kernels=None),
    Case("gqa_repeat", gqa_repeat, qkv(h=4, kv_heads=2)),
    Case("gqa_expand", gqa_expand, qkv(b=2, h=4, kv_heads=2)),
    Case("gqa_grouped", gqa_grouped, qkv(h=4, kv_heads=2, d=32)),
    Case("mqa", vanilla, qkv(h=4, kv_heads=1, d=32)),
    Case("head_dim_24", vanilla, qkv(d=24)),
    Case("head_dim_40", causal_where, qkv(d=40)),
    Case("head_dim_80", sdpa, qkv(h=1, d=80)),
    Case("head_dim_96", vanilla, qkv(h=1, d=96)),
    Case("value_dim_differs", vanilla, qkv(d=16, dv=48)),
    Case("value_dim_1", vanilla, qkv(d=16, dv=1)),
    Case("strided_views", vanilla, _strided),
    Case("offset_slices", causal_where, _offset),
    Case("bshd_layout", bshd_layout, _bshd),
    Case("packed_qkv", packed_qkv, lambda g: (g.normal(1, g.seq, 3, 2, 16),)),
    Case(
        "chunked_projection",
        chunked_projection,
        lambda g: (g.normal(1, g.seq, 32), g.normal(96, 32, scale=0.2), g.normal(32, 32, scale=0.2)),
    ),
    Case("einsum_written", einsum_written, qkv()),
    Case("einsum_bshd", einsum_bshd, _bshd),
    Case("broadcast_products", broadcast_products, qkv(h=1)),
    Case("bmm_3d", bmm_3d, lambda g: tuple(g.normal(3, g.seq, 16) for _ in range(3))),
    Case("single_head_2d", single_head_2d, lambda g: tuple(g.normal(g.seq, 32) for _ in range(3))),
    Case("transposed_softmax", transposed_softmax, qkv()),
    Case(
        "mha_module",
        mha,
        lambda g: (g.normal(2, g.seq, 32), torch.arange(g.seq, device=g.device) >= g.lengths(2)[:, None]),
        module=True,
    ),
    Case("mha_weights", mha_weights, lambda g: (g.normal(2, g.seq, 64),), kernels=None, module=True),
)
