"""Masks: by position, by data, given as tensors. q, k, v are [b,h,s,d]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, Draw, qkv, qkv_and


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Query positions [sq,1] and key positions [1,sk]."""
    return torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=k.device)[None, :]


def _masked_softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return _scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def sliding_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = _positions(q, k)
    return _masked_softmax(q, k, v, (j <= i) & (i - j < 32))


def local_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both sides, by the absolute distance."""
    i, j = _positions(q, k)
    return _masked_softmax(q, k, v, (i - j).abs() <= 20)


def banded_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mistral's spelling: tril and triu of ones, then a logarithm."""
    ones = torch.ones(q.shape[-2], k.shape[-2], dtype=q.dtype, device=q.device)
    band = torch.triu(torch.tril(ones), diagonal=-32)
    return F.softmax(_scores(q, k) + torch.log(band), dim=-1) @ v


def prefix_lm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = _positions(q, k)
    return _masked_softmax(q, k, v, (j <= i) | (j < 12))


def prefix_lm_lengths(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor) -> Tensor:
    """prefix int [b]: each sequence has its own."""
    i, j = _positions(q, k)
    return _masked_softmax(q, k, v, ((j <= i) | (j < prefix[:, None, None]))[:, None])


def document_causal(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
    """doc int [b,s], ascending: packed sequences."""
    i, j = _positions(q, k)
    same = doc[:, None, :, None] == doc[:, None, None, :]
    return _masked_softmax(q, k, v, same & (i >= j))


def segments_unsorted(q: Tensor, k: Tensor, v: Tensor, seg: Tensor) -> Tensor:
    """seg int [b,s] in any order."""
    return _masked_softmax(q, k, v, (seg.unsqueeze(-1) == seg.unsqueeze(-2)).unsqueeze(1))


def padding_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """lengths int [b] >= 1."""
    keep = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    return _masked_softmax(q, k, v, keep[:, None, None, :])


def padding_bert(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
    """BERT's extended mask: attention_mask int [b,s] of 0 and 1, the first always 1."""
    extended = (1.0 - attention_mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return F.softmax(_scores(q, k) + extended, dim=-1) @ v


def additive_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """mask float [b,1,sq,sk]."""
    return torch.softmax(_scores(q, k) + mask, dim=-1) @ v


def sdpa_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """mask bool [sq,sk] or float [b,1,sq,sk]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def masked_rows(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """keep bool [b,s] of *queries*: rows masked whole give NaN."""
    return _masked_softmax(q, k, v, keep[:, None, :, None])


def masked_rows_zeroed(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The same rows, made zero by nan_to_num."""
    weights = _scores(q, k).masked_fill(~keep[:, None, :, None], float("-inf")).softmax(-1)
    return torch.nan_to_num(weights, nan=0.0) @ v


def neighbourhood_2d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tokens of a picture 8 wide: 5 x 5 around each."""
    i, j = _positions(q, k)
    near = ((i // 8 - j // 8).abs() <= 2) & ((i % 8 - j % 8).abs() <= 2)
    return _masked_softmax(q, k, v, near)


def dilated_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = _positions(q, k)
    distance = i - j
    return _masked_softmax(q, k, v, (distance >= 0) & (distance < 48) & (distance % 4 == 0))


def strided_sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sparse Transformer, strided: a local block and every 16th column, causal."""
    i, j = _positions(q, k)
    return _masked_softmax(q, k, v, (j <= i) & ((i - j < 16) | (j % 16 == 15)))


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama 4's chunks of 64, causal inside."""
    i, j = _positions(q, k)
    return _masked_softmax(q, k, v, (i // 64 == j // 64) & (j <= i))


def global_and_local(q: Tensor, k: Tensor, v: Tensor, is_global: Tensor) -> Tensor:
    """Longformer: is_global bool [b,s] tokens see all and are seen by all."""
    i, j = _positions(q, k)
    keep = ((i - j).abs() < 16) | is_global[:, :, None] | is_global[:, None, :]
    return _masked_softmax(q, k, v, keep[:, None])


def cache_offset(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries are the last of the keys: causal with an offset."""
    i, j = _positions(q, k)
    return _masked_softmax(q, k, v, j <= i + (k.shape[-2] - q.shape[-2]))


def _documents(g: Draw) -> Tensor:
    return g.ints(0, 5, 2, g.seq).sort(-1).values


def _float_mask(g: Draw) -> Tensor:
    """[2,1,s,s]: random floats, a third of them -inf, the diagonal kept."""
    keep = g.bools(2, 1, g.seq, g.seq) | torch.eye(g.seq, dtype=torch.bool, device=g.device)
    return g.normal(2, 1, g.seq, g.seq).masked_fill(~keep, float("-inf"))


def _bool_mask(g: Draw) -> Tensor:
    return g.bools(g.seq, g.seq) | torch.eye(g.seq, dtype=torch.bool, device=g.device)


def _ones_then_zeros(g: Draw) -> Tensor:
    return (torch.arange(g.seq, device=g.device) < g.lengths(2)[:, None]).long()


def _cached(g: Draw) -> tuple[Tensor, ...]:
    sq = (g.seq + 1) // 2
    return g.normal(1, 2, sq, 16), g.normal(1, 2, g.seq, 16), g.normal(1, 2, g.seq, 16)


CASES = (
    Case("sliding_window", sliding_window, qkv(d=32)),
    Case("local_window", local_window, qkv()),
    Case("banded_ones", banded_ones, qkv()),
    Case("prefix_lm", prefix_lm, qkv()),
    Case("prefix_lm_lengths", prefix_lm_lengths, qkv_and(lambda g: g.lengths(2), b=2)),
    Case("document_causal", document_causal, qkv_and(_documents, b=2)),
    Case("segments_unsorted", segments_unsorted, qkv_and(lambda g: g.ints(0, 3, 2, g.seq), b=2)),
    Case("padding_lengths", padding_lengths, qkv_and(lambda g: g.lengths(2), b=2)),
    Case("padding_bert", padding_bert, qkv_and(_ones_then_zeros, b=2)),
    Case("additive_mask", additive_mask, qkv_and(_float_mask, b=2)),
    Case("sdpa_bool_mask", sdpa_mask, qkv_and(_bool_mask)),
    Case("sdpa_float_mask", sdpa_mask, qkv_and(_float_mask, b=2)),
    Case("sdpa_masked_rows", sdpa_mask, qkv_and(lambda g: g.bools(g.seq, 1).expand(g.seq, g.seq))),
    Case("masked_rows", masked_rows, qkv_and(lambda g: g.bools(1, g.seq))),
    Case("masked_rows_zeroed", masked_rows_zeroed, qkv_and(lambda g: g.bools(1, g.seq))),
    Case("neighbourhood_2d", neighbourhood_2d, qkv()),
    Case("dilated_window", dilated_window, qkv()),
    Case("strided_sparse", strided_sparse, qkv()),
    Case("chunked", chunked, qkv()),
    Case("global_and_local", global_and_local, qkv_and(lambda g: g.bools(2, g.seq, p=0.05), b=2)),
    Case("cache_offset", cache_offset, _cached),
)
