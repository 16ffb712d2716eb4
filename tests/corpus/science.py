"""Differential attention and AlphaFold's attentions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, Draw

FAR = 3e4
"""AlphaFold's 'infinity' for masks; its 1e9 does not fit float16."""


def differential(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """q1, k1, q2, k2 [b,h,s,d], v [b,h,s,2d], lam a scalar tensor: two softmaxes share one v."""
    scale = q1.shape[-1] ** -0.5
    a1 = torch.softmax(q1 @ k1.transpose(-1, -2) * scale, dim=-1)
    a2 = torch.softmax(q2 @ k2.transpose(-1, -2) * scale, dim=-1)
    return (a1 - lam * a2) @ v


def differential_paper(q: Tensor, k: Tensor, v: Tensor, lambdas: Tensor, weight: Tensor) -> Tensor:
    """Microsoft's module: q, k [b,2h,s,d], v [b,h,s,2d], lambdas [4,d], then RMSNorm by weight [2d]; causal."""
    lambda_init = 0.8
    b, h2, s, d = q.shape
    lam = torch.exp((lambdas[0] * lambdas[1]).sum()) - torch.exp((lambdas[2] * lambdas[3]).sum()) + lambda_init
    scores = torch.matmul(q * d**-0.5, k.transpose(-1, -2))
    scores = scores + torch.triu(torch.zeros([s, s], device=q.device).fill_(float("-inf")).type_as(scores), 1)
    weights = F.softmax(scores, dim=-1).view(b, h2 // 2, 2, s, s)
    out = torch.matmul(weights[:, :, 0] - lam * weights[:, :, 1], v)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    return out * (1 - lambda_init)


def evoformer_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor, gate: Tensor) -> Tensor:
    """MSA row attention with pair bias: q, k, v, gate [b,n,h,s,d], mask [b,n,s] of 0 and 1, pair_bias [b,h,s,s]."""
    mask_bias = FAR * (mask - 1)[:, :, None, None, :]
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    weights = torch.softmax(scores + mask_bias + pair_bias[:, None], dim=-1)
    return torch.sigmoid(gate) * torch.matmul(weights, v)


def evoformer_column(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """MSA column attention: q, k, v [b,s,n,h,d] attend along s, mask [b,s,n]."""
    q, k, v = (x.permute(0, 2, 3, 1, 4) for x in (q, k, v))
    bias = FAR * (mask.transpose(1, 2) - 1)[:, :, None, None, :]
    weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias, dim=-1)
    return (weights @ v).permute(0, 3, 1, 2, 4)


def triangle_starting(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, gate: Tensor) -> Tensor:
    """Algorithm 13, starting node: q, k, v, gate [n,n,h,d], bias [n,n,h], mask [n,n]; einsum as in the paper."""
    scores = torch.einsum("ijhd,ikhd->hijk", q, k) / math.sqrt(q.shape[-1])
    scores = scores + bias.permute(2, 0, 1)[:, None] + FAR * (mask - 1)[None, :, None, :]
    weights = torch.softmax(scores, dim=-1)
    return torch.sigmoid(gate) * torch.einsum("hijk,ikhd->ijhd", weights, v)


def triangle_ending(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Algorithm 14, ending node: attends along the first axis; q, k, v [n,n,h,d], bias [n,n,h]."""
    scores = torch.einsum("ijhd,kjhd->hijk", q, k) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores + bias.permute(2, 1, 0)[:, None], dim=-1)
    return torch.einsum("hijk,kjhd->ijhd", weights, v)


def ipa_scores(q: Tensor, k: Tensor, v: Tensor, q_pts: Tensor, k_pts: Tensor, weight: Tensor) -> Tensor:
    """Invariant point attention without the pair terms: q, k, v [s,h,c], q_pts, k_pts [s,h,p,3], weight [h]."""
    scores = torch.einsum("ihc,jhc->hij", q, k) / math.sqrt(3 * q.shape[-1])
    square = (q_pts[:, None] - k_pts[None]).pow(2).sum(dim=(-1, -2))
    factor = F.softplus(weight) * math.sqrt(1.0 / (3 * (q_pts.shape[-2] * 9.0 / 2)))
    scores = scores - 0.5 * (square * factor).permute(2, 0, 1)
    return torch.einsum("hij,jhc->ihc", torch.softmax(scores, dim=-1), v)


def ipa(
    q: Tensor, k: Tensor, v: Tensor, q_pts: Tensor, k_pts: Tensor, v_pts: Tensor,
    pair_bias: Tensor, z: Tensor, weight: Tensor, mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """OpenFold's invariant point attention, points already in global frames.

    OpenFold's mask also blanks the rows of masked residues, whose scores then drown in rounding; here it masks keys.
    q, k, v [s,h,c]; q_pts, k_pts, v_pts [s,h,p,3]; pair_bias [s,s,h]; z [s,s,cz]; weight [h]; mask [s] of 0 and 1.
    Returns the scalar [s,h,c], point [s,h,p,3] and pair [s,h,cz] outputs.
    """
    scores = torch.matmul(q.permute(1, 0, 2), k.permute(1, 2, 0)) * math.sqrt(1.0 / (3 * q.shape[-1]))
    scores = scores + math.sqrt(1.0 / 3) * pair_bias.permute(2, 0, 1)
    pt_att = (q_pts.unsqueeze(-4) - k_pts.unsqueeze(-5)) ** 2
    pt_att = sum(torch.unbind(pt_att, dim=-1))
    factor = F.softplus(weight).view(1, 1, -1, 1) * math.sqrt(1.0 / (3 * (q_pts.shape[-2] * 9.0 / 2)))
    pt_att = torch.sum(pt_att * factor, dim=-1) * (-0.5)
    key_mask = FAR * (mask - 1)
    a = torch.softmax(scores + pt_att.permute(2, 0, 1) + key_mask, dim=-1)
    out = torch.matmul(a, v.transpose(0, 1)).transpose(0, 1)
    out_pts = torch.sum(a[..., None, :, :, None] * v_pts.permute(1, 3, 0, 2)[..., None, :, :], dim=-2)
    return out, out_pts.permute(2, 0, 3, 1), torch.matmul(a.transpose(0, 1), z)


def vector_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An equivariant attention: values are vectors of space, [s,h,c,3], and results [s,3,h,c]; q, k [s,h,d]."""
    weights = torch.softmax(torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1]), dim=-1)
    return torch.einsum("hij,jhcx->ixhc", weights, v)


