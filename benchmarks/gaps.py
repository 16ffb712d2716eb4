"""Masks that leave gaps between the first and the last key of a row, beside FlexAttention: time, and errors.

Run: PYTHONPATH=. python benchmarks/gaps.py                 (writes benchmarks/results/gaps.json)
     PYTHONPATH=. python benchmarks/gaps.py sinks picked --out FILE

Ours is plain PyTorch with the mask inside. FlexAttention gets its mask made beforehand, and the time of making that
apart (by the function as it is: compiled, at 16384 tokens, it did not begin within three minutes). Errors are of what
is timed, against float64, outputs and gradients together.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fl_pallas as fl
from benchmarks.machine import machine
from benchmarks.measure import busy_ms

RESULTS = Path(__file__).parent / "results" / "gaps.json"
HEADS, FEATURES, BLOCK, PICKED = 16, 64, 64, 16
# Tokens; fewer where a mask of each head would take 16 times the memory that one for all does.
SEQ, SEQ_OF_HEADS = 16384, 8192

Mask = Callable[[Tensor, Tensor], Tensor]
# By rows i [n, 1] and keys j [m]; "picked" and "table" are of data, below.
MASKS: dict[str, Mask | None] = {
    "sinks": lambda i, j: (j <= i) & ((j < 4) | (i - j < 256)),
    "strides": lambda i, j: (j <= i) & ((i - j < 128) | (j % 1024 >= 960)),
    "blocks": lambda i, j: ((i // 64 - j // 64).abs() <= 1) | (j < 64) | (i < 64),
    "slash": lambda i, j: (j <= i) & ((i - j < 64) | ((i - j) // 64 == 16) | (j // 64 == 3)),
    "picked": None,
    "table": None,
}


Function = Callable[..., Tensor]


def problem(name: str, n: int, device: torch.device) -> tuple[Function, Function, Tensor]:
    """Attention with the mask of this name inside; its mask as FlexAttention asks it; and the data it reads.

    Of data: each block of 64 queries of a head picks 16 blocks of keys, its own among them.
    """
    blocks = n // BLOCK
    picked = torch.randint(0, blocks, (1, HEADS, blocks, PICKED), device=device)
    picked[..., 0] = torch.arange(blocks, device=device)
    table = torch.zeros(1, HEADS, blocks, blocks, dtype=torch.bool, device=device).scatter(-1, picked, True)

    def seen(i: Tensor, j: Tensor, data: Tensor) -> Tensor:
        made = MASKS[name]
        if made is not None:
            return made(i, j)
        if name == "table":
            return data[:, :, i // BLOCK, j // BLOCK] & (j <= i)
        return (data[:, :, i // BLOCK] == (j // BLOCK)[:, None]).any(-1) & (j <= i)

    def attention(q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
        i, j = (torch.arange(t.shape[-2], device=q.device) for t in (q, k))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(~seen(i[:, None], j, data), float("-inf")).softmax(-1) @ v

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        made = MASKS[name]
        return table[b, h, i // BLOCK, j // BLOCK] & (j <= i) if made is None else made(i, j)

    return attention, mask_mod, picked if name == "picked" else table


def _lead(name: str) -> tuple[int | None, int | None]:
    """Batch and heads of FlexAttention's mask, where these differ in it."""
    return (1, HEADS) if MASKS[name] is None else (None, None)


def measured(name: str, device: torch.device) -> dict[str, Any]:
    """Times in ms, density of FlexAttention's blocks, and errors."""
    torch.compiler.reset()
    n = SEQ if MASKS[name] else SEQ_OF_HEADS
    attention, mask_mod, data = problem(name, n, device)
    lead = _lead(name)
    q, k, v, grad = (torch.randn(1, HEADS, n, FEATURES, device=device, dtype=torch.bfloat16) for _ in range(4))
    given = [t.requires_grad_() for t in (q, k, v)]
    flexible, compiled = torch.compile(flex_attention), fl.compile(attention)
    mask = create_block_mask(mask_mod, *lead, n, n, device=device)
    calls: dict[str, Function] = {
        "ours": lambda q, k, v: compiled(q, k, v, data),
        "flex": lambda q, k, v: flexible(q, k, v, block_mask=mask),
    }
    row: dict[str, Any] = {"mask": name, "seq": n, "visited": (100 - mask.sparsity()) / 100}
    for who, call in calls.items():
        with torch.no_grad():
            row[f"{who}_forward_ms"] = busy_ms(lambda call=call: call(*given), device)
        row[f"{who}_both_ms"] = busy_ms(lambda call=call: torch.autograd.grad(call(*given), given, grad), device)
    row["flex_mask_ms"] = busy_ms(lambda: create_block_mask(mask_mod, *lead, n, n, device=device), device)
    found = {who: all_of(call, given, grad) for who, call in calls.items()}
    return row | errors(attention, found, data, given, grad)


def all_of(call: Function, given: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of what is given."""
    own = [t.detach().requires_grad_() for t in given]
    out = call(*own)
    return [out.detach(), *torch.autograd.grad(out, own, grad)]


def errors(
    attention: Function, found: dict[str, list[Tensor]], data: Tensor, given: Sequence[Tensor], grad: Tensor
) -> dict[str, float]:
    """Of what was found, and of eager PyTorch: in the norm of outputs and gradients together, to float64, by head."""
    squares, whole = dict.fromkeys((*found, "eager"), 0.0), 0.0
    for h in range(HEADS):
        head = slice(h, h + 1)
        seen = data[:, head]
        alone = partial(lambda *a, seen: attention(*a, seen), seen=seen)
        q, k, v, g = (t[:, head] for t in (*given, grad))
        wanted = all_of(alone, [t.double() for t in (q, k, v)], g.double())
        own = {who: [t[:, head] for t in tensors] for who, tensors in found.items()}
        own["eager"] = all_of(alone, (q, k, v), g)
        whole += sum(float(w.square().sum()) for w in wanted)
        for who, tensors in own.items():
            squares[who] += sum(float((t.double() - w).square().sum()) for t, w in zip(tensors, wanted, strict=True))
    return {f"{who}_error": (x / whole) ** 0.5 for who, x in squares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("masks", nargs="*", default=[*MASKS], help="names of masks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda")
    rows = []
    for name in args.masks:
        rows.append(measured(name, device))
        print(json.dumps(rows[-1]), flush=True)
        args.out.write_text(json.dumps({"machine": machine(device, args.commit), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
