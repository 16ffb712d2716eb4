"""An MSA row attention is trained, then all of AlphaFold's attentions are checked.    python examples/evoformer.py

The task: each residue has a partner, which only the pair features tell; its row of the alignment is to be copied from
there. So the pair bias has to be learnt, through gradients as large as the scores.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import torch
from common import DEVICE, console, finish, run_case, where
from torch import Tensor, nn
from training import race, report

import fl_pallas as fl
from tests.corpus.science import evoformer_row
from tests.programs import BY_NAME

VARIANTS = ("evoformer_row", "evoformer_column", "triangle_starting", "triangle_ending", "ipa_scores", "ipa")
WIDTH, PAIR, HEADS = 32, 16, 2

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class RowAttention(nn.Module):
    """An Evoformer's MSA row attention with mask, pair bias and gate, and the transition after it."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.norm, self.pair_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(PAIR)
        self.into, self.bias = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(PAIR, HEADS, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.transition = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, msa: Tensor, pair: Tensor, mask: Tensor) -> Tensor:
        """msa [b,n,s,WIDTH], pair [b,s,s,PAIR], mask [b,n,s] of 0 and 1."""
        parts = self.into(self.norm(msa)).chunk(4, -1)
        q, k, v, gate = (t.unflatten(-1, (HEADS, -1)).transpose(2, 3) for t in parts)
        bias = self.bias(self.pair_norm(pair)).permute(0, 3, 1, 2)
        x = self.out(self.attention(q, k, v, mask, bias, gate).transpose(2, 3).flatten(-2))
        return x + self.transition(x)


def task(rows: int, length: int) -> Batch:
    """An alignment, the pair features that tell partners, which entries there are, and the partners' entries."""
    msa, partner = torch.randn(1, rows, length, WIDTH), torch.randperm(length)
    pair = torch.randn(1, length, length, PAIR)
    pair[0, torch.arange(length), partner] += 3
    mask = (torch.rand(1, rows, length) < 0.9).float()
    return msa, pair, mask, (msa * mask[..., None])[:, :, partner]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    msa, pair, mask, target = batch
    return (model(msa, pair, mask) - target).square().mean()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small = DEVICE.type == "cpu"
    parser.add_argument("--device", default=DEVICE.type)
    parser.add_argument("--steps", type=int, default=20 if small else 500)
    parser.add_argument("--length", type=int, default=48 if small else 256, help="residues")
    parser.add_argument("--rows", type=int, default=4 if small else 32, help="sequences of the alignment")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the loss curves there (needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    eager = RowAttention(evoformer_row).to(args.device)
    compiled = copy.deepcopy(eager)
    compiled.attention = fl.compile(evoformer_row)
    batches = [tuple(t.to(args.device) for t in task(args.rows, args.length)) for _ in range(args.steps)]
    console.print(f"MSA row attention, {args.rows} x {args.length}, on {args.device}")
    curves = race({"fl_pallas": compiled, "PyTorch": eager}, batches, loss, args.rows * args.length, 1e-2)
    report(curves, "MSA row attention with pair bias: mean square error", args.device, args.plot)
    console.print(f"\nall of AlphaFold's, forward, on {where()}")
    finish([run_case(BY_NAME[name]) for name in VARIANTS], "AlphaFold's attentions")


if __name__ == "__main__":
    main()
