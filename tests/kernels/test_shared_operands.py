"""An operand of two matrix products some of whose numbers are constants: ptxas would write them for one alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.errors import Unsupported
from fl_pallas.kernels import products
from fl_pallas.kernels.cubin import compile_ttir
from fl_pallas.kernels.machine_code import loses_constant, shared_operands
from tests.oracle import check

from .test_cubins import kernels_made
from .test_steady import HOPPER, sass


def _later(scores: Tensor) -> Tensor:
    """Weights of the keys behind a query; all others weigh 1."""
    i = torch.arange(scores.shape[-2], device=scores.device)
    return torch.exp(scores.masked_fill(i[:, None] >= i, 0.0))


def of_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float32 a product is several, of parts of its sides."""
    return _later(q @ k.mT) @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two products of the same weights."""
    weights = _later(q @ k.mT)
    return weights @ v, weights @ k


CASES: list[tuple[Callable, torch.dtype, int]] = [(of_parts, torch.float32, 33), (twice, torch.bfloat16, 33)]


def inputs_of(dtype: torch.dtype, tokens: int, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(1, 2, tokens, 32, device=device).mul(0.4).to(dtype) for _ in range(3)]


@pytest.mark.parametrize(("fn", "dtype", "tokens"), CASES)
def test_constants_are_not_known(fn: Callable, dtype: torch.dtype, tokens: int) -> None:
    for plan, lower in kernels_made(fn, inputs_of(dtype, tokens)):
        compiled = compile_ttir(lower(plan), HOPPER)
        assert any(first is not None for first in shared_operands(compiled.asm["ptx"]))


@pytest.mark.parametrize(("fn", "dtype", "tokens"), CASES)
def test_known_ones_are_lost(fn: Callable, dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "uncertain", lambda x: x)
    kernels = kernels_made(fn, inputs_of(dtype, tokens))
    with pytest.raises(Unsupported, match="compute something else"):
        [compile_ttir(lower(plan), HOPPER) for plan, lower in kernels]


@pytest.mark.parametrize(("fn", "dtype", "tokens"), CASES)
def test_agrees(fn: Callable, dtype: torch.dtype, tokens: int, device: str) -> None:
    inputs = inputs_of(dtype, tokens, device)
    check(fn, inputs, fl.compile(fn)(*inputs))


PTX = """
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r2,%r3,%r4}, %rd1, 1, 1, 1, 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,%f2}, {%r5,%r6,%r7,%r8}, %rd1, 1, 1, 1, 0;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r2,%r3,%r4}, %rd1, 1, 1, 1, 0;
    mov.b32 %r3, %r9;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r2,%r3,%r4}, %rd1, 1, 1, 1, 0;
"""
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24"


def test_operands_of_several() -> None:
    assert shared_operands(PTX) == [None, None, 0, None]


WRITTEN = "MOV R4, R8", "MOV R5, R9", "MOV R6, R10", "MOV R7, R11"
ONE, ONES = "IMAD.MOV.U32 R5, RZ, RZ, 0x3f800000", "MOV R5, 0x3f803f80"
SUM = "FADD R5, R8, R8"


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        ((*WRITTEN, ONE, PRODUCT, PRODUCT), False),
        ((*WRITTEN, SUM, PRODUCT, PRODUCT), False),
        ((*WRITTEN, SUM, PRODUCT, ONES, PRODUCT), True),
        ((*WRITTEN, ONES, PRODUCT, "CS2R R4, SRZ", PRODUCT), True),
        ((*WRITTEN, PRODUCT, ONES, PRODUCT), False),
        (("CS2R R4, SRZ", "CS2R R6, SRZ", PRODUCT, "CS2R R4, SRZ", PRODUCT), False),
        ((*WRITTEN, SUM, PRODUCT, SUM, PRODUCT), False),
        ((*WRITTEN[1:], PRODUCT, PRODUCT), True),
        ((*WRITTEN[1:], PRODUCT, WRITTEN[0], PRODUCT), True),
    ],
    ids=["kept", "computed", "late", "another", "copied", "zeros", "computed again", "never", "first late"],
)
def test_numbers_that_are_written(body: tuple[str, ...], lost: bool) -> None:
    assert loses_constant(sass(*body), [None, 0]) is lost


def test_of_a_loop_that_is_written_out() -> None:
    assert loses_constant(sass(PRODUCT), [None, 0])
    assert not loses_constant(sass(*WRITTEN, SUM, PRODUCT, ONES, PRODUCT, PRODUCT), [None, 0])
