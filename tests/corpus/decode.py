"""Decoding: few queries, the last of a long cache of keys. q is [b,h,s,d], k and v [b,h or fewer,seq,d]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .basic import gqa_repeat, repeat_kv, vanilla
from .case import Case, Draw, Inputs
from .outputs import value_variance_centred, with_entropy, with_lse


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _distance(q: Tensor, k: Tensor) -> Tensor:
    """Positions of the keys, less those of the queries."""
    i = torch.arange(k.shape[-2] - q.shape[-2], k.shape[-2], device=q.device)
    return torch.arange(k.shape[-2], device=q.device) - i[:, None]


def _masked(scores: Tensor, keep: Tensor, v: Tensor) -> Tensor:
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _masked(_scores(q, k), _distance(q, k) <= 0, v)


def gqa_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def gqa_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[1] // k.shape[1]
    return causal(q, repeat_kv(k, n), repeat_kv(v, n))


def gqa_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    out = vanilla(q.view(b, k.shape[1], -1, s, d), k[:, :, None], v[:, :, None])
    return out.view(b, h, s, d)


def gqa_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads repeated as a whole: head h reads head h % n of the keys."""
    n = q.shape[1] // k.shape[1]
    return vanilla(q, k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1))


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _masked(5.0 * torch.tanh(_scores(q, k) / 5.0), _distance(q, k) <= 0, v)


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """slopes [h]; grouped heads."""
    n = q.shape[1] // k.shape[1]
    scores = _scores(q, repeat_kv(k, n)) + slopes[:, None, None] * _distance(q, k)
    return _masked(scores, _distance(q, k) <= 0, repeat_kv(v, n))


def sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """sinks [h], a logit without a value."""
    sinks = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], 1)
    return torch.cat([_scores(q, k), sinks], dim=-1).softmax(-1)[..., :-1] @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = _distance(q, k)
    return _masked(_scores(q, k), (distance <= 0) & (distance > -256), v)


def gqa_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[1] // k.shape[1]
    return window(q, repeat_kv(k, n), repeat_kv(v, n))


def lengths(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """length [b] of the cache that is filled; 0 masks a row whole."""
    keep = torch.arange(k.shape[-2], device=k.device) < length[:, None]
    return _masked(_scores(q, k), keep[:, None, None, :], v)


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(_scores(q, k) - math.log(k.shape[-2])) @ v


def max_plus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (_scores(q, k)[..., None] + v[:, :, None]).amax(-2)


def two_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = _scores(q, k).softmax(-1)
    return weights @ v, weights @ v.square()


def any_and_count(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(q, k)
    high = scores > 2.0
    return high.any(-1), high.sum(-1), scores.softmax(-1) @ v


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """How far the scores lie below their maximum: a sum that moves without a weight."""
    scores = _scores(q, k)
    return (scores - scores.amax(-1, keepdim=True)).sum(-1), scores.softmax(-1) @ v


def paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: Tensor) -> Tensor:
    """k, v [pages, n, h or fewer, d]; table [b, pages of a sequence], which lie anywhere; length [b]."""
    k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in (k, v))
    keep = torch.arange(k.shape[-2], device=k.device) < length[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None], enable_gqa=True)


def quantised_pages(q: Tensor, k: Tensor, ks: Tensor, v: Tensor, vs: Tensor, table: Tensor, length: Tensor) -> Tensor:
    """The same of 8 bits, with a scale for each key of each head: ks, vs [pages, n, h or fewer]."""
    k, v = (
        (x[table].to(q.dtype) * scale[table][..., None]).flatten(1, 2).transpose(1, 2)
        for x, scale in ((k, ks), (v, vs))
    )
    scores = _scores(q.unflatten(1, (k.shape[1], -1)), k[:, :, None])
    keep = torch.arange(k.shape[-2], device=k.device) < length[:, None]
    return _masked(scores, keep[:, None, None, None], v[:, :, None]).flatten(1, 2)


def eight_bits(q: Tensor, k: Tensor, ks: Tensor, v: Tensor, vs: Tensor) -> Tensor:
    """ks, vs [b, h or fewer, seq]: a scale for each key."""
    return gqa_sdpa(q, k.to(q.dtype) * ks[..., None], v.to(q.dtype) * vs[..., None])


