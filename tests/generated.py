"""Attention-like programs nobody wrote: a spec that hypothesis draws, and the torch function it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda q, k: q @ k.mT / math.sqrt(q.shape[-1]),
    "square distance": lambda q, k: -((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1) / q.shape[-1],
    "absolute distance": lambda q, k: -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1) / q.shape[-1],
    "additive": lambda q, k: torch.tanh(q[..., :, None, :] + k[..., None, :, :]).sum(-1) / math.sqrt(q.shape[-1]),
    "tropical": lambda q, k: (q[..., :, None, :] + k[..., None, :, :]).amax(-1),
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) * 0.3,
}
POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "softcap": lambda s: 4.0 * torch.tanh(s / 4.0),
    "leaky": lambda s: F.leaky_relu(s, 0.1),
    "absolute": torch.abs,
    "square": lambda s: 0.5 * s * s,
    "affine": lambda s: 0.7 * s - 0.2,
    "swish": F.silu,
    "clamp": lambda s: s.clamp(-1.5, 2.0),
}
BIASES: dict[str, Callable[[Operands, Tensor, Tensor], Tensor]] = {
    "alibi": lambda x, i, j: -0.1 * (i - j).abs() * x.per_head,
    "per key": lambda x, i, j: x.per_key[:, None, None, :],
    "dense": lambda x, i, j: x.dense,
    "table": lambda x, i, j: x.table[(i - j).clamp(-4, 4) + 4],
}
LEAVES: dict[str, Callable[[Operands, Tensor, Tensor], Tensor]] = {
    "causal": lambda x, i, j: j <= i,
    "window": lambda x, i, j: (i - j).abs() < 9,
    "prefix": lambda x, i, j: j < 5,
    "dilated": lambda x, i, j: (i - j) % 3 == 0,
    "block": lambda x, i, j: i // 16 == j // 16,
    "lengths": lambda x, i, j: j < x.lengths[:, None, None, None],
    "documents": lambda x, i, j: x.q_ids[:, None, :, None] == x.k_ids[:, None, None, :],
    "given": lambda x, i, j: x.given,
}


@dataclass(frozen=True)
class Operands:
    """Tensors besides q and k: biases, ids, lengths and what the epilogue reads."""

    per_head: Tensor  # [h,1,1]
    per_key: Tensor  # [b,sk]
    dense: Tensor  # [h,sq,sk]
    table: Tensor  # [9]
    lengths: Tensor  # int [b]
    q_ids: Tensor  # int [b,sq]
    k_ids: Tensor  # int [b,sk]
    given: Tensor  # bool [sq,sk]
    gate: Tensor  # [b,h,sq,d]
    other: Tensor  # [b,h,sk,4]


@dataclass(frozen=True)
class Mask:
    """A leaf, or `and` / `or` of two masks, or `not` of one."""

    op: str
    args: tuple[Mask, ...] = ()

    def __call__(self, x: Operands, i: Tensor, j: Tensor) -> Tensor:
        parts = [mask(x, i, j) for mask in self.args]
        match self.op:
            case "and":
                return parts[0] & parts[1]
            case "or":
                return parts[0] | parts[1]
            case "not":
                return ~parts[0]
        return LEAVES[self.op](x, i, j)

    def __repr__(self) -> str:
        return self.op if not self.args else f"{self.op}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True)
class Spec:
    """A generated program: scores, pointwise steps, biases, mask, normaliser, extra reductions, epilogue."""

    score: str
    pointwise: tuple[str, ...]
    biases: tuple[str, ...]
    mask: Mask | None
    keep_diagonal: bool
    normaliser: str
    extras: tuple[str, ...]
    epilogue: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    seed: int

    def build(self) -> Callable[..., tuple[Tensor, ...]]:
        """The program, as a function of the tensors that `inputs` returns."""

        def program(q: Tensor, k: Tensor, v: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
            x = Operands(*operands)
            scores = SCORES[self.score](q, k)
            for step in self.pointwise:
                scores = POINTWISE[step](scores)
            i = torch.arange(q.shape[-2], device=q.device)[:, None]
            j = torch.arange(k.shape[-2], device=q.device)[None, :]
            for bias in self.biases:
                scores = scores + BIASES[bias](x, i, j)
            keep = None
            if self.mask is not None:
                keep = self.mask(x, i, j)
                keep = keep | (i % k.shape[-2] == j) if self.keep_diagonal else keep
            weights, scores = _normalise(self.normaliser, scores, keep)
            out = weights @ v
            more = tuple(_extra(name, scores, weights, x) for name in self.extras)
            match self.epilogue:
                case "gate":
                    out = out * torch.sigmoid(x.gate)
                case "residual":
                    out = out + x.gate
                case "norm":
                    out = F.layer_norm(out + x.gate, (out.shape[-1],))
            return out, *more

        return program

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """q [b,h,sq,d], k and v [b,h,sk,d], then the tensors of Operands."""
        gen = torch.Generator().manual_seed(self.seed)
        b, h, sq, sk, d = self.batch, self.heads, self.queries, self.keys, self.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=gen).to(dtype).to(device)

        def ints(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=gen).to(device)

        return (
            normal(b, h, sq, d), normal(b, h, sk, d), normal(b, h, sk, d),
            normal(h, 1, 1), normal(b, sk), normal(h, sq, sk), normal(9),
            ints(1, sk + 1, b), ints(0, 3, b, sq), ints(0, 3, b, sk), ints(0, 2, sq, sk).bool(),
            normal(b, h, sq, d), normal(b, h, sk, 4),
        )  # fmt: skip


def _normalise(name: str, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, and the scores as they were masked."""
    fill = float("-inf") if name in ("softmax", "by hand") else 0.0
    masked = scores if keep is None else scores.masked_fill(~keep, fill)
    match name:
        case "softmax":
            return masked.softmax(-1), masked
        case "by hand":
            weights = torch.exp(masked - masked.amax(-1, keepdim=True))
            return weights / weights.sum(-1, keepdim=True), masked
        case "sigmoid":
            weights = torch.sigmoid(scores)
            return weights if keep is None else torch.where(keep, weights, 0.0), masked
        case "relu":
            weights = F.relu(masked)
            return weights / (weights.sum(-1, keepdim=True) + 0.1), masked
        case "one more":
            weights = torch.exp(masked.clamp(max=8.0))
            return weights / (1.0 + weights.sum(-1, keepdim=True)), masked
    return masked / scores.shape[-1], masked


