"""A small GPT on real text, fused attention beside PyTorch's.    python examples/train_lm.py --attention differential

The text is the source code of the Python standard library on this machine, byte by byte. Both models start from the
same weights and see the same batches, so that their losses must agree but for rounding.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from common import DEVICE, console
from torch import Tensor, nn
from training import race, report

import fl_pallas as fl

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# --- attention, in plain PyTorch; q, k, v are [b,h,s,d] -----------------------------------------


def distances(q: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    return i[:, None] - i


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(distances(q) < 0, -math.inf).softmax(-1) @ v


def softcap_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma's: capped scores, the 64 latest keys."""
    far = distances(q)
    capped = 30 * torch.tanh(scores(q, k) / 30)
    return capped.masked_fill((far < 0) | (far >= 64), -math.inf).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each head fades with distance at a rate of its own."""
    far = distances(q)
    rates = torch.exp2(-8 / q.shape[1] * torch.arange(1, q.shape[1] + 1, device=q.device))
    faded = scores(q, k) - rates[:, None, None] * far
    return faded.masked_fill(far < 0, -math.inf).softmax(-1) @ v


def differential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Half of the head dimension makes one softmax, half another, which is taken off it."""
    hidden = distances(q) < 0
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    first = scores(q1, k1).masked_fill(hidden, -math.inf).softmax(-1)
    second = scores(q2, k2).masked_fill(hidden, -math.inf).softmax(-1)
    return (first - 0.5 * second) @ v


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No normaliser: every key by itself."""
    return torch.sigmoid(scores(q, k) - math.log(q.shape[-2])).masked_fill(distances(q) < 0, 0.0) @ v


VARIANTS: dict[str, Attention] = {f.__name__: f for f in (causal, softcap_window, alibi, differential, sigmoid)}


# --- the model ----------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, attention: Attention, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes to the logits of the next one."""

    def __init__(self, attention: Attention, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(attention, width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[-1]]
        return self.head(self.norm(self.layers(x)))

    def using(self, attention: Attention) -> GPT:
        """A copy of this model with another attention function."""
        other = copy.deepcopy(self)
        for layer in other.layers:
            layer.attention = attention
        return other


# --- training -----------------------------------------------------------------------------------


def standard_library(most: int = 1 << 22) -> Tensor:
    """Up to `most` bytes of Python's own modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(f.read_bytes() for f in files)[:most]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """In nats per byte."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=VARIANTS, default="softcap_window")
    parser.add_argument("--device", default=DEVICE.type)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the loss curves there (needs matplotlib)")
    known, _ = parser.parse_known_args()
    small = torch.device(known.device).type == "cpu"
    for name, on_cpu, on_gpu in (
        ("steps", 20, 1000), ("length", 128, 1024), ("batch", 2, 16), ("width", 64, 384), ("heads", 2, 6),
        ("layers", 2, 4),
    ):  # fmt: skip
        default = on_cpu if small else on_gpu
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(here {default})")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    attention = VARIANTS[args.attention]
    eager = GPT(attention, args.length, args.width, args.heads, args.layers).to(args.device)
    models = {"fl_pallas": eager.using(fl.compile(attention)), "PyTorch": eager}
    text = standard_library()
    starts = torch.randint(len(text) - args.length, (args.steps, args.batch))
    batches = text[starts[..., None] + torch.arange(args.length + 1)].to(args.device)
    size = sum(p.numel() for p in eager.parameters())
    console.print(f"{args.attention}, {size / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text, {args.device}")
    curves = race(models, batches, loss, args.batch * args.length, args.rate)
    report(curves, f"GPT with {args.attention} attention, loss in nats per byte", args.device, args.plot)


if __name__ == "__main__":
    main()
