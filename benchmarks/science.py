"""Attention that is no softmax(mod(QK))V: differential, and AlphaFold's three."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.science import FAR, evoformer_row, ipa, triangle_starting
from tests.corpus.science import differential as differential_weights

from .problem import Problem, nbytes
from .variants import full


def differential_outputs(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """As the reference system has it: two attentions over one v, then their difference."""
    return full(q1, k1, v) - lam * full(q2, k2, v)


def differential(name: str, b: int, heads: int, s: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """q and k [b, heads / 2, s, d] twice, v [b, heads / 2, s, 2d]. name: "outputs" or "weights" are subtracted."""
    torch.manual_seed(0)
    h = heads // 2
    q1, k1, q2, k2 = (torch.randn(b, h, s, d, device=device, dtype=dtype) for _ in range(4))
    v = torch.randn(b, h, s, 2 * d, device=device, dtype=dtype)
    lam = torch.tensor(0.2, device=device, dtype=dtype)

    def flex(attend: Callable[..., Tensor], mask: object, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor,
             lam: Tensor) -> Tensor:  # fmt: skip
        return attend(q1, k1, v) - lam * attend(q2, k2, v)

    def sdpa() -> Callable[..., Tensor]:
        attend = F.scaled_dot_product_attention
        return lambda q1, k1, q2, k2, v, lam: attend(q1, k1, v) - lam * attend(q2, k2, v)

    return Problem(
        plain=differential_outputs if name == "outputs" else differential_weights,
        inputs=(q1, k1, q2, k2, v, lam),
        axes=("bhsd", "bhsd", "bhsd", "bhsd", "bhse", ""),
        out_axes=("bhse",),
        # Both softmaxes share one product with v when their difference is taken first.
        flops=b * h * s * s * (2 * 2 * d + 2 * 2 * d),
        bytes=nbytes(q1, k1, q2, k2, v, v),
        scores=2 * b * h * s * s,
        flex=flex,
        sdpa=sdpa,
    )


def evoformer(b: int, n: int, s: int, h: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """MSA row attention: q, k, v, gate [b,n,h,s,d], mask [b,n,s] of 0 and 1, pair bias [b,h,s,s]."""
    torch.manual_seed(0)
    q, k, v, gate = (torch.randn(b, n, h, s, d, device=device, dtype=dtype) for _ in range(4))
    mask = (torch.rand(b, n, s, device=device) < 0.9).to(dtype)
    mask[..., 0] = 1
    pair = torch.randn(b, h, s, s, device=device, dtype=dtype)

    def flex(attend: Callable[..., Tensor], block: object, q: Tensor, k: Tensor, v: Tensor, mask: Tensor,
             pair: Tensor, gate: Tensor) -> Tensor:  # fmt: skip
        def mod(score: Tensor, bn: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + FAR * (mask[bn // n, bn % n, j] - 1) + pair[bn // n, h, i, j]

        out = attend(*(t.flatten(0, 1) for t in (q, k, v)), score_mod=mod)
        return torch.sigmoid(gate) * out.unflatten(0, (b, n))

    def sdpa() -> Callable[..., Tensor]:
        bias = FAR * (mask - 1)[:, :, None, None, :] + pair[:, None]
        return lambda q, k, v, mask, pair, gate: torch.sigmoid(gate) * F.scaled_dot_product_attention(q, k, v, bias)

    return Problem(
        plain=evoformer_row,
        inputs=(q, k, v, mask, pair, gate),
        axes=("bnhsd", "bnhsd", "bnhsd", "bns", "bhss", "bnhsd"),
        out_axes=("bnhsd",),
        flops=4 * b * n * h * s * s * d,
        bytes=nbytes(q, k, v, mask, pair, gate, q),
        scores=b * n * h * s * s,
        flex=flex,
        sdpa=sdpa,
    )


def triangle(n: int, h: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Triangle attention around the starting node: q, k, v, gate [n,n,h,d], bias [n,n,h], mask [n,n]."""
    torch.manual_seed(0)
    q, k, v, gate = (torch.randn(n, n, h, d, device=device, dtype=dtype) for _ in range(4))
    bias = torch.randn(n, n, h, device=device, dtype=dtype)
    mask = (torch.rand(n, n, device=device) < 0.9).to(dtype)
    mask[:, 0] = 1
    return Problem(
        plain=triangle_starting,
        inputs=(q, k, v, bias, mask, gate),
        axes=("ijhd", "ijhd", "ijhd", "ijh", "ij", "ijhd"),
        out_axes=("ijhd",),
        flops=4 * n**3 * h * d,
        bytes=nbytes(q, k, v, bias, mask, gate, q),
        scores=n**3 * h,
    )


def invariant_point(s: int, h: int, c: int, p: int, cz: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """IPA: q, k, v [s,h,c], points [s,h,p,3] (v: 2p of them), pair bias [s,s,h], z [s,s,cz], weight [h], mask [s]."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(s, h, c, device=device, dtype=dtype) for _ in range(3))
    q_pts, k_pts = (torch.randn(s, h, p, 3, device=device, dtype=dtype) for _ in range(2))
    v_pts = torch.randn(s, h, 2 * p, 3, device=device, dtype=dtype)
    pair_bias = torch.randn(s, s, h, device=device, dtype=dtype)
    z = torch.randn(s, s, cz, device=device, dtype=dtype)
    weight = torch.randn(h, device=device, dtype=dtype)
    mask = (torch.rand(s, device=device) < 0.9).to(dtype)
    inputs = (q, k, v, q_pts, k_pts, v_pts, pair_bias, z, weight, mask)
    width = 2 * c + 9 * p + cz  # scores and point distances; values, twice as many points, pairs
    return Problem(
        plain=ipa,
        inputs=inputs,
        axes=("ihc", "ihc", "ihc", "ihpx", "ihpx", "ihpx", "ijh", "ijz", "h", "i"),
        out_axes=("ihc", "ihpx", "ihz"),
        flops=2 * s * s * h * width,
        bytes=nbytes(*inputs) + s * h * (c + 6 * p + cz) * q.element_size(),
        # The differences of points are the largest thing that an unfused run stores.
        scores=s * s * h * p * 3,
    )