def gravity(points: Tensor, masses: Tensor) -> Tensor:
    """What bodies pull each other by, softened; points [s,3], masses [s]."""
    apart = points[None] - points[:, None]
    return (masses[:, None] * apart * (apart.square().sum(-1, keepdim=True) + 0.1) ** -1.5).sum(1)


def _differential(g: Draw) -> tuple[Tensor, ...]:
    q1, k1, q2, k2 = (g.normal(1, 2, g.seq, 16) for _ in range(4))
    return q1, k1, q2, k2, g.normal(1, 2, g.seq, 32), g.values(0.35)[0]


def _differential_paper(g: Draw) -> tuple[Tensor, ...]:
    q, k = g.normal(1, 4, g.seq, 16), g.normal(1, 4, g.seq, 16)
    return q, k, g.normal(1, 2, g.seq, 32), g.normal(4, 16, scale=0.1), g.uniform(32, low=0.5, high=1.5)


def _mask(g: Draw, *shape: int) -> Tensor:
    """0 and 1 as floats, the last axis beginning with 1."""
    keep = g.bools(*shape, p=0.8)
    keep[..., 0] = True
    return keep.to(g.dtype)


def _evoformer(g: Draw) -> tuple[Tensor, ...]:
    q, k, v, gate = (g.normal(1, 2, 2, g.seq, 16) for _ in range(4))
    return q, k, v, _mask(g, 1, 2, g.seq), g.normal(1, 2, g.seq, g.seq), gate


def _column(g: Draw) -> tuple[Tensor, ...]:
    q, k, v = (g.normal(1, g.seq, 3, 2, 16) for _ in range(3))
    mask = _mask(g, 1, 3, g.seq).transpose(1, 2)
    return q, k, v, mask


def _triangle(g: Draw) -> tuple[Tensor, ...]:
    """The score tensor is cubic: n stays at most 49, whatever seq is."""
    n = min(g.seq, 48) + g.seq % 2
    q, k, v, gate = (g.normal(n, n, 2, 8) for _ in range(4))
    return q, k, v, g.normal(n, n, 2), _mask(g, n, n), gate


def _vector_values(g: Draw) -> tuple[Tensor, ...]:
    return g.normal(g.seq, 2, 16), g.normal(g.seq, 2, 16), g.normal(g.seq, 2, 4, 3)


def _ipa(g: Draw) -> tuple[Tensor, ...]:
    q, k, v = (g.normal(g.seq, 2, 16) for _ in range(3))
    q_pts, k_pts, v_pts = (g.normal(g.seq, 2, 4, 3) for _ in range(3))
    pair_bias, z = g.normal(g.seq, g.seq, 2), g.normal(g.seq, g.seq, 8)
    return q, k, v, q_pts, k_pts, v_pts, pair_bias, z, g.normal(2), _mask(g, g.seq)


def _ipa_scores(g: Draw) -> tuple[Tensor, ...]:
    q, k, v, q_pts, k_pts, _, _, _, weight, _ = _ipa(g)
    return q, k, v, q_pts, k_pts, weight


CASES = (
    Case("differential", differential, _differential),
    Case("differential_paper", differential_paper, _differential_paper),
    Case("evoformer_row", evoformer_row, _evoformer),
    Case("evoformer_column", evoformer_column, _column),
    Case("triangle_starting", triangle_starting, _triangle),
    Case("triangle_ending", triangle_ending, lambda g: _triangle(g)[:4]),
    Case("ipa_scores", ipa_scores, _ipa_scores),
    Case("ipa", ipa, _ipa),
    Case("vector_values", vector_values, _vector_values),
    Case("gravity", gravity, lambda g: (g.normal(g.seq, 3), g.uniform(g.seq, low=0.1))),
)
