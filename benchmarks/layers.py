"""Attention layers of packages that nobody here wrote, against torch.compile and eager PyTorch.

Run: pip install -e '.[layers]' && PYTHONPATH=. python benchmarks/layers.py
(writes benchmarks/results/layers.json, which report.py makes a table of; --help tells more)

Two sequences, 16 heads of 64 features, projections and all, weights as the package draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sweep import main

RESULTS = Path(__file__).parent / "results" / "layers.json"
BATCH, HEADS, FEATURES = 2, 16, 64
WIDTH = HEADS * FEATURES

# Length → a layer and what it is given; masks among it are of bool.
Layer = Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]


class Named(nn.Module):
    """A layer whose last inputs are given by name, and of whose results the first counts."""

    def __init__(self, layer: nn.Module, *names: str):
        super().__init__()
        self.layer, self.names = layer, names

    def forward(self, *given: Tensor) -> Tensor:
        first = len(given) - len(self.names)
        out = self.layer(*given[:first], **dict(zip(self.names, given[first:])))
        return out if isinstance(out, Tensor) else out[0]


def _tokens(seq: int) -> Tensor:
    return torch.randn(BATCH, seq, WIDTH)


def _seen(seq: int) -> Tensor:
    """The last quarter of the last sequence is padding."""
    return torch.arange(seq) < torch.tensor([seq] * (BATCH - 1) + [seq - seq // 4])[:, None]


def _made(where: str, **options: Any) -> nn.Module:
    package, _, name = where.partition(":")
    return getattr(import_module(package), name)(**options)


def _x(kind: str = "Decoder", *, padded: bool = False, **options: Any) -> Layer:
    """A layer of x-transformers with its norm."""
    fixed = {"dim": WIDTH, "depth": 1, "heads": HEADS, "attn_dim_head": FEATURES, "only_attn": True}

    def layer(seq: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        made = _made(f"x_transformers:{kind}", **fixed, **options)
        return (Named(made, "mask"), (_tokens(seq), _seen(seq))) if padded else (made, (_tokens(seq),))

    return layer


def _self(where: str, *, padded: bool = False, **options: Any) -> Layer:
    """Self-attention of one of lucidrains' packages."""

    def layer(seq: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        made = _made(where, **({"dim": WIDTH, "heads": HEADS, "dim_head": FEATURES} | options))
        return Named(made, *["mask"] * padded), (_tokens(seq), *[_seen(seq)] * padded)

    return layer


def _both_ways(seq: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    options = {"dim": WIDTH, "context_dim": WIDTH, "heads": HEADS, "dim_head": FEATURES}
    layer = _made("bidirectional_cross_attention:BidirectionalCrossAttention", **options)
    other = max(1, seq // 2)
    return Named(layer, "mask", "context_mask"), (_tokens(seq), _tokens(other), _seen(seq), _seen(other))


def _points(seq: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Of an eighth of the length: it is given a vector for each pair."""
    residues, width = max(8, seq // 8), 128
    layer = _made("invariant_point_attention:InvariantPointAttention", dim=width, heads=8, pairwise_repr_dim=width)
    turns = torch.linalg.qr(torch.randn(1, residues, 3, 3))[0]
    tokens, pairs = torch.randn(1, residues, width), torch.randn(1, residues, residues, width)
    return Named(layer, "rotations", "translations"), (tokens, pairs, turns, torch.randn(1, residues, 3))


LAYERS: dict[str, Layer] = {
    "x-transformers, causal": _x(),
    "x-transformers, flash=True": _x(attn_flash=True),
    "x-transformers, kv_heads=4": _x(attn_kv_heads=4),
    "x-transformers, max_attend_past=256": _x(attn_max_attend_past=256),
    "x-transformers, num_mem_kv=16": _x(attn_num_mem_kv=16),
    "x-transformers, all at once": _x(
        attn_qk_norm=True, alibi_pos_bias=True, attn_num_mem_kv=2, attn_gate_values=True, attn_kv_heads=4
    ),
    "x-transformers, data_dependent_alibi_per_row": _x(
        attn_data_dependent_alibi=True, attn_data_dependent_alibi_per_row=True
    ),
    "x-transformers, talking heads": _x(attn_pre_talking_heads=True),
    "x-transformers, encoder, padding": _x("Encoder", padded=True),
    "x-transformers, encoder, padding, window": _x("Encoder", padded=True, attn_max_attend_past=256),
    "x-transformers, encoder, padding, rel_pos_bias": _x("Encoder", padded=True, rel_pos_bias=True),
    "x-transformers, encoder, padding, alibi_pos_bias": _x("Encoder", padded=True, alibi_pos_bias=True),
    **{
        f"x-transformers, {name}": _x(**{name: True})
        for name in ("alibi_pos_bias", "rel_pos_bias", "rotary_pos_emb", "rotary_xpos", "polar_pos_emb")
    },
    **{
        f"x-transformers, {name}": _x(**{f"attn_{name}": True})
        for name in (
            *("head_scale", "gate_value_heads", "gate_values", "qk_norm", "qk_rmsnorm", "l2_distance", "sigmoid"),
            *("selective", "cog_signed", "one_kv_head", "add_zero_kv", "head_learned_sink", "data_dependent_alibi"),
            *("use_rel_proj_pos_bias", "use_cope", "softclamp_logits", "orthog_projected_values", "laser", "hard"),
        )
    },
    "local-attention, causal": _self(
        "local_attention:LocalMHA", window_size=256, causal=True, exact_windowsize=True, use_rotary_pos_emb=False
    ),
    "local-attention, both sides": _self(
        "local_attention:LocalMHA", window_size=256, qk_rmsnorm=True, use_rotary_pos_emb=False
    ),
    "taylor-series-linear-attention": _self(
        "taylor_series_linear_attention:TaylorSeriesLinearAttn", padded=True, dim_head=16
    ),
    "agent-attention": _self("agent_attention_pytorch:AgentSelfAttention", padded=True, num_agent_tokens=64),
    "bidirectional-cross-attention": _both_ways,
    "invariant-point-attention": _points,
}


def make(name: str, seq: int, device: torch.device) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A layer in bfloat16, and its inputs.

    Raises: ModuleNotFoundError where its package is not installed.
    """
    torch.manual_seed(0)
    layer, given = LAYERS[name](seq)
    inputs = tuple(t.to(device, torch.bfloat16 if t.is_floating_point() else t.dtype) for t in given)
    return layer.eval().to(device, torch.bfloat16), inputs


if __name__ == "__main__":
    main(make, [*LAYERS], RESULTS, __doc__)
