"""A handful of attentions that nobody registered, compiled and judged in float64.    python examples/quickstart.py"""

from __future__ import annotations

import math

import torch
from common import DEVICE, console, finish, run, run_case, where
from torch import Tensor

import fl_pallas as fl
from tests.programs import BY_NAME

VARIANTS = ("causal_where", "gqa_expand", "softcap", "document_causal", "sink", "max_plus", "with_entropy", "ipa")


@fl.compile
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [b,h,s,d]: causal, over the 64 latest keys."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    i = torch.arange(q.shape[-2], device=q.device)
    distance = i[:, None] - i[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= 64), float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def main() -> None:
    torch.manual_seed(0)
    console.print(f"[bold]fl_pallas[/] on {where()}\n")
    q, k, v = (torch.randn(1, 2, 256, 32, device=DEVICE) for _ in range(3))
    console.print(f"attention(q, k, v) -> {list(attention(q, k, v).shape)}")
    fl.explain(attention, q, k, v).show()
    runs = [run_case(BY_NAME[name]) for name in VARIANTS]
    bf16 = [x.bfloat16() for x in (q, k, v)]
    runs.append(run("vanilla, bfloat16", BY_NAME["vanilla"].fn, bf16))
    finish(runs, "Largest relative error against float64, beside PyTorch's own")


if __name__ == "__main__":
    main()
