"""Times candidate tiles of a few kernels on a GPU, to set the defaults of the choices pass.

Run: PYTHONPATH=. python benchmarks/probe_tiles.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor
from triton.testing import do_bench

import fl_pallas as fl
from fl_pallas.bridge.launch import DirectKernel
from fl_pallas.errors import Unsupported
from fl_pallas.schedule.plan import KernelPlan


def vanilla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(i[None, :] > i[:, None], -math.inf)
    return torch.softmax(scores, -1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(30 * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / 30), -1) @ v


def differential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return (torch.softmax(q1 @ k1.mT / 8, -1) - 0.3 * torch.softmax(q2 @ k2.mT / 8, -1)) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    slopes = 2.0 ** (-8 / q.shape[1] * torch.arange(1, q.shape[1] + 1, device=q.device))
    bias = slopes[:, None, None] * (i[None, :] - i[:, None])
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]) + bias, -1).to(v.dtype) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    far = (i[None, :] > i[:, None]) | (i[:, None] - i[None, :] >= 256)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(far, -math.inf)
    return torch.softmax(scores, -1) @ v


def candidates(plan: KernelPlan) -> list[KernelPlan]:
    """The plan with other tiles of its row and loop axes, warps and stages."""
    tiles = dict(plan.choices.tiles)
    loops = [loop.axis for loop in plan.loops]
    rows = [a for a in plan.grid if tiles[a] > 1 and a not in plan.features]
    out = []
    for row, column, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        chosen = {**tiles, **{a: row for a in rows}, **{a: column for a in loops}}
        out.append(plan.with_choices(replace(plan.choices, tiles=tuple(chosen.items()), warps=warps, stages=stages)))
    return out


def probe(name: str, fn: Callable[..., Tensor], inputs: Sequence[Tensor], flops: float) -> None:
    """Print the fastest candidates of the one kernel of `fn`."""
    (plan,) = fl.explain(fn, *inputs).kernels
    operands = _operands(fn, inputs)

    def compiled(p: KernelPlan) -> DirectKernel | None:
        kernel = DirectKernel(p)
        try:
            kernel(operands)
        except Unsupported:
            return None
        return kernel

    plans = [plan, *candidates(plan)]
    with ThreadPoolExecutor(12) as pool:
        kernels = list(pool.map(compiled, plans))
    torch.cuda.synchronize()
    times = []
    for p, kernel in zip(plans, kernels, strict=True):
        if kernel is not None:
            ms = do_bench(lambda k=kernel: k(operands), warmup=5, rep=20, return_mode="median")
            sides = [n for a, n in p.choices.tiles if n > 1 and a not in p.features]
            times.append((ms, sides, p.choices.warps, p.choices.stages, p is plan))
    times.sort(key=lambda t: t[0])
    for ms, sides, warps, stages, _ in times[:4] + [t for t in times if t[4]]:
        print(
            f"{name:22s} {ms:.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s  tiles {sides} warps {warps} stages {stages}",
            flush=True,
        )


def _operands(fn: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the compiled function gives its kernel."""
    seen: list[list[Tensor]] = []
    original = DirectKernel.__call__

    def spy(self: DirectKernel, operands: Sequence[Tensor]) -> list[Tensor]:
        seen.append(list(operands))
        return original(self, operands)

    DirectKernel.__call__ = spy  # type: ignore[method-assign]
    try:
        fl.compile(fn)(*inputs)
    finally:
        DirectKernel.__call__ = original  # type: ignore[method-assign]
    return seen[0]


def main() -> None:
    for d, h in ((64, 32), (128, 16)):
        for name, fn in (
            ("vanilla", vanilla),
            ("causal", causal),
            ("softcap", softcap),
            ("alibi", alibi),
            ("window", window),
            ("differential", differential),
        ):
            torch.compiler.reset()
            width = 2 * d if name == "differential" else d
            q, k = (torch.randn(4, h, 4096, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            v = torch.randn(4, h, 4096, width, device="cuda", dtype=torch.bfloat16)
            flops = 4 * 4 * h * 4096**2 * width * (0.5 if name == "causal" else 1)
            with torch.no_grad():
                probe(f"{name} D{d}", fn, (q, k, v), flops)


if __name__ == "__main__":
    main()
