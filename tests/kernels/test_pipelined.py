"""Tiles that a loop loads for registers and for a product: Triton's pipeliner would let copies overtake the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.errors import Unsupported
from fl_pallas.kernels import fit
from fl_pallas.kernels.cubin import check, compiled, simplified
from fl_pallas.kernels.fit import fitting
from fl_pallas.kernels.pipelined import copied, overtakes
from tests.oracle import gradient_errors

from .test_cubins import by_addresses, kernels_made

HOPPER = 90


def gains(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Tensor:
    """The gradient of keys is of queries as they were; scores are not."""
    return F.scaled_dot_product_attention(q * gain, k, v)


def normalised(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Tensor:
    q, k = (F.rms_norm(x, x.shape[-1:], gain) for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def latent(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Tensor:
    """Keys are values, each feature by its own number."""
    return F.scaled_dot_product_attention(q, v * gain, v) + k


VARIANTS: list[Callable] = [gains, normalised, latent]


def inputs_of(tokens: int, device: str = "cpu") -> list[Tensor]:
    shapes = [(1, 8, tokens, 64)] * 3 + [(64,)]
    return [torch.randn(s, device=device).to(torch.bfloat16).requires_grad_() for s in shapes]


@pytest.mark.parametrize("addresses", [False, True], ids=["blocks", "addresses"])
@pytest.mark.parametrize("fn", VARIANTS)
def test_products_take_copies(fn: Callable, addresses: bool) -> None:
    hasty = 0
    for plan, lower in kernels_made(fn, inputs_of(512)):
        if plan.loops:
            plan = by_addresses(plan) if addresses else plan
            before = compiled(simplified(lower(plan), HOPPER), HOPPER)
            if overtakes(before.asm["ttgir"]):
                hasty += 1
                with pytest.raises(Unsupported, match="overtake"):
                    check(before, plan.name)
            (made,) = fitting(plan, lower, HOPPER)
            assert not overtakes(made.cubin.asm["ttgir"])
    assert hasty


def test_nothing_is_left_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "copied", lambda ttir: ttir)
    refused = 0
    for plan, lower in kernels_made(gains, inputs_of(512)):
        try:
            fitting(replace(plan, others=()), lower, HOPPER)
        except Unsupported as why:
            refused += "overtake" in str(why)
    assert refused == 1


@pytest.mark.gpu
@pytest.mark.parametrize("fn", VARIANTS)
def test_the_same_bits_each_time(fn: Callable) -> None:
    inputs = inputs_of(2048, "cuda")
    made, found = fl.compile(fn), []  # once, for tuning may take another choice the next time
    for _ in range(8):
        again = [x.detach().requires_grad_() for x in inputs]
        made(*again).square().sum().backward()
        found.append([x.grad for x in again])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert all(e.ok for e in gradient_errors(fn, made, inputs))


# A load with one buffer, one copy ahead, and a product that no one waits for before the next copy.
TTGIR = """
  %0 = ttg.local_alloc : () -> !ttg.memdesc<1x128x64xbf16, #shared, #smem, mutable>
  %1 = ttg.memdesc_index %0[%c0] : !ttg.memdesc<1x128x64xbf16, #shared, #smem, mutable> -> !ttg.memdesc<128x64xbf16, #s>
  ttng.async_tma_copy_global_to_local %arg0[%c0, %c0] %1, %bar, %true : !tt.tensordesc<tensor<128x64xbf16>>
  %2 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %cst) -> (tensor<64x64xf32, #mma>)  : i32 {
    %3 = ttg.memdesc_index %0[%c0] : !ttg.memdesc<1x128x64xbf16, #shared, #smem, mutable> -> !ttg.memdesc<128x64xbf16>
    %4 = ttg.memdesc_trans %3 {order = array<i32: 1, 0>} : !ttg.memdesc<128x64xbf16> -> !ttg.memdesc<64x128xbf16>
    %5 = ttng.warp_group_dot %a, %4, %acc {inputPrecision = 0 : i32, isAsync = true} : tensor<64x128xbf16> -> tensor<64>
    %6:2 = ttng.warp_group_dot_wait %5, %4 {pendings = 1 : i32} : tensor<64x64xf32, #mma>, !ttg.memdesc<128x64xbf16>
    ttng.async_tma_copy_global_to_local %arg0[%i, %c0] %1, %bar, %more : !tt.tensordesc<tensor<128x64xbf16>>
    scf.yield %6#0 : tensor<64x64xf32, #mma>
  }
