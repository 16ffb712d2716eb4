"""A computed operand that is the same in a whole loop: ptxas would give its registers away."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_pallas.errors import Unsupported
from fl_pallas.kernels import blocks, loops
from fl_pallas.kernels.cubin import compile_ttir, simplified
from fl_pallas.kernels.machine_code import loses_operand, steady_operands

from .test_cubins import kernels_made

HOPPER = 90


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each feature by its own number."""
    return F.scaled_dot_product_attention(q * v[:, :, :1], k, v)


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, with a vector that all queries have."""
    return F.scaled_dot_product_attention(q + k[:, :, :1], k, v, is_causal=True)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return (scores / scores.sum(-1, keepdim=True)) @ v


VARIANTS: list[Callable] = [scaled, shifted, linear]


def texts(fn: Callable, gradients: bool) -> Iterator[str]:
    """PTX of each kernel with a loop, of heads of 64 features."""
    inputs = [torch.randn(1, 8, 512, 64, dtype=torch.bfloat16, requires_grad=gradients) for _ in range(3)]
    for plan, lower in kernels_made(fn, inputs):
        if plan.loops:
            yield compile_ttir(simplified(lower(plan), HOPPER), HOPPER).asm["ptx"]


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("fn", VARIANTS)
def test_lies_in_shared_memory(fn: Callable, gradients: bool) -> None:
    found = [*texts(fn, gradients)]
    assert found
    assert all("wgmma" in ptx and not any(steady_operands(ptx)) for ptx in found)


@pytest.mark.parametrize("fn", VARIANTS)
def test_in_registers_it_is_not_used(fn: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "steady_sides", lambda *_: [])
    # With loads at an iteration's beginning ptxas happens to keep the registers of two of them.
    monkeypatch.setattr(blocks, "_raise", lambda *_: None)
    with pytest.raises(Unsupported, match="compute something else"):
        [*texts(fn, False)]


PTX = """
$L__BB0_1:
    mov.b32 %r2, %r1;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r1,%r1,%r1}, %rd1, 1, 1, 1, 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,%f2}, {%r2,%r2,%r2,%r2}, %rd1, 1, 1, 1, 0;
    @%p1 bra $L__BB0_1;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r1,%r1,%r1}, %rd1, 1, 1, 1, 0;
    ret;
"""


def sass(*body: str) -> str:
    return "\n".join(f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(body))


def test_what_a_loop_writes_is_not_steady() -> None:
    assert steady_operands(PTX) == [True, False, False]


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        (("HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", "FADD R9, R8, R8", "@P1 BRA 0x0", "EXIT"), False),
        (("HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", "FADD R7, R8, R8", "@P1 BRA 0x0", "EXIT"), True),
        (("FADD R7, R8, R8", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", "@P1 BRA 0x0", "EXIT"), True),
        (("MOV R7, R8", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", "@P1 BRA 0x0", "EXIT"), False),
        (("CS2R R6, SRZ", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", "@P1 BRA 0x0", "EXIT"), False),
        (("FADD R7, R8, R8", "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", "@P1 BRA 0x10", "EXIT"), False),
    ],
    ids=["others", "behind", "before", "restored", "zeros", "before the loop"],
)
def test_registers_that_are_written(body: tuple[str, ...], lost: bool) -> None:
    assert loses_operand(sass(*body), [True]) is lost


def test_another_number_of_products_is_not_trusted() -> None:
    assert loses_operand(sass("EXIT"), [True])
