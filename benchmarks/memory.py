"""Peak memory above inputs and outputs at S = 16384, and errors at S = 8192, for every fused variant on a GPU.

Run: PYTHONPATH=. python benchmarks/memory.py      (writes benchmarks/results/memory.json)
     PYTHONPATH=. python benchmarks/memory.py FILE 0/4   (every fourth variant, for several processes at once)
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import errors, leaves
from tests.programs import FUSED, Case

LIMIT = 64 * 2**20
LONG, CHECKED = 16384, 8192
# What PyTorch itself takes for operations on given tensors that are left to it: layers of a tensor of pairs, which is
# quadratic, write others (docs/limits.md). The three kernels of landmarks store 0.5 MiB; `torch.mean` of its queries
# over 2048 of them takes 128 MiB to accumulate in, eager or not (traced by torch.cuda.memory: `gpu_reduce_kernel`).
LEFT = ("pair_bias", "pair_biased_tokens", "landmarks")
# float64 references of programs whose eager form is larger than a score matrix stop here, elements.
LARGEST = 2**31


def wide_inputs(case: Case, seq: int, device: torch.device) -> tuple[Tensor, ...]:
    """The inputs of a case; q, k, v alone become [1, 16, seq, 64], unless weights belong to them."""
    small = case.make_inputs(32, torch.bfloat16, device)
    alike = all(t.dim() == 4 and t.shape == small[0].shape and t.shape[2] == 32 for t in small)
    if not case.module and len(small) == 3 and alike:
        return tuple(torch.randn(1, 16, seq, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    return case.make_inputs(seq, torch.bfloat16, device)


def peak_above(fn: Any, inputs: tuple[Tensor, ...]) -> int:
    """Bytes at the peak of a call, less what was there before and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fn(*inputs)
    torch.cuda.synchronize()
    returned = sum(t.numel() * t.element_size() for t in leaves(out).values())
    return torch.cuda.max_memory_allocated() - before - returned


def main() -> None:
    device = torch.device("cuda")
    rows, bad = [], []
    part, parts = (int(x) for x in (sys.argv[2] if len(sys.argv) > 2 else "0/1").split("/"))
    for case in FUSED[part::parts]:
        row: dict[str, Any] = {"variant": case.name}
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                target = case.target(torch.bfloat16, device)
                inputs = wide_inputs(case, LONG, device)
                row["shapes"] = [list(t.shape) for t in inputs]
                # PyTorch 2.11 cannot take sizes for variables inside of torch.vmap.
                compiled = fl.compile(target, fallback="error", dynamic=False)
                compiled(*inputs)
                row["peak"] = peak_above(compiled, inputs)
                del inputs
                torch.cuda.empty_cache()
                inputs = case.make_inputs(CHECKED, torch.bfloat16, device)
                heads = max((t.shape[0] * t.shape[1] for t in inputs if t.dim() == 4), default=1)
                if heads * CHECKED**2 < LARGEST:
                    worst = max(errors(target, inputs, compiled(*inputs)), key=lambda e: e.compiled / e.bound)
                    row.update(error=worst.compiled, eager=worst.eager, ok=worst.ok)
        except Exception as e:  # every variant is reported, whatever happens to it
            row["failed"] = f"{type(e).__name__}: {str(e)[:200]}"
        rows.append(row)
        over = row.get("peak", 0) > LIMIT and case.name not in LEFT
        if "failed" in row or over or row.get("ok") is False:
            bad.append(case.name)
            print(row, flush=True)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    kept = [r for r in rows if "peak" in r]
    largest = max(r["peak"] for r in kept if r["variant"] not in LEFT)
    print(f"{len(kept)} of {len(rows)} ran at S={LONG}; largest peak {largest / 2**20:.1f} MiB, without {LEFT}")
    wrong = [r["variant"] for r in rows if r.get("ok") is False]
    print(f"checked against float64 at S={CHECKED}: {sum('ok' in r for r in rows)}, wrong {wrong}")
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "memory.json"
    out.parent.mkdir(exist_ok=True, parents=True)
    out.write_text(
        json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1)
    )
    print("over the limit or failed:", bad)


if __name__ == "__main__":
    main()
