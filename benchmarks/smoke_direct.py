"""The direct road on vanilla attention: is it right, how fast, how much host time per call.

Run: PYTHONPATH=. python benchmarks/smoke_direct.py
"""

from __future__ import annotations

import time
import traceback

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_pallas.bridge.launch import DirectKernel
from fl_pallas.kernels.cubin import compile_ttir
from tests.direct import compile_with

B, H, S = 4, 32, 4096


def vanilla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return torch.softmax(torch.where(i[:, None] >= i, scores, float("-inf")), dim=-1) @ v


def gpu_ms(run, repeats: int = 30) -> float:
    """Median of single calls, by CUDA events."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def host_us(run, repeats: int = 300) -> float:
    """Median host time of a call; the queue is emptied now and then so that it never fills up."""
    times = []
    for n in range(repeats):
        if n % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * sorted(times)[repeats // 2]


class Kept:
    """Makes DirectKernels and remembers the last one and its operands."""

    def __call__(self, plan):
        kernel = DirectKernel(plan)
        kept = self

        class Spy:
            names = kernel.names

            def __call__(self, operands):
                kept.kernel, kept.operands = kernel, list(operands)
                return kernel(operands)

        return Spy()


def measure(name: str, fn, d: int, h: int, is_causal: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    q, k, v = (torch.randn(B, h, S, d, device="cuda", dtype=dtype) for _ in range(3))
    kept = Kept()
    start = time.perf_counter()
    out = compile_with(kept, fn)(q, k, v)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    error = (out - F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)).abs().max().item()
    kernel, operands = kept.kernel, kept.operands
    cubin = compile_ttir(kernel.lowered(operands), 90)
    flops = 4 * B * h * S * S * d / (2 if is_causal else 1)
    compiled = compile_with(DirectKernel, fn)
    kernel_ms, whole_ms = gpu_ms(lambda: kernel(operands)), gpu_ms(lambda: compiled(q, k, v))
    sdpa_ms = gpu_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    short = [t[:, :, :128] for t in (q, k, v)]
    small = Kept()
    quick = compile_with(small, fn)
    quick(*short)
    print(
        f"{name} D{d} H{h} {str(dtype)[6:]}: error vs SDPA {error:.2e}; first call {first:.1f} s; "
        f"kernel {kernel_ms:.3f} ms = {flops / kernel_ms / 1e9:.0f} TFLOP/s; compiled {whole_ms:.3f} ms; "
        f"SDPA {sdpa_ms:.3f} ms = {flops / sdpa_ms / 1e9:.0f} TFLOP/s\n"
        f"  {kernel.plan.choices.warps} warps, {kernel.plan.choices.stages} stages, "
        f"tiles {[(a.name, n) for a, n in kernel.plan.choices.tiles]}; {cubin.registers} registers, "
        f"{cubin.stack} B of stack, {cubin.shared} B shared\n"
        f"  host µs per call at S=128: kernel {host_us(lambda: small.kernel(small.operands)):.1f}, "
        f"compiled {host_us(lambda: quick(*short)):.1f}, "
        f"SDPA {host_us(lambda: F.scaled_dot_product_attention(*short)):.1f}, "
        f"torch.empty {host_us(lambda: torch.empty_like(short[0])):.1f}",
        flush=True,
    )


def graph() -> None:
    q, k, v = (torch.randn(B, H, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    compiled = compile_with(DirectKernel, vanilla)
    compiled(q, k, v)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = compiled(q, k, v)
    q.copy_(torch.randn_like(q))
    captured.replay()
    torch.cuda.synchronize()
    error = (out - F.scaled_dot_product_attention(q, k, v)).abs().max().item()
    print(f"CUDA graph: replays, error vs SDPA {error:.2e}", flush=True)


def main() -> None:
    import jax
    import triton

    versions = f"torch {torch.__version__}, jax {jax.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}", flush=True)
    tasks = [
        lambda: measure("vanilla", vanilla, 64, H, False),
        graph,
        lambda: measure("causal", causal, 64, H, True),
        lambda: measure("vanilla", vanilla, 128, 16, False),
        lambda: measure("causal", causal, 128, 16, True),
        lambda: measure("vanilla", vanilla, 64, H, False, torch.float32),
    ]
    for task in tasks:
        torch.compiler.reset()
        try:
            with torch.no_grad():
                task()
        except Exception:
            traceback.print_exc()
    from fl_pallas.kernels.lower import _is_running

    print(f"JAX's backends started: {_is_running()} (False is wanted)")


if __name__ == "__main__":
    main()