def _extra(name: str, scores: Tensor, weights: Tensor, x: Operands) -> Tensor:
    match name:
        case "lse":
            return torch.logsumexp(scores, dim=-1)
        case "max":
            return scores.amax(-1)
        case "entropy":
            # Counted from 1: the entropy of a sharp row is all rounding.
            return 1.0 - (weights.abs() * torch.log(weights.abs() + 1e-6)).sum(-1)
        case "sharpness":
            return weights.square().sum(-1).sqrt()
    return weights @ x.other


def _some(table: dict[str, Callable], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True).map(tuple)


def masks() -> st.SearchStrategy[Mask]:
    """Boolean expressions over the leaves."""
    leaf = st.sampled_from(sorted(LEAVES)).map(Mask)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(lambda op, a, b: Mask(op, (a, b)), st.sampled_from(["and", "or"]), inner, inner),
            inner.map(lambda a: Mask("not", (a,))),
        ),
        max_leaves=4,
    )


def specs() -> st.SearchStrategy[Spec]:
    """Programs of every combination, at small sizes."""
    return st.builds(
        Spec,
        score=st.sampled_from(sorted(SCORES)),
        pointwise=_some(POINTWISE, 2),
        biases=_some(BIASES, 2),
        mask=st.none() | masks(),
        keep_diagonal=st.sampled_from([True, True, True, False]),
        normaliser=st.sampled_from(["softmax", "by hand", "sigmoid", "relu", "one more", "none"]),
        extras=st.lists(
            st.sampled_from(["lse", "max", "entropy", "sharpness", "second sum"]), max_size=2, unique=True
        ).map(tuple),
        epilogue=st.sampled_from(["plain", "gate", "residual", "norm"]),
        batch=st.sampled_from([1, 2]),
        heads=st.sampled_from([1, 2, 3]),
        queries=st.sampled_from([1, 7, 33, 70]),
        keys=st.sampled_from([2, 16, 33, 70]),
        head_dim=st.sampled_from([8, 16, 20]),
        seed=st.integers(0, 2**16),
    )
