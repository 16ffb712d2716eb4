"""Rows that go through far more than others: several programs share them, and what comes of it is the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.passes import long_lists, skip_tiles, unfused, visits
from fl_pallas.schedule.text import plan_text
from tests.masked import Mask, attention
from tests.oracle import check_gradients, run_and_check
from tests.plan_evaluate import captured
from tests.unrun import explain

LENGTH = 1100


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_tiles, "MIN_EXTENT", 256)
    monkeypatch.setattr(visits, "LAUNCH", 0)
    monkeypatch.setattr(long_lists, "LAUNCH", 0)
    monkeypatch.setattr(long_lists, "MIN_PART", 64)
    monkeypatch.setattr(long_lists, "FEW", 2)
    monkeypatch.setattr(long_lists, "_resident", lambda plan, target: 8)
    monkeypatch.setattr(unfused, "COST", float("inf"))


MASKS: dict[str, Mask] = {
    "sinks and a window": lambda i, j: (j <= i) & ((j < 4) | (i - j < 70)),
    "what all see, and what sees all": lambda i, j: ((i // 16 - j // 16).abs() <= 1) | (j < 16) | (i < 16),
    "the last sees all": lambda i, j: ((i - j).abs() < 20) | (i >= LENGTH - 3),
    "a column": lambda i, j: (j <= i) & ((i - j < 20) | (j // 32 == 13)),
}


def inputs_of(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, LENGTH, 16, dtype=dtype, device=device) for _ in range(3))


def shared(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[str]:
    """The kernels that share what others leave."""
    own = [t.clone().requires_grad_() for t in inputs]
    return [k.name for k in explain(fn, *own).kernels if k.name.endswith("_long")]


@pytest.mark.parametrize("name", MASKS)
def test_results_of_lists(name: str, device: torch.device) -> None:
    fn, inputs = attention(MASKS[name]), inputs_of(torch.float32, device)
    assert shared(fn, inputs)
    run_and_check(fn, fl.compile(fn), inputs, name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    fn, inputs = attention(MASKS[name]), inputs_of(dtype, device)
    check_gradients(fn, fl.compile(fn), inputs, name=name)


@pytest.mark.parametrize("name", MASKS)
def test_as_the_program(name: str) -> None:
    run = captured(attention(MASKS[name]), inputs_of(torch.float32, torch.device("cpu")))
    expected = run.values()
    for plan, plan_run, _ in run.kernels(bounded=True):
        for store, found in plan_run.run().items():
            if store in expected:
                np.testing.assert_allclose(found, expected[store], rtol=1e-9, atol=1e-9, err_msg=plan_text(plan))


@pytest.mark.parametrize(
    "mask", [lambda i, j: j <= i, lambda i, j: (i - j).abs() < 300, lambda i, j: (j < 500) | (i == j)]
)
def test_where_rows_are_alike(mask: Mask) -> None:
    assert not shared(attention(mask), inputs_of(torch.float32, torch.device("cpu")))