def scaled_heads(q: Tensor, k: Tensor, ks: Tensor, v: Tensor, vs: Tensor) -> Tensor:
    """ks, vs [h or fewer]: a scale for each head, of a cache of integers or floats of 8 bits."""
    return gqa_sdpa(q, k.to(q.dtype) * ks[:, None, None], v.to(q.dtype) * vs[:, None, None])


def four_bits(q: Tensor, k: Tensor, ks: Tensor, kz: Tensor, v: Tensor, vs: Tensor, vz: Tensor) -> Tensor:
    """Two numbers in each byte of k and v, with a scale and a zero for each key."""

    def unpacked(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        numbers = torch.stack([x & 15, x >> 4], -1).flatten(-2).to(q.dtype)
        return (numbers - zero[..., None]) * scale[..., None]

    return gqa_sdpa(q, unpacked(k, ks, kz), unpacked(v, vs, vz))


def by_channel(q: Tensor, k: Tensor, ks: Tensor, v: Tensor, vs: Tensor) -> Tensor:
    """Scales of keys for four at a time and each feature, of values for each and eight features (KIVI, arXiv
    2402.02750)."""
    k = (k.unflatten(-2, (-1, 4)).to(q.dtype) * ks[..., None, :]).flatten(-3, -2)
    v = (v.unflatten(-1, (-1, 8)).to(q.dtype) * vs[..., None]).flatten(-2)
    scores = _scores(q.unflatten(1, (k.shape[1], -1)), k[:, :, None])
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)


def cache(sq: int, b: int = 2, h: int = 4, kv_heads: int | None = None, d: int = 32) -> Inputs:
    """`sq` queries against a cache of g.seq keys and values."""

    def inputs(g: Draw) -> tuple[Tensor, ...]:
        kh = kv_heads or h
        return g.normal(b, h, sq, d), g.normal(b, kh, g.seq, d), g.normal(b, kh, g.seq, d)

    return inputs


def _and(base: Inputs, *more: Callable[[Draw], Tensor]) -> Inputs:
    return lambda g: (*base(g), *(make(g) for make in more))


def _cases(sq: int) -> tuple[Case, ...]:
    grouped = cache(sq, h=8, kv_heads=2)
    return (
        Case(f"decode_plain_{sq}", vanilla, cache(sq), 2),
        Case(f"decode_causal_{sq}", causal, cache(sq), 2),
        Case(f"decode_mqa_{sq}", vanilla, cache(sq, h=4, kv_heads=1), 2),
        Case(f"decode_gqa_sdpa_{sq}", gqa_sdpa, grouped, 2),
        Case(f"decode_gqa_repeat_{sq}", gqa_repeat, grouped, 2),
        Case(f"decode_gqa_expand_{sq}", gqa_expand, grouped, 2),
        Case(f"decode_gqa_grouped_{sq}", gqa_grouped, grouped, 2),
        Case(f"decode_gqa_tiled_{sq}", gqa_tiled, cache(sq, h=6, kv_heads=2), 2),
        Case(f"decode_softcap_{sq}", softcap, cache(sq), 2),
        Case(f"decode_alibi_{sq}", alibi, _and(grouped, lambda g: g.uniform(8, low=0.01, high=0.2)), 2),
        Case(f"decode_sink_{sq}", sink, _and(cache(sq), lambda g: g.normal(4)), 2),
        Case(f"decode_window_{sq}", window, cache(sq), 2),
        Case(f"decode_gqa_window_{sq}", gqa_window, grouped, 2),
        Case(f"decode_lengths_{sq}", lengths, _and(cache(sq, b=3), _filled), 2),
        Case(f"decode_entropy_{sq}", with_entropy, cache(sq), 2),
        Case(f"decode_spread_{sq}", spread, cache(sq), 2),
        Case(f"decode_lse_{sq}", with_lse, cache(sq), 2),
        Case(f"decode_sigmoid_{sq}", sigmoid, cache(sq), 2),
        Case(f"decode_two_sums_{sq}", two_sums, cache(sq), 2),
        Case(f"decode_any_and_count_{sq}", any_and_count, cache(sq), 2),
    )


