"""Pairs outside of attention: points that attract each other, samples, late interaction, edges of graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .problem import Problem, nbytes


def forces(x: Tensor, mass: Tensor) -> Tensor:
    """Gravity with softening: x [i,3], mass [i]."""
    apart = x[None] - x[:, None]
    return (mass[None, :, None] * apart * (apart.square().sum(-1) + 1e-2).pow(-1.5)[..., None]).sum(1)


def phases(theta: Tensor, pace: Tensor) -> Tensor:
    """Kuramoto's oscillators: theta [i], pace [i]."""
    return pace + torch.sin(theta[None] - theta[:, None]).mean(-1)


def energy_distance(x: Tensor, y: Tensor) -> Tensor:
    """Between two samples [i,8]: twice the mean distance of both, less that of each."""

    def mean(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None] - b).square().sum(-1).add(1e-9).sqrt().mean()

    return 2 * mean(x, y) - mean(x, x) - mean(y, y)


def chamfer(x: Tensor, y: Tensor) -> Tensor:
    """Between clouds of points [b,i,3]: each point's distance to the nearest of the other."""
    apart = torch.cdist(x, y)
    return apart.amin(-1).mean(-1) + apart.amin(-2).mean(-1)


def late_interaction(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """ColBERT: queries q [b,i,d] and documents k [n,j,d], the best token of each for each of the query's."""
    scores = torch.einsum("bid,njd->bnij", q, k).masked_fill(~mask[None, :, None], -1e4)
    return scores.amax(-1).sum(-1)


def gated_edges(q: Tensor, k: Tensor, v: Tensor, e: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """Edge-augmented graph transformer: q, k, v [b,h,i,d]; a bias and a gate from e [b,i,j,c] by layers [c,h]."""
    weights = (q @ k.mT * q.shape[-1] ** -0.5 + (e @ bias).permute(0, 3, 1, 2)).softmax(-1)
    return weights * torch.sigmoid((e @ gate).permute(0, 3, 1, 2)) @ v


# Of a pair: floating-point operations, counted by hand.
OPERATIONS: dict[Callable[..., Tensor], int] = {forces: 20, phases: 20, energy_distance: 75, chamfer: 10}


def points(fn: Callable[..., Tensor], batch: int, n: int, device: torch.device) -> Problem:
    """A problem of n² pairs of points, in float32; of so many clouds, where `fn` takes several."""
    torch.manual_seed(0)
    shapes = {
        forces: (((n, 3), "ix"), ((n,), "i"), "ix"),
        phases: (((n,), "i"), ((n,), "i"), "i"),
        energy_distance: (((n, 8), "ix"), ((n, 8), "jx"), ""),
        chamfer: (((batch, n, 3), "bix"), ((batch, n, 3), "bjx"), "b"),
    }
    (first, its), (second, axes), out = shapes[fn]
    inputs = torch.randn(first, device=device), torch.randn(second, device=device)
    return Problem(
        plain=fn,
        inputs=inputs,
        axes=(its, axes),
        out_axes=(out,),
        flops=OPERATIONS[fn] * batch * n * n,
        bytes=nbytes(*inputs),
        scores=batch * n * n,
    )


def retrieval(b: int, n: int, i: int, j: int, d: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """b queries of i tokens, n documents of j tokens, a fifth of these padding."""
    torch.manual_seed(0)
    q, k = (torch.randn(*shape, d, device=device, dtype=dtype) for shape in ((b, i), (n, j)))
    mask = torch.rand(n, j, device=device) > 0.2
    return Problem(
        plain=late_interaction,
        inputs=(q, k, mask),
        axes=("bid", "njd", "nj"),
        out_axes=("bn",),
        flops=2 * b * n * i * j * d,
        bytes=nbytes(q, k, mask),
        scores=b * n * i * j,
    )


def edges(b: int, h: int, n: int, d: int, c: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Graphs of n nodes, with c features of each pair."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, n, d, device=device, dtype=dtype) for _ in range(3))
    e = torch.randn(b, n, n, c, device=device, dtype=dtype)
    bias, gate = (torch.randn(c, h, device=device, dtype=dtype) * c**-0.5 for _ in range(2))
    inputs = q, k, v, e, bias, gate
    return Problem(
        plain=gated_edges,
        inputs=inputs,
        axes=("bhid", "bhjd", "bhjd", "bijc", "ch", "ch"),
        out_axes=("bhid",),
        flops=4 * b * n * n * h * (d + c),
        bytes=nbytes(*inputs, q),
        scores=b * h * n * n,
    )
