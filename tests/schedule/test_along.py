"""What comes along with kernels of rows: gradients that PyTorch would compute of what they load in any case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.explain import Graph
from tests.oracle import check_gradients
from tests.unrun import unrun


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (q @ k.mT / 4).softmax(-1) @ v * torch.sigmoid(gate)


def swish(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (q @ k.mT / 4).softmax(-1) @ v * F.silu(gate)


def in_a_layer(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """The gate is made by a layer, heads and features in one: its gradient goes on to that."""
    gate = (gate.transpose(1, 2).flatten(2) @ torch.ones(32, 32, dtype=q.dtype, device=q.device)).unflatten(-1, (2, 16))
    return gated(q, k, v, gate.transpose(1, 2))


def inputs(dtype: torch.dtype = torch.float32, n: int = 70) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 16, generator=generator).to(dtype) for _ in range(4)]


def backward(fn: Callable, given: list[Tensor]) -> Graph:
    with unrun():
        return fl.explain(fn, *(t.requires_grad_() for t in given)).graphs[1]


@pytest.mark.parametrize("fn", [gated, swish])
def test_the_gradient_of_a_gate_is_stored_with_the_sums_of_its_rows(fn: Callable) -> None:
    found = backward(fn, inputs())
    (first,) = (k for k in found.kernels if any(s.name == "r0_d0" for s in k.stores))
    assert sum(s.shape == (2, 2, 70, 16) and s.name in _returned(found) for s in first.stores) == 2, (
        "dq, and the gate's"
    )
    assert not any("sigmoid" in name or "mul" in name for name, _ in found.left), found.left


def _returned(graph: Graph) -> set[str]:
    assert graph.schedule is not None
    return {name for region in graph.schedule.regions for name in region.outputs}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [gated, swish, in_a_layer])
def test_gradients(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn), [t.to(device) for t in inputs(dtype)])


def test_not_what_takes_other_loads() -> None:
    """The gate's gradient needs another tensor: PyTorch computes it, as before."""

    def scaled(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return gated(q, k, v, gate * v.flip(-2))

    found = backward(scaled, inputs())
    assert all(s.name not in {"mul", "mul_1"} for p in found.kernels for s in p.stores)
