"""LLVM assumes nothing of vectors of integers: its NVPTX backend lets one that overflows, and is not read, run over."""

from __future__ import annotations

import pytest
import torch
import triton

import fl_pallas as fl
from fl_pallas.kernels.compiler import unassumed
from fl_pallas.kernels.fit import fitting
from tests.generated import Mask, Spec
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check_gradients

PACKED = Spec(
    score="dot", pointwise=(), biases=("per key",), mask=Mask("prefix", ()), keep_diagonal=True, normaliser="sigmoid",
    extras=("entropy", "sharpness"), epilogue="residual", batch=1, heads=1, queries=70, keys=16, head_dim=16, seed=5250,
)  # fmt: skip
"""A thread's row and column were shifted as one vector: the mask of half of the rows was that of others."""


@pytest.mark.parametrize(
    "given, kept",
    [
        ("%1 = shl nuw nsw <2 x i32> %0, <i32 28, i32 1>", "%1 = shl <2 x i32> %0, <i32 28, i32 1>"),
        ("%1 = or disjoint <2 x i32> %0, <i32 poison, i32 1>", "%1 = or <2 x i32> %0, <i32 poison, i32 1>"),
        ("%1 = zext nneg <4 x i16> %0 to <4 x i32>", "%1 = zext <4 x i16> %0 to <4 x i32>"),
        ("%1 = shl nuw nsw i32 %0, 4", "%1 = shl nuw nsw i32 %0, 4"),
        ("%1 = fadd nsz <2 x float> %0, %0", "%1 = fadd nsz <2 x float> %0, %0"),
    ],
)
def test_vectors_of_integers_alone(given: str, kept: str) -> None:
    assert unassumed(given) == kept


def test_no_kernel_is_compiled_with_them() -> None:
    """Triton 3.6 does put numbers into vectors."""
    inputs = PACKED.inputs(torch.float32, torch.device("cpu"))
    given = [t.requires_grad_(t.is_floating_point()) for t in inputs]
    vectors = 0
    for plan, lower in kernels_made(PACKED.build(), given):
        (fitted,) = fitting(plan, lower, 90)
        llir = fitted.cubin.asm["llir"]
        assert unassumed(llir) == llir
        vectors += "shl <2 x i32>" in llir
    assert vectors or not triton.__version__.startswith("3.6.")


def test_a_mask_is_of_its_rows(device: torch.device) -> None:
    """A quarter of the gradient of values was off on a GPU."""
    program = PACKED.build()
    check_gradients(program, fl.compile(program), PACKED.inputs(torch.float32, device), name=str(PACKED))
