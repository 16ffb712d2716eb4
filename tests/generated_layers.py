"""Attention layers as codebases spell them: projections, rotations, norms, scores, masks, gates, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

HEADS, WIDTH, BATCH = 4, 8, 2
SHARED = HEADS // 2  # heads of keys where two of queries share one


@dataclass(frozen=True)
class Given:
    """Tensors of a layer besides its weights: x [b,n,c], per_head [h], bias [h,n,n], weight [d], ids int [b,n]."""

    x: Tensor
    per_head: Tensor
    bias: Tensor
    weight: Tensor
    ids: Tensor

    @property
    def place(self) -> Tensor:
        return torch.arange(self.x.shape[1], device=self.x.device)

    def of_heads(self, t: Tensor, scores: Tensor) -> Tensor:
        """t [h,...], or [b,h,...], as scores have heads: in groups, perhaps."""
        return t.unflatten(t.dim() - 3, (SHARED, -1)) if scores.dim() == 5 else t

    def of_batch(self, t: Tensor, scores: Tensor) -> Tensor:
        """t [b,...] beside the heads of scores."""
        return t.view(t.shape[0], *[1] * (scores.dim() - 3), *t.shape[1:])


Qkv = tuple[Tensor, Tensor, Tensor]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


def few(x: Tensor, w: Tensor) -> list[Tensor]:
    """Keys and values of shared heads."""
    return [heads(x @ w[n][:, : SHARED * WIDTH]) for n in (1, 2)]


def grouped(x: Tensor, w: Tensor) -> Qkv:
    k, v = (t[:, :, None] for t in few(x, w))
    return heads(x @ w[0]).unflatten(1, (SHARED, -1)), k, v


def expanded(x: Tensor, w: Tensor) -> Qkv:
    k, v = (t[:, :, None].expand(-1, -1, HEADS // SHARED, -1, -1).flatten(1, 2) for t in few(x, w))
    return heads(x @ w[0]), k, v


def packed(x: Tensor, w: Tensor) -> Qkv:
    every = x @ w.permute(1, 0, 2).flatten(1)
    q, k, v = every.view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def apart(x: Tensor, w: Tensor) -> Qkv:
    q, k, v = (heads(x @ w[n]) for n in range(3))
    return q, k, v


def by_einsum(x: Tensor, w: Tensor) -> Qkv:
    q, k, v = (torch.einsum("bsc,chd->bshd", x, m.unflatten(1, (HEADS, WIDTH))).transpose(1, 2) for m in w)
    return q, k, v


PROJECTIONS: dict[str, Callable[[Tensor, Tensor], Qkv]] = {
    "apart": apart, "packed": packed, "einsum": by_einsum, "grouped": grouped, "expanded": expanded,
}  # fmt: skip


def angles(t: Tensor, width: int) -> Tensor:
    rate = 100.0 ** (-torch.arange(0, width, 2, device=t.device) / width)
    return torch.arange(t.shape[-2], device=t.device)[:, None] * rate


def turned(t: Tensor) -> Tensor:
    angle = torch.cat([angles(t, t.shape[-1])] * 2, -1)
    a, b = t.chunk(2, -1)
    return t * angle.cos().to(t.dtype) + torch.cat([-b, a], -1) * angle.sin().to(t.dtype)


def turned_in_pairs(t: Tensor) -> Tensor:
    angle = angles(t, t.shape[-1])
    c, s = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
    a, b = t[..., ::2], t[..., 1::2]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


PROLOGUES: dict[str, Callable[[Tensor, Given], Tensor]] = {
    "none": lambda t, x: t,
    "turned": lambda t, x: turned(t),
    "pairs": lambda t, x: turned_in_pairs(t),
    "in part": lambda t, x: torch.cat([turned(t[..., :4]), t[..., 4:]], -1),
    "rms": lambda t, x: F.rms_norm(t, [WIDTH], x.weight, 1e-6),
    "layer norm": lambda t, x: F.layer_norm(t, [WIDTH]),
    "unit": lambda t, x: 2 * F.normalize(t, dim=-1),
    "two streams": lambda t, x: torch.cat([t[..., :7, :] * x.weight, t[..., 7:, :]], -2),
}
SCORES: dict[str, Callable[[Tensor, Given], Tensor]] = {
    "plain": lambda s, x: s,
    "capped": lambda s, x: 5 * torch.tanh(s / 5),
    "bias": lambda s, x: s + x.of_heads(x.bias, s),
    "slopes": lambda s, x: s - (x.place[:, None] - x.place).abs() * x.of_heads(x.per_head[:, None, None], s).sigmoid(),
    "gates": lambda s, x: s + (g := x.of_heads(forgotten(x), s)).mT - g,
    "temperature": lambda s, x: s * x.of_heads(x.per_head[:, None, None], s).exp(),
    "lengths": lambda s, x: s * (x.place + 2).log()[:, None].to(s.dtype),
}
MASKS: dict[str, Callable[[Tensor, Given], Tensor] | None] = {
    "none": None,
    "causal": lambda s, x: x.place <= x.place[:, None],
    "window": lambda s, x: (x.place <= x.place[:, None]) & (x.place[:, None] - x.place < 9),
    "documents": lambda s, x: x.of_batch(x.ids[:, :, None] == x.ids[:, None], s),
    "blocks": lambda s, x: x.place // 8 == x.place[:, None] // 8,
}
EPILOGUES: dict[str, Callable[[Tensor, Tensor, Given], Tensor]] = {
    "none": lambda o, q, x: o,
    "gate": lambda o, q, x: o * torch.sigmoid(q),
    "norm": lambda o, q, x: F.rms_norm(o, [WIDTH], x.weight, 1e-5),
    "by heads": lambda o, q, x: o * x.of_heads(x.per_head[:, None, None], o).sigmoid(),
}
NORMALISERS = ("softmax", "sink", "by hand", "sigmoid", "difference")


def forgotten(x: Given) -> Tensor:
    """Sums of logarithms of gates up to each token [b,h,1,n]."""
    gates = F.logsigmoid(x.x[..., :HEADS]).cumsum(1)
    return gates.transpose(1, 2)[:, :, None]


def weights(name: str, scores: Tensor, keep: Tensor | None, x: Given) -> Tensor:
    seen = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
    per_head = x.of_heads(x.per_head[:, None, None], scores)
    match name:
        case "sink":
            with_sink = torch.cat([seen, per_head.expand(*scores.shape[:-1], 1)], -1)
            return with_sink.softmax(-1)[..., :-1]
        case "by hand":
            powers = (seen - seen.amax(-1, keepdim=True)).exp()
            return powers / powers.sum(-1, keepdim=True)
        case "sigmoid":
            return torch.sigmoid(seen - math.log(scores.shape[-1]))
        case "difference":
            other = -scores / 2 if keep is None else (-scores / 2).masked_fill(~keep, float("-inf"))
            return seen.softmax(-1) - per_head.sigmoid() * other.softmax(-1)
    return seen.softmax(-1)


@dataclass(frozen=True)
class LayerSpec:
    """A layer, by the names of its parts, and how many tokens it has."""

    projection: str
    prologue: str
    score: str
    mask: str
    normaliser: str
    epilogue: str
    projected: bool
    tokens: int
    seed: int

    def __call__(self, x: Tensor, w: Tensor, per_head: Tensor, bias: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """[b,n,c], or heads' results [b,h,n,d] where they are not projected."""
        given = Given(x, per_head, bias, weight, ids)
        q, k, v = PROJECTIONS[self.projection](x, w[:3])
        q, k = (PROLOGUES[self.prologue](t, given) for t in (q, k))
        scores = SCORES[self.score](q @ k.mT / WIDTH**0.5, given)
        mask = MASKS[self.mask]
        keep = None if mask is None else mask(scores, given)
        o = EPILOGUES[self.epilogue](weights(self.normaliser, scores, keep, given) @ v, q, given)
        o = o.flatten(1, 2) if o.dim() == 5 else o
        return o.transpose(1, 2).flatten(2) @ w[3] if self.projected else o

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        gen = torch.Generator().manual_seed(self.seed)
        c = HEADS * WIDTH
        shapes = [(BATCH, self.tokens, c), (4, c, c), (HEADS,), (HEADS, self.tokens, self.tokens), (WIDTH,)]
        scales = [1.0, c**-0.5, 1.0, 1.0, 1.0]
        drawn = (torch.randn(s, dtype=torch.float64, generator=gen) * k for s, k in zip(shapes, scales, strict=True))
        ids = torch.randint(0, 3, (BATCH, self.tokens), generator=gen)
        return *(t.to(dtype).to(device) for t in drawn), ids.to(device)


def layers() -> st.SearchStrategy[LayerSpec]:
    parts = (PROJECTIONS, PROLOGUES, SCORES, MASKS, NORMALISERS, EPILOGUES)
    names = (st.sampled_from(sorted(table)) for table in parts)
    return st.builds(LayerSpec, *names, st.booleans(), st.sampled_from([16, 33, 65]), st.integers(0, 2**16))
