"""Functions of all pairs (`F.cosine_similarity`): products of matrices, in both passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.inner import as_product
from fl_pallas.schedule.plan import Accumulator
from tests.oracle import check, check_gradients
from tests.unrun import unrun


def cosines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.cosine_similarity(q[:, :, None], k[:, None], dim=-1) * 8).softmax(-1) @ v


def inputs(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, 16, generator=generator).to(dtype).to(device) for _ in range(3)]


def test_gradients_are_products(device: torch.device) -> None:
    """What PyTorch makes of each side alone is as large as that side; sums of two terms are two sums."""
    with unrun():
        graphs = fl.explain(cosines, *(t.requires_grad_() for t in inputs(300, torch.bfloat16, device))).graphs
    assert not [f for g in graphs for f in g.fallbacks]
    for plan in (p for g in graphs for p in g.kernels):
        wide = frozenset(a for a, n in plan.choices.tiles if n > 1)
        for loop in plan.loops:
            steps = [s for s in loop.steps if isinstance(s, Accumulator) and {*s.axes} & {*plan.features}]
            assert all(as_product(s.update, loop.axis, wide) is not None for s in steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches(dtype: torch.dtype, device: torch.device) -> None:
    compiled = fl.compile(cosines)
    check(cosines, inputs(70, dtype, device), compiled(*inputs(70, dtype, device)))
    check_gradients(cosines, compiled, inputs(70, dtype, device))
