"""Attention as published models write it: windows, relative shifts, positions by rows and columns, gated units."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, Draw, Inputs, qkv, qkv_and


def swin_v2(x: Tensor, w: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """x [b,8,n,32], n a multiple of 8: cosine attention in shifted windows of 8 × 8, biases by an MLP of positions."""
    (b, rows, cols, c), heads, m, shift = x.shape, scale.shape[0], 8, 4
    x = torch.roll(x, (-shift, -shift), (1, 2)).view(b, rows // m, m, cols // m, m, c)
    x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, m * m, c)
    q, k, v = F.linear(x, w).view(-1, m * m, 3, heads, c // heads).permute(2, 0, 3, 1, 4).unbind(0)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale.clamp(max=math.log(100.0)).exp()
    line = torch.arange(1 - m, m, dtype=x.dtype, device=x.device)
    steps = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1) / (m - 1) * 8
    steps = torch.sign(steps) * torch.log2(steps.abs() + 1) / 3
    table = F.linear(F.relu(F.linear(steps, w1)), w2).view(-1, heads)
    at = torch.arange(m, device=x.device)
    at = torch.stack(torch.meshgrid(at, at, indexing="ij")).flatten(1)
    apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + m - 1
    bias = table[(apart[..., 0] * (2 * m - 1) + apart[..., 1]).view(-1)].view(m * m, m * m, heads)
    scores = scores + 16 * torch.sigmoid(bias.permute(2, 0, 1))
    part = torch.zeros(rows, cols, device=x.device)
    part[-m:] += 1
    part[-shift:] += 1
    part[:, -m:] += 3
    part[:, -shift:] += 3
    part = part.view(rows // m, m, cols // m, m).permute(0, 2, 1, 3).reshape(-1, m * m)
    mask = (part[:, None] != part[:, :, None]).to(x.dtype) * -100.0
    scores = scores.view(b, -1, heads, m * m, m * m) + mask[None, :, None]
    return (scores.view(-1, heads, m * m, m * m).softmax(-1) @ v).transpose(1, 2).reshape(-1, m * m, c)


def _windows(g: Draw) -> tuple[Tensor, ...]:
    n = max(8, min(g.seq, 64) // 8 * 8)
    weights = g.normal(96, 32, scale=0.2), g.normal(2, 1, 1), g.normal(16, 2), g.normal(2, 16)
    return g.normal(2, 8, n, 32), *weights


def decomposed_positions(q: Tensor, k: Tensor, v: Tensor, by_row: Tensor, by_col: Tensor) -> Tensor:
    """Segment Anything: what a query makes of distances in rows, and in columns; q [bh,s,d], tables [2√s-1,d]."""
    side = math.isqrt(q.shape[1])
    at = torch.arange(side, device=q.device)
    at = at[:, None] - at[None] + side - 1
    grid = q.reshape(-1, side, side, q.shape[-1])
    rows = torch.einsum("bhwc,hkc->bhwk", grid, by_row[at])
    cols = torch.einsum("bhwc,wkc->bhwk", grid, by_col[at])
    scores = (q * q.shape[-1] ** -0.5 @ k.mT).view(-1, side, side, side, side)
    scores = scores + rows[..., :, None] + cols[..., None, :]
    return scores.view(-1, side * side, side * side).softmax(-1) @ v


def _squares(g: Draw) -> tuple[Tensor, ...]:
    side = math.isqrt(min(g.seq, 400)) + 1
    tables = g.normal(2 * side - 1, 16), g.normal(2 * side - 1, 16)
    return *(g.normal(2, side * side, 16) for _ in range(3)), *tables


def gated_unit(x: Tensor, scale: Tensor, shift: Tensor, wz: Tensor, wu: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """FLASH: queries and keys from one projection, squared relu, and a gate; x [b,s,32]."""
    q, k = (F.silu(x @ wz)[..., None, :] * scale + shift).unbind(-2)
    u, v = F.silu(x @ torch.cat((wu, wv), 1)).chunk(2, -1)
    return (u * (F.relu(q @ k.mT / x.shape[1]) ** 2 @ v)) @ wo


def _tokens(g: Draw) -> tuple[Tensor, ...]:
    weights = (g.normal(*shape, scale=0.3) for shape in ((32, 16), (32, 48), (32, 48), (48, 32)))
    return g.normal(1, g.seq, 32), g.normal(2, 16), g.normal(2, 16), *weights


def xlnet(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """q, k, v [s,b,h,d], r [2s,h,d], u, w [h,d]: a relative shift by views, and the columns of an `arange` of it."""
    content = torch.einsum("ibnd,jbnd->bnij", q + u, k)
    position = torch.einsum("ibnd,jnd->bnij", q + w, r)
    b, n, i, j = position.shape
    position = position.reshape(b, n, j, i)[:, :, 1:].reshape(b, n, i, j - 1)
    position = torch.index_select(position, 3, torch.arange(len(k), device=q.device))
    return torch.einsum("bnij,jbnd->ibnd", ((content + position) / math.sqrt(q.shape[-1])).softmax(3), v)


def _sequence_first(g: Draw) -> tuple[Tensor, ...]:
    positions = g.normal(2 * g.seq, 2, 16), g.normal(2, 16), g.normal(2, 16)
    return *(g.normal(g.seq, 2, 2, 16) for _ in range(3)), *positions


def functional_interpolation(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, rate: Tensor, threshold: Tensor
) -> Tensor:
    """FIRE: a bias by an MLP of logarithmic distances over the query's own."""
    i = torch.arange(q.shape[-2], dtype=q.dtype, device=q.device)
    far = torch.log(rate.abs() * torch.maximum(i, threshold.abs()) + 1)[:, None]
    steps = torch.log(rate.abs() * (i[:, None] - i).clamp(min=0) + 1) / far
    bias = F.linear(F.relu(F.linear(steps[..., None], w1, b1)), w2).permute(2, 0, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    return scores.masked_fill(i[:, None] < i, -torch.inf).softmax(-1) @ v


def true_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """How much more than others each key weighs for the query of its own position, read along the diagonal."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    i = torch.arange(q.shape[-2], device=q.device)
    return (scores[..., i, i] - scores.logsumexp(-1))[..., None] * v


def headwise(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """x [b,n,c]; each head projects by a matrix of its own [h,d,c]."""
    q, k, v = (torch.einsum("bnc,hdc->bhnd", x, w) for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def decoupled_rotary(q: Tensor, turned: Tensor, latent: Tensor, key: Tensor, w: Tensor) -> Tensor:
    """DeepSeek's: q [b,n,h,d], keys and values by heads from latent [b,n,c]; turned [b,n,h,r] meets key [b,n,r], which
    all heads share."""
    k, v = torch.einsum("bnc,hdc->bnhd", latent, w).chunk(2, -1)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) + torch.einsum("bnhr,bmr->bhnm", turned, key)
    i = torch.arange(q.shape[1], device=q.device)
    scores = (scores * (q.shape[-1] + key.shape[-1]) ** -0.5).masked_fill(i > i[:, None], -math.inf)
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)


def cosine_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1) * 8, -1) @ v


def mapped_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one head, and a change of one score, by torch.vmap."""
    i = torch.arange(q.shape[-2], device=q.device)
    change = torch.vmap(
        torch.vmap(lambda s, n, m: torch.where(n >= m, torch.tanh(s), -math.inf), (0, None, 0)), (0, 0, None)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q @ k.mT / math.sqrt(q.shape[-1]), i, i).softmax(-1) @ v

    return torch.vmap(torch.vmap(attend))(q, k, v)


def landmarks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nyströmformer: scores by way of 8 means, and the inverse of theirs by iteration."""
    (b, h, n, d), m = q.shape, 8
    few, keys = (x.reshape(b, h, m, n // m, d).mean(3) for x in (q, k))
    left, middle, right = (F.softmax(a @ c.mT * d**-0.5, -1) for a, c in ((q, keys), (few, keys), (few, k)))
    z = middle.mT / (middle.sum(-1).amax(-1) * middle.sum(-2).amax(-1))[..., None, None]
    one = torch.eye(m, dtype=q.dtype, device=q.device)
    for _ in range(3):
        by = middle @ z
        z = z @ (13 * one - by @ (15 * one - by @ (7 * one - by))) / 4
    return left @ (z @ (right @ v))


def overlapping_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Longformer's: q, k, v [b,n,d] in chunks of 8, one every 4, by strides."""

    def chunks(x: Tensor) -> Tensor:
        b, n, d = x.shape
        return x.as_strided((b, n // 4 - 1, 8, d), (x.stride(0), 4 * d, d, 1))

    scores = torch.einsum("bcxd,bcyd->bcxy", chunks(q), chunks(k)) / math.sqrt(q.shape[-1])
    return torch.einsum("bcxy,bcyd->bcxd", scores.softmax(-1), chunks(v))


def vector_neurons(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Features that are vectors in space: q, k, v [b,h,n,c,3]."""
    scores = torch.einsum("bhnci,bhmci->bhnm", q, k) / math.sqrt(3 * q.shape[-2])
    return torch.einsum("bhnm,bhmci->bhnci", scores.softmax(-1), v)


def turned_values(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Values turned by their position, and the result turned back by the query's: cos and sin [n,d/2]."""

    def turn(x: Tensor, sign: int) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - sign * b * sin, sign * a * sin + b * cos), -1).flatten(-2)

    return turn(F.scaled_dot_product_attention(q, k, turn(v, 1)), -1)


def lorentz(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores that are distances on a hyperboloid; q and k are its points but for their time."""
    q_time, k_time = ((x.square().sum(-1, keepdim=True) + 1).sqrt() for x in (q, k))
    inner = q_time @ k_time.mT - q @ k.mT
    return (-torch.acosh(inner.clamp(min=1 + 1e-6))).softmax(-1) @ v


def sinkhorn_in_logs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sinkformer: rows and columns normalised in turn, three times."""
    log = q @ k.mT / math.sqrt(q.shape[-1])
    for _ in range(3):
        log = log - log.logsumexp(-1, keepdim=True)
        log = log - log.logsumexp(-2, keepdim=True)
    return log.exp() @ v


def entmax_by_bisection(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Entmax 1.5: its threshold halved in on, eight times; each needs a sum of the row."""
    x = q @ k.mT / (2 * math.sqrt(q.shape[-1]))
    highest = x.amax(-1, keepdim=True)
    low, high = highest - 1, highest - x.shape[-1] ** -0.5
    for _ in range(8):
        middle = (low + high) / 2
        over = (x - middle).clamp(min=0).square().sum(-1, keepdim=True) >= 1
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    p = (x - (low + high) / 2).clamp(min=0).square()
    return p / p.sum(-1, keepdim=True) @ v


def residual_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two layers with a residual stream: what the first finishes, the second asks with and adds to."""
    for _ in range(2):
        q = q + F.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
    return q


def pair_biased_tokens(a: Tensor, w: Tensor, bias: Tensor, gate: Tensor, z: Tensor, w_pairs: Tensor) -> Tensor:
    """AlphaFold 3's AttentionPairBias: tokens a [b,n,c], weights w [3,c,h·d], pairs z [b,n,n,p]."""
    q, k, v, g = (x.unflatten(-1, (2, -1)) for x in (a @ w[0] + bias, a @ w[1], a @ w[2], a @ gate))
    scores = torch.einsum("bihd,bjhd->bijh", q, k) / math.sqrt(q.shape[-1]) + z @ w_pairs
    return (torch.einsum("bijh,bjhd->bihd", scores.softmax(2), v) * g.sigmoid()).flatten(-2)


def tensor_product(heads: Tensor, features: Tensor) -> Tensor:
    """Queries, keys and values that are means of outer products: heads [3,b,n,r,h], features [3,b,n,r,d]."""
    q, k, v = torch.einsum("tbnrh,tbnrd->tbhnd", heads, features) / heads.shape[-2]
    return F.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ (v / 2)


def mean_cross_entropy(x: Tensor, w: Tensor, bias: Tensor, wanted: Tensor) -> Tensor:
    """A language model's head and loss: x [n,c] asks a vocabulary w [m,c]; some positions count for nothing."""
    return F.cross_entropy(F.linear(x, w, bias), wanted, ignore_index=3)


def scores_by_addmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One head, without a batch: q, k, v [n,d], bias [m]."""
    return torch.addmm(bias, q, k.t(), alpha=0.25).softmax(-1) @ v


def _in_eights(*shape: int) -> Inputs:
    """Three tensors [*shape,n,16], n a multiple of 8."""
    return lambda g: tuple(g.normal(*shape, max(1, g.seq // 8) * 8, 16) for _ in range(3))


CASES: tuple[Case, ...] = (
    Case("headwise", headwise, lambda g: (g.normal(2, g.seq, 24), *(g.normal(2, 16, 24) / 5 for _ in range(3)))),
    Case(
        "decoupled_rotary",
        decoupled_rotary,
        lambda g: (
            g.normal(1, g.seq, 2, 16),
            g.normal(1, g.seq, 2, 8),
            g.normal(1, g.seq, 24),
            g.normal(1, g.seq, 8),
            g.normal(2, 32, 24) / 5,
        ),
    ),
    Case("cosine_pairs", cosine_pairs, qkv()),
    Case("mapped_over_heads", mapped_over_heads, qkv()),
    Case("landmarks", landmarks, _in_eights(1, 2), kernels=None),
    Case("vector_neurons", vector_neurons, lambda g: tuple(g.normal(1, 2, g.seq, 6, 3) for _ in range(3))),
    Case("turned_values", turned_values, qkv_and(lambda g: g.normal(g.seq, 8), lambda g: g.normal(g.seq, 8))),
    Case("lorentz", lorentz, qkv()),
    Case("sinkhorn_in_logs", sinkhorn_in_logs, qkv(h=1), kernels=7),
    Case("entmax_by_bisection", entmax_by_bisection, qkv()),
    Case("residual_layers", residual_layers, qkv(), kernels=2),
    Case(
        "pair_biased_tokens",
        pair_biased_tokens,
        lambda g: (
            g.normal(1, g.seq, 24),
            g.normal(3, 24, 32) / 5,
            g.normal(32),
            g.normal(24, 32) / 5,
            g.normal(1, g.seq, g.seq, 4),
            g.normal(4, 2),
        ),
    ),
    Case("tensor_product", tensor_product, lambda g: (g.normal(3, 1, g.seq, 4, 2), g.normal(3, 1, g.seq, 4, 16))),
    Case(
        "mean_cross_entropy",
        mean_cross_entropy,
        lambda g: (g.normal(g.seq, 16), g.normal(300, 16), g.normal(300), g.ints(0, 8, g.seq)),
        kernels=None,
    ),
    Case("scores_by_addmm", scores_by_addmm, lambda g: (*(g.normal(g.seq, 16) for _ in range(3)), g.normal(g.seq))),
    Case("overlapping_chunks", overlapping_chunks, _in_eights(2)),
    Case("swin_v2", swin_v2, _windows),
    Case("decomposed_positions", decomposed_positions, _squares, kernels=3),
    Case("gated_unit", gated_unit, _tokens),
    Case("xlnet", xlnet, _sequence_first),
    Case(
        "functional_interpolation",
        functional_interpolation,
        qkv_and(
            lambda g: g.normal(8, 1),
            lambda g: g.normal(8),
            lambda g: g.normal(2, 8),
            lambda g: g.values(0.3).view(()),
            lambda g: g.values(4.0).view(()),
        ),
    ),
    Case("true_pairs", true_pairs, qkv()),
)
