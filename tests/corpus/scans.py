"""Running sums over scores, along keys or queries. q, k, v are [b,h,s,d]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Case, Draw, qkv, qkv_and


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def _earlier(q: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril(diagonal)


def stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each key, from the nearest backwards, takes a share of what is left (Tan et al.)."""
    scores, keep = _scores(q, k), _earlier(q, -1)
    log_rest = F.logsigmoid(-scores).masked_fill(~keep, 0.0)
    later = log_rest.flip(-1).cumsum(-1).flip(-1) - log_rest
    return torch.exp(F.logsigmoid(scores) + later).masked_fill(~keep, 0.0) @ v


def stick_breaking_by_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, the running sum as a product with a triangle of ones."""
    scores, keep = _scores(q, k), _earlier(q, -1)
    log_rest = F.logsigmoid(-scores).masked_fill(~keep, 0.0)
    triangle = torch.ones(q.shape[-2], q.shape[-2], device=q.device).tril(-1).type_as(q)
    later = torch.einsum("bhij,jk->bhik", log_rest, triangle)
    return torch.exp(F.logsigmoid(scores) + later).masked_fill(~keep, 0.0) @ v


def grouped_stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of queries share keys; in a window."""
    b, h, n, d = q.shape
    scores = torch.einsum("bgrid,bgjd->bgrij", q.view(b, k.shape[1], -1, n, d), k) / math.sqrt(d)
    keep = _earlier(q, -1) & ~_earlier(q, -40)
    log_rest = F.logsigmoid(-scores).masked_fill(~keep, 0.0)
    later = log_rest.flip(-1).cumsum(-1).flip(-1) - log_rest
    weights = torch.exp(F.logsigmoid(scores) + later).masked_fill(~keep, 0.0)
    return torch.einsum("bgrij,bgjd->bgrid", weights, v).reshape(b, h, n, d)


def from_the_first_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sticks broken from the first key on, without the key itself."""
    scores = _scores(q, k)
    before = F.pad(F.logsigmoid(-scores).cumsum(-1)[..., :-1], (1, 0))
    return torch.exp(F.logsigmoid(scores) + before) @ v


def contextual_positions(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """CoPE (Golovneva et al.): positions count the keys that a gate lets through; table [d,n]."""
    scores = _scores(q, k)
    mask = torch.full_like(scores[0, 0], float("-inf")).triu(1)
    gates = torch.sigmoid(scores + mask)
    at = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=table.shape[-1] - 1)
    above, below = at.ceil().long(), at.floor().long()
    each = q @ table
    share = at - below
    bias = each.gather(-1, above) * share + each.gather(-1, below) * (1 - share)
    return (scores + mask + bias).softmax(-1) @ v


def selective(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Selective attention (Leviathan et al.), each head by itself: what earlier queries masked stays masked."""
    scores, keep = _scores(q, k), _earlier(q)
    masking = F.relu(scores).masked_fill(~_earlier(q, -1), 0.0)
    masked = masking.cumsum(-2) - masking
    return (scores - masked).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def mean_of_weights_so_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query takes the mean of the weights of all up to it."""
    weights = _scores(q, k).softmax(-1)
    count = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=q.dtype)
    return (weights.cumsum(-2) / count[:, None]) @ v


def scan_of_a_scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    return (scores - 0.1 * torch.tanh(0.1 * torch.sigmoid(scores).cumsum(-1)).cumsum(-1)).softmax(-1) @ v


def structured_decay(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba-2 as a masked product, decays by its `segsum`; x [b,s,h,p], a [b,s,h], b and c [b,s,n]."""
    s = x.shape[1]
    steps = a.transpose(1, 2)[..., None].repeat(1, 1, 1, s)
    earlier = torch.ones(s, s, dtype=torch.bool, device=x.device)
    steps = steps.masked_fill(~earlier.tril(-1), 0).cumsum(-2)
    decay = steps.masked_fill(~earlier.tril(), float("-inf")).exp()
    return torch.einsum("bln,bsn,bhls,bshp->blhp", c, b, decay, x)


def _states(g: Draw) -> tuple[Tensor, ...]:
    steps = -g.uniform(1, g.seq, 2, low=0.01, high=0.3)
    return g.normal(1, g.seq, 2, 16), steps, g.normal(1, g.seq, 8), g.normal(1, g.seq, 8)


CASES = (
    Case("stick_breaking", stick_breaking, qkv(), kernels=None),
    Case("stick_breaking_by_triangle", stick_breaking_by_triangle, qkv(), kernels=None),
    Case("grouped_stick_breaking", grouped_stick_breaking, qkv(b=2, h=4, kv_heads=2), kernels=None),
    Case("from_the_first_key", from_the_first_key, qkv(b=2), kernels=None),
    Case("contextual_positions", contextual_positions, qkv_and(lambda g: g.normal(16, 9)), kernels=None),
    Case("selective", selective, qkv(), kernels=None),
    Case("mean_of_weights_so_far", mean_of_weights_so_far, qkv(), kernels=None),
    Case("scan_of_a_scan", scan_of_a_scan, qkv(), kernels=None),
    Case("structured_decay", structured_decay, _states, kernels=None),
)
