"""Biases that a layer makes of pairs: a matrix, heads innermost, of which kernels read a copy by head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.passes import lay_out
from fl_pallas.schedule.plan import KernelPlan, operand_names
from tests.oracle import check, check_gradients
from tests.unrun import explain


def pair_biased(q: Tensor, k: Tensor, v: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """AlphaFold's: z [b,n,n,c] of pairs, w [c,h]."""
    return (q @ k.mT / 4 + (z @ w).permute(0, 3, 1, 2)).softmax(-1) @ v


def rows(q: Tensor, k: Tensor, v: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """Triangle attention: rows of pairs attend along themselves, q, k, v [b,h,n,n,d] here; all have one bias."""
    return (q @ k.mT / 4 + (z @ w).permute(0, 3, 1, 2)[:, :, None]).softmax(-1) @ v


def draw(fn: object, n: int, device: torch.device | str = "cpu") -> list[Tensor]:
    shape = (1, 4, n, n, 16) if fn is rows else (2, 4, n, 16)
    b = shape[0]
    return [
        *(torch.randn(shape, device=device) for _ in range(3)),
        torch.randn(b, n, n, 8, device=device),
        torch.randn(8, 4, device=device),
    ]


def copying(kernels: list[KernelPlan]) -> list[KernelPlan]:
    return [k for k in kernels if "_c" in k.name and not k.loops]


def test_heads_are_copied_apart() -> None:
    """Read as it lies, each element of a tile is in another sector: 1.5 ms of an H200 for 512 rows of 512, which read
    the bias 512 times."""
    found = explain(rows, *(t.bfloat16() for t in draw(rows, 256)))
    copy, attention = found.graphs[0].kernels
    assert [s.shape for s in copy.stores] == [(4, 256, 256)] and copy.stores[0].name in operand_names(attention)


def test_few_reads_are_left_as_they_are() -> None:
    assert not copying(list(explain(pair_biased, *draw(pair_biased, 64)).graphs[0].kernels))


@pytest.mark.parametrize("fn", [pair_biased, rows])
def test_right(fn, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lay_out, "LAUNCH", 0)
    inputs = draw(fn, 24, device)
    (graph,) = explain(fn, *inputs).graphs
    assert copying(list(graph.kernels))
    compiled = fl.compile(fn)
    check(fn, inputs, compiled(*inputs))
    check_gradients(fn, compiled, inputs)
