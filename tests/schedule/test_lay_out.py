"""Copies in another order: made where tiles lie scattered and it pays, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import fl_pallas as fl
from fl_pallas.schedule.expr import index, loads
from fl_pallas.schedule.passes import lay_out as laying
from fl_pallas.schedule.plan import KernelPlan
from tests.corpus.science import triangle_starting
from tests.oracle import check_gradients, run_and_check
from tests.plan_evaluate import captured
from tests.unrun import unrun


def triangle(n: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    q, k, v, gate = (torch.randn(n, n, heads, 16, dtype=dtype) for _ in range(4))
    mask = (torch.rand(n, n) < 0.8).to(dtype)
    mask[:, 0] = 1
    return [q, k, v, torch.randn(n, n, heads, dtype=dtype), mask, gate]


def plans(fn, inputs) -> list[KernelPlan]:
    return [p for plans in captured(fn, inputs).made.kernels for p in plans]


def test_heads_innermost() -> None:
    copy, plan = plans(triangle_starting, triangle(128, 4))
    (store,) = copy.stores
    assert store.shape == (4, 128, 128)
    assert not copy.loops and f"copied to {store.name}" in plan.notes[-1]


def test_not_where_it_does_not_pay() -> None:
    """Few are read, or heads are alone: the tiles are runs already."""
    assert len(plans(triangle_starting, triangle(16, 4))) == 1
    assert len(plans(triangle_starting, triangle(128, 1))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(laying, "LAUNCH", 0)
    inputs = [t.to(device) for t in triangle(19, 3, dtype)]
    assert len(plans(triangle_starting, inputs)) == 2
    run_and_check(triangle_starting, fl.compile(triangle_starting), inputs)


def test_both_loop_parts_read_the_copy(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A causal mask: the tiles below the diagonal have steps of their own."""
    monkeypatch.setattr(laying, "LAUNCH", 0)

    def causal(q, k, v, bias):
        i = torch.arange(q.shape[-2], device=q.device)
        scores = (q @ k.mT + bias.permute(2, 0, 1)).masked_fill(i > i[:, None], float("-inf"))
        return scores.softmax(-1) @ v

    q, k, v = (torch.randn(8, 150, 16, device=device) for _ in range(3))
    inputs = [q, k, v, torch.randn(150, 150, 8, device=device)]
    copy, plan = plans(causal, inputs)
    assert plan.loops[0].interior is not None and copy.stores[0].shape == (8, 150, 150)
    run_and_check(causal, fl.compile(causal), inputs)


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


def shared_bias(batch: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """q, k, v [batch, 2, 100, 16] and a bias [2, 100, 100] for all of them."""
    q, k, v = (torch.randn(batch, 2, 100, 16, device=device, requires_grad=True) for _ in range(3))
    return [q, k, v, torch.randn(2, 100, 100, device=device, requires_grad=True)]


def turned(batch: int) -> list[KernelPlan]:
    with unrun():
        return [p for p in fl.explain(biased, *shared_bias(batch)).graphs[1].kernels if p.name.endswith("_c0")]


def test_a_bias_is_turned_for_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the gradient of keys are the bias's columns: its tiles would be turned by each program of the batch."""
    monkeypatch.setattr(laying, "LAUNCH", 2**20)
    (copy,) = turned(32)
    (store,) = copy.stores
    assert store.shape == (2, 100, 100) and store.index == tuple(map(index, store.axes))
    assert [i.axis.name for i in loads(store.expr)[0].index[1:]] == [a.name for a in store.axes[:0:-1]]
    assert not turned(8)


def test_gradients_by_a_turned_bias(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(laying, "LAUNCH", 0)
    check_gradients(biased, fl.compile(biased), [t.detach() for t in shared_bias(17, device)])


# --- what is stored ---------------------------------------------------------------------------------


def heads_last(q: torch.Tensor, k: torch.Tensor, z: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Weights [i, j, h] of pair values [i, j, c]: results [i, h, c], and a bias [i, j, h]."""
    scores = torch.einsum("ihc,jhc->ijh", q, k) / 4 + bias
    return torch.einsum("ijh,ijc->ihc", scores.softmax(1), z)


def of_pairs(n: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    q, k = (torch.randn(n, 6, 16, device=device) for _ in range(2))
    return [q, k, torch.randn(n, n, 16, device=device), torch.randn(n, n, 6, device=device)]


def stored(n: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what kernels of the backward pass store, by name."""
    with unrun():
        wanted = [t.requires_grad_() for t in of_pairs(n)]
        return {s.name: s.shape for p in fl.explain(heads_last, *wanted).graphs[1].kernels for s in p.stores}


def test_heads_innermost_are_stored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of the bias is copied to where it belongs; weights for another kernel lie as they are made."""
    monkeypatch.setattr(laying, "LAUNCH", 2**10)
    shapes = stored(64)
    (turned,) = (name for name, shape in shapes.items() if shape == (64, 64, 6))
    assert [shape for name, shape in shapes.items() if name.endswith(f"_{turned}")] == [(6, 64, 64)]
    assert [shape for name, shape in shapes.items() if name.startswith("r0_w")] == [(6, 64, 64)]
    monkeypatch.setattr(laying, "LAUNCH", 2**40)
    assert not [name for name in stored(64) if name.endswith(f"_{turned}")]


def test_gradients_that_are_stored_apart(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(laying, "LAUNCH", 0)
    check_gradients(heads_last, fl.compile(heads_last), of_pairs(37, device))
