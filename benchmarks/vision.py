"""Attention of images: windows with a table of relative positions, positions decomposed by height and width, and few
tokens, or few that all others are looked at from (patches, captions, latents)."""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import Problem, nbytes


def shifted_windows(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor, apart: Tensor) -> Tensor:
    """Swin: q, k, v [b·windows,h,i,d]; table [distances,h], looked up at index [i,i]; apart [windows,i,i] hides."""
    n, h, i, d = q.shape
    bias = table[index.view(-1)].view(i, i, h).permute(2, 0, 1)
    scores = q * d**-0.5 @ k.mT + bias[None]
    mask = torch.where(apart, -100.0, 0.0).to(q.dtype)
    scores = scores.view(-1, apart.shape[0], h, i, i) + mask[None, :, None]
    return scores.view(n, h, i, i).softmax(-1) @ v


def decomposed(q: Tensor, k: Tensor, v: Tensor, tall: Tensor, wide: Tensor) -> Tensor:
    """SAM: q, k, v [b,h,i,d] of a square image; tall and wide [2·side−1,d], features of each distance."""
    b, h, i, d = q.shape
    side = int(i**0.5)
    place = torch.arange(side, device=q.device)
    apart = place[:, None] - place + side - 1
    grid = q.view(b, h, side, side, d)
    rows, columns = (
        torch.einsum(form, grid, table[apart])
        for form, table in (("bhyxd,ykd->bhyxk", tall), ("bhyxd,xkd->bhyxk", wide))
    )
    scores = (q * d**-0.5 @ k.mT).view(b, h, side, side, side, side)
    scores = scores + rows[..., :, None] + columns[..., None, :]
    return scores.view(b, h, i, i).softmax(-1) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [b,h,i,d], k, v [b,h,j,d]."""
    return (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v


def tokens(b: int, h: int, i: int, j: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """i tokens that see j others."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, n, d, device=device, dtype=dtype) for n in (i, j, j))
    return Problem(
        plain=plain,
        inputs=(q, k, v),
        axes=("bhid", "bhjd", "bhjd"),
        out_axes=("bhid",),
        flops=4 * b * h * i * j * d,
        bytes=nbytes(q, k, v, q),
        scores=b * h * i * j,
    )


def windows(b: int, grid: int, side: int, h: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """b images of grid × grid windows of side × side tokens, shifted by half a window."""
    torch.manual_seed(0)
    i, n = side * side, grid * grid
    q, k, v = (torch.randn(b * n, h, i, d, device=device, dtype=dtype) for _ in range(3))
    table = torch.randn((2 * side - 1) ** 2, h, device=device, dtype=dtype)
    y, x = (t.flatten() for t in torch.meshgrid(*[torch.arange(side, device=device)] * 2, indexing="ij"))
    index = (y[:, None] - y + side - 1) * (2 * side - 1) + x[:, None] - x + side - 1
    # Of the last window in a direction, what was shifted in is another image's part.
    last = torch.arange(grid, device=device) == grid - 1
    part = [last[:, None] & (p >= side - side // 2) for p in (y, x)]
    region = (part[0][:, None] * 2 + part[1][None]).view(n, i)
    apart = region[:, :, None] != region[:, None]
    return Problem(
        plain=shifted_windows,
        inputs=(q, k, v, table, index, apart),
        axes=("nhid", "nhjd", "nhjd", "rh", "ij", "wij"),  # a head at a time: windows share their masks
        out_axes=("nhid",),
        flops=4 * b * n * h * i * i * d,
        bytes=nbytes(q, k, v, q),
        scores=b * n * h * i * i,
    )


def positions(b: int, h: int, side: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """b images of side × side tokens that all see each other."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, side * side, d, device=device, dtype=dtype) for _ in range(3))
    tall, wide = (torch.randn(2 * side - 1, d, device=device, dtype=dtype) * d**-0.5 for _ in range(2))
    return Problem(
        plain=decomposed,
        inputs=(q, k, v, tall, wide),
        axes=("bhid", "bhjd", "bhjd", "rd", "rd"),
        out_axes=("bhid",),
        flops=4 * b * h * side**4 * d,
        bytes=nbytes(q, k, v, q),
        scores=b * h * side**4,
    )
