"""FlexAttention's seven variants: as plain PyTorch, as score_mod and mask_mod, as SDPA; full or grouped heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import Problem, nbytes

CAP, WINDOW, PREFIX = 30.0, 256, 256
# Relative lengths of the twelve documents; each batch element begins elsewhere in the list.
DOCUMENTS = (5, 1, 9, 3, 12, 7, 2, 10, 4, 8, 6, 11)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """q [b,h,s,d] against k [b,g,t,d], each of whose heads serves h / g of q's: [b,h,s,t]."""
    groups = k.shape[1]
    if groups == q.shape[1]:
        return q @ k.mT / math.sqrt(q.shape[-1])
    grouped = q.unflatten(1, (groups, -1)) @ k[:, :, None].mT
    return grouped.flatten(1, 2) / math.sqrt(q.shape[-1])


def weigh(weights: Tensor, v: Tensor) -> Tensor:
    """weights [b,h,s,t] times v [b,g,t,d]: [b,h,s,d]."""
    groups = v.shape[1]
    if groups == weights.shape[1]:
        return weights @ v
    return (weights.unflatten(1, (groups, -1)) @ v[:, :, None]).flatten(1, 2)


def positions(q: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [s,1] and columns [1,s] of the score matrix."""
    i = torch.arange(q.shape[-2], device=q.device)
    return i[:, None], i[None, :]


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Softmax attention over the keys that `keep` leaves."""
    return weigh(scores_of(q, k).masked_fill(~keep, -math.inf).softmax(-1), v)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(scores_of(q, k).softmax(-1), v)


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes [h], float32; the bias outgrows bfloat16, so the softmax is in float32."""
    i, j = positions(q)
    scores = scores_of(q, k).float() + slopes[:, None, None] * (j - i)
    return weigh(scores.softmax(-1).to(v.dtype), v)


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh((CAP * torch.tanh(scores_of(q, k) / CAP)).softmax(-1), v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q)
    return masked(q, k, v, i >= j)


def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q)
    return masked(q, k, v, (i >= j) & (i - j <= WINDOW))


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = positions(q)
    return masked(q, k, v, (i >= j) | (j < PREFIX))


def documents(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
    """doc [b,s]: the document of each token."""
    return masked(q, k, v, doc[:, None, :, None] == doc[:, None, None, :])


def document_lengths(seq: int, batch: int) -> list[int]:
    """Lengths in tokens of the documents of one batch element."""
    turned = [DOCUMENTS[(batch + n) % len(DOCUMENTS)] for n in range(len(DOCUMENTS))]
    ends = [round(seq * sum(turned[: n + 1]) / sum(DOCUMENTS)) for n in range(len(DOCUMENTS))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def document_ids(b: int, seq: int, device: torch.device) -> Tensor:
    """int32 [b, seq]."""
    rows = [torch.repeat_interleave(torch.arange(12), torch.tensor(document_lengths(seq, n))) for n in range(b)]
    return torch.stack(rows).to(device, torch.int32)


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device, dtype=torch.float32) / heads)


@dataclass(frozen=True)
class Variant:
    """One of the seven.

    Attributes:
      extra: (b, h, s, device) → further inputs, their axes in `extra_axes`.
      pairs: (b, s) → pairs of query and key that count, in all batches, for one head.
      score_mod, mask_mod: given the further inputs, FlexAttention's functions.
      per_batch: whether the mask differs among batches.
      bias: given the further inputs and s, what SDPA takes as attn_mask.
    """

    plain: Callable[..., Tensor]
    pairs: Callable[[int, int], float]
    extra: Callable[[int, int, int, torch.device], tuple[Tensor, ...]] = lambda b, h, s, device: ()
    extra_axes: tuple[str, ...] = ()
    score_mod: Callable[..., Callable[..., Tensor]] | None = None
    mask_mod: Callable[..., Callable[..., Tensor]] | None = None
    per_batch: bool = False
    bias: Callable[..., Tensor] | None = None


def _alibi_mod(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + slopes[h] * (j - i)


def _softcap_mod() -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)


def _documents_mod(doc: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: doc[b, i] == doc[b, j]


def _grid(mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mask that a mask_mod of positions alone describes: bool [s,s]."""

    def mask(s: int, device: torch.device) -> Tensor:
        i = torch.arange(s, device=device)
        return mod(None, None, i[:, None], i[None, :])

    return mask


def _positional(
    plain: Callable[..., Tensor], mod: Callable[..., Tensor], pairs: Callable[[int, int], float]
) -> Variant:
    return Variant(plain, pairs, mask_mod=lambda: mod, bias=_grid(mod))


def _prefix_pairs(b: int, s: int) -> float:
    p = min(PREFIX, s)
    return b * (s * (s + 1) / 2 + p * (p - 1) / 2)


def _sliding_pairs(b: int, s: int) -> float:
    w = min(WINDOW, s - 1)
    return b * (s * (w + 1) - w * (w + 1) / 2)


VARIANTS: dict[str, Variant] = {
    "full": Variant(full, lambda b, s: b * s * s),
    "alibi": Variant(
        alibi,
        lambda b, s: b * s * s,
        extra=lambda b, h, s, device: (alibi_slopes(h, device),),
        extra_axes=("h",),
        score_mod=_alibi_mod,
        bias=lambda s, device, slopes: slopes[:, None, None] * _grid(lambda b, h, i, j: j - i)(s, device),
    ),
    "softcap": Variant(softcap, lambda b, s: b * s * s, score_mod=_softcap_mod),
    "causal": _positional(causal, lambda b, h, i, j: i >= j, lambda b, s: b * s * (s + 1) / 2),
    "sliding": _positional(sliding, lambda b, h, i, j: (i >= j) & (i - j <= WINDOW), _sliding_pairs),
    "prefix": _positional(prefix, lambda b, h, i, j: (i >= j) | (j < PREFIX), _prefix_pairs),
    "documents": Variant(
        documents,
        lambda b, s: sum(n * n for batch in range(b) for n in document_lengths(s, batch)),
        extra=lambda b, h, s, device: (document_ids(b, s, device),),
        extra_axes=("bs",),
        mask_mod=_documents_mod,
        per_batch=True,
        bias=lambda s, device, doc: doc[:, None, :, None] == doc[:, None, None, :],
    ),
}
MASKED = tuple(name for name, v in VARIANTS.items() if v.mask_mod is not None)


def attention(
    name: str, b: int, h: int, s: int, d: int, device: torch.device, dtype: torch.dtype, kv_heads: int | None = None
) -> Problem:
    """A variant on random q [b,h,s,d], k, v [b,kv_heads,s,d]; fewer kv_heads are shared by groups of h / kv_heads."""
    variant, g = VARIANTS[name], kv_heads or h
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, n, s, d, device=device, dtype=dtype) for n in (h, g, g))
    extra = variant.extra(b, h, s, device)
    score_mod = variant.score_mod(*extra) if variant.score_mod else None
    grouped = g != h

    def flex(attend: Callable[..., Tensor], mask: object, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return attend(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)

    def sdpa() -> Callable[..., Tensor]:
        bias = variant.bias(s, device, *extra) if variant.bias and name != "causal" else None
        if bias is not None and bias.is_floating_point():
            bias = bias.to(dtype)
        return lambda q, k, v, *_: F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=name == "causal", enable_gqa=grouped
        )

    kv = "bgsd" if grouped else "bhsd"
    return Problem(
        plain=variant.plain,
        inputs=(q, k, v, *extra),
        axes=("bhsd", kv, kv, *variant.extra_axes),
        out_axes=("bhsd",),
        flops=4 * variant.pairs(b, s) * h * d,
        bytes=nbytes(q, k, v, q, *extra),
        scores=b * h * s * s,
        flex=flex,
        mask_mod=variant.mask_mod(*extra) if variant.mask_mod else None,
        mask_shape=(b if variant.per_batch else None, s, s),
        sdpa=None if name == "softcap" else sdpa,
    )