"""
BY_THREADS = TTGIR.replace(
    "ttng.async_tma_copy_global_to_local %arg0[%i, %c0] %1,", "%7 = ttg.async_copy_global_to_local %p, %1"
)


@pytest.mark.parametrize("text", [TTGIR, BY_THREADS], ids=["engine", "threads"])
def test_overtakes(text: str) -> None:
    assert overtakes(text)
    assert not overtakes(text.replace("pendings = 1", "pendings = 0"))
    assert not overtakes(text.replace("isAsync = true", "isAsync = false"))


def test_one_tile_more_is_enough() -> None:
    assert not overtakes(TTGIR.replace("<1x128x64", "<2x128x64"))
    # Before the wait, the product of the iteration before may still read: two more.
    (copy,) = (line for line in TTGIR.splitlines() if "%i, %c0" in line)
    early = TTGIR.replace(f"{copy}\n", "").replace("    %3 =", f"{copy}\n    %3 =", 1)
    assert overtakes(early) and overtakes(early.replace("<1x128x64", "<2x128x64"))
    assert not overtakes(early.replace("<1x128x64", "<3x128x64"))


def test_threads_write_too() -> None:
    made = "    %s = ttg.local_alloc %x : (tensor<64x128xbf16>) -> !ttg.memdesc<64x128xbf16, #shared, #smem>"
    mine = TTGIR.replace("<1x128x64", "<2x128x64").replace("    %5 =", f"{made}\n    %5 =").replace("%a, %4", "%a, %s")
    assert overtakes(mine) and not overtakes(mine.replace("pendings = 1", "pendings = 0"))


TTIR = """
  %1 = tt.load %0 : tensor<64x64x!tt.ptr<bf16>>
  scf.for %i = %c0 to %n step %c1  : i32 {
    %2 = tt.descriptor_load %arg1[%i, %c0] : !tt.tensordesc<tensor<64x64xbf16>> -> tensor<64x64xbf16>
    %3 = arith.extf %2 : tensor<64x64xbf16> to tensor<64x64xf32>
    %4 = tt.dot %1, %2, %acc, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>
    %5 = tt.load %p : tensor<64x64x!tt.ptr<f32>> loc(#loc5)
    %6 = tt.trans %5 {order = array<i32: 1, 0>} : tensor<64x64xf32> -> tensor<64x64xf32>
    %7 = math.exp2 %5 : tensor<64x64xf32>
    %8 = tt.load %q : tensor<64x64x!tt.ptr<bf16>>
    %9 = tt.dot %8, %2, %4, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>
  }
  %10 = tt.dot %1, %1, %acc, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>
"""


def test_copied() -> None:
    new = [line.strip() for line in copied(TTIR).splitlines() if line not in TTIR.splitlines()]
    assert [line.split(" loc(")[0] for line in new] == [
        '%copy_2 = tt.elementwise_inline_asm "mov.b32 $0, $1;" {constraints = "=r,r", packed_element = 2 : i32, '
        "pure = true} %2 : tensor<64x64xbf16> -> tensor<64x64xbf16>",
        "%4 = tt.dot %1, %copy_2, %acc, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> "
        "tensor<64x64xf32>",
        '%copy_5 = tt.elementwise_inline_asm "mov.b32 $0, $1;" {constraints = "=r,r", packed_element = 1 : i32, '
        "pure = true} %5 : tensor<64x64xf32> -> tensor<64x64xf32>",
        "%6 = tt.trans %copy_5 {order = array<i32: 1, 0>} : tensor<64x64xf32> -> tensor<64x64xf32>",
        "%9 = tt.dot %8, %copy_2, %4, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x64xbf16> -> "
        "tensor<64x64xf32>",
    ]