PAGE = 4


def _pages(g: Draw) -> tuple[Tensor, ...]:
    return (
        g.normal(3, 8, 1, 32),
        *(g.normal(3 * g.seq // PAGE, PAGE, 2, 32) for _ in range(2)),
        _table(g),
        _filled(g),
    )


def _quantised_pages(g: Draw) -> tuple[Tensor, ...]:
    shape = (3 * g.seq // PAGE, PAGE, 2)
    kv = (x for _ in range(2) for x in (_bytes(g, *shape, 32), g.uniform(*shape, low=0.005, high=0.02)))
    return g.normal(3, 8, 1, 32), *kv, _table(g), _filled(g).clamp_min(1)


def _table(g: Draw) -> Tensor:
    """Each page belongs to one sequence."""
    return torch.randperm(3 * g.seq // PAGE, generator=g.gen).view(3, -1).to(g.device)


def _bytes(g: Draw, *shape: int) -> Tensor:
    return g.ints(-127, 128, *shape).to(torch.int8)


def _eight_bits(g: Draw) -> tuple[Tensor, ...]:
    kv = (x for _ in range(2) for x in (_bytes(g, 2, 2, g.seq, 32), g.uniform(2, 2, g.seq, low=0.005, high=0.02)))
    return g.normal(2, 8, 1, 32), *kv


def _scaled_heads(dtype: torch.dtype) -> Inputs:
    def inputs(g: Draw) -> tuple[Tensor, ...]:
        def kept() -> Tensor:
            if not dtype.is_floating_point:
                return _bytes(g, 2, 2, g.seq, 32)
            return (g.normal(2, 2, g.seq, 32) * 60).clamp(-440, 440).to(dtype)

        scales = (g.uniform(2, low=0.01, high=0.02) for _ in range(2))
        return g.normal(2, 8, 1, 32), *(x for scale in scales for x in (kept(), scale))

    return inputs


def _four_bits(g: Draw) -> tuple[Tensor, ...]:
    def packed() -> tuple[Tensor, ...]:
        scale, zero = g.uniform(2, 2, g.seq, low=0.1, high=0.3), g.uniform(2, 2, g.seq, low=6, high=9)
        return g.ints(0, 256, 2, 2, g.seq, 16).to(torch.uint8), scale, zero

    return g.normal(2, 8, 1, 32), *packed(), *packed()


def _by_channel(g: Draw) -> tuple[Tensor, ...]:
    keys = _bytes(g, 2, 2, g.seq, 32), g.uniform(2, 2, g.seq // 4, 32, low=0.005, high=0.02)
    values = _bytes(g, 2, 2, g.seq, 32), g.uniform(2, 2, g.seq, 4, low=0.005, high=0.02)
    return g.normal(2, 8, 1, 32), *keys, *values


def _filled(g: Draw) -> Tensor:
    """A few keys, all of them, and none."""
    return torch.tensor([5, g.seq, 0], device=g.device)


CASES: tuple[Case, ...] = (
    *_cases(1),
    *_cases(4),
    # The other number of queries does not blow up enough: PyTorch keeps it.
    Case("decode_max_plus_1", max_plus, cache(1, d=16), 2),
    Case("decode_paged", paged, _pages, 2),
    Case("decode_quantised_pages", quantised_pages, _quantised_pages, 2),
    Case("decode_eight_bits", eight_bits, _eight_bits, 2),
    Case("decode_integers_by_head", scaled_heads, _scaled_heads(torch.int8), 2),
    Case("decode_floats_of_4_bits_by_head", scaled_heads, _scaled_heads(torch.float8_e4m3fn), 2),
    Case("decode_floats_of_3_bits_by_head", scaled_heads, _scaled_heads(torch.float8_e5m2), 2),
    Case("decode_four_bits", four_bits, _four_bits, 2),
    Case("decode_by_channel", by_channel, _by_channel, 2),
    Case("decode_variance_4", value_variance_centred, cache(4, b=1, h=2, d=16), 2),
)
