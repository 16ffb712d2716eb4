"""What goes wrong in the compiler itself: PyTorch runs the program, and a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas import backend, realise
from fl_pallas.explain import Fallback
from fl_pallas.kernels.evaluate import Evaluator
from fl_pallas.schedule.pipeline import Schedule
from fl_pallas.schedule.program import Value

from .oracle import check_gradients, run_and_check


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def broken(*_: object, **__: object) -> NoReturn:
    raise KeyError("an axis")


PLACES = [(realise, "schedule"), (Evaluator, "eval")]


@pytest.fixture(params=PLACES, ids=["planning", "writing kernels"])
def breaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*request.param, broken)


@pytest.fixture
def inputs(device: torch.device) -> list[Tensor]:
    return [torch.randn(2, 33, 16, device=device) for _ in range(3)]


@pytest.mark.usefixtures("breaks")
def test_runs_in_pytorch(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fl.config, "verify", False)
    with pytest.warns(fl.FallbackWarning, match="an error in fl_pallas, which is worth a report .KeyError: 'an axis'"):
        run_and_check(attention, fl.compile(attention), inputs)
        check_gradients(attention, fl.compile(attention), inputs)


@pytest.mark.usefixtures("breaks")
def test_is_raised_where_it_is_asked_for(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="an axis"):
        fl.compile(attention)(*inputs)
    monkeypatch.setattr(fl.config, "verify", False)
    with pytest.raises(fl.Unsupported, match="an error in fl_pallas"):
        fl.compile(attention, fallback="error")(*inputs)


def test_memory_that_runs_out_is_pytorchs_to_tell(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(realise, "schedule", full)
    monkeypatch.setattr(fl.config, "verify", False)
    with pytest.raises(torch.OutOfMemoryError):
        fl.compile(attention)(*inputs)


def picked(q: Tensor, seen: Tensor) -> Tensor:
    k = q[:, seen.nonzero().squeeze(-1)]
    return (q @ k.mT).softmax(-1) @ k


def gathered(q: Tensor, seen: Tensor) -> Tensor:
    """Longformer's global tokens: room for as many as there are."""
    k = q.new_zeros(len(q), seen.sum(), q.shape[-1])
    k[:, seen.cumsum(0)[seen] - 1] = q[:, seen]
    return (q @ k.mT).softmax(-1) @ k


@pytest.mark.parametrize("fn", [picked, gathered])
def test_sizes_that_data_decides(fn: Callable[..., Tensor], device: torch.device) -> None:
    """Where TorchDynamo goes on behind them, the graph is PyTorch's."""
    q, seen = torch.randn(2, 20, 8, device=device), torch.arange(20, device=device) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.warns(fl.FallbackWarning):
            out = fl.compile(fn)(q, seen)
    torch.testing.assert_close(out, fn(q, seen))


def test_an_attempt_that_is_given_up_is_not_told_of(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both passes are planned again, since PyTorch would compute for the backward pass what kernels know."""
    attempts: list[Schedule] = []
    realise_pass = backend.realised

    def again(forward: Schedule, _: Schedule) -> list[Value]:
        attempts.append(forward)
        return [forward.program.values[0]] if len(attempts) == 1 else []

    def refusing(aten: Any, made: Any, args: Any, settings: Any, family: Any, found: list[Fallback], *more: Any) -> Any:
        if not attempts:
            found.append(Fallback("a product", "it is only the first attempt", None, 0))
        return realise_pass(aten, made, args, settings, family, found, *more)

    monkeypatch.setattr(backend, "computed_again", again)
    monkeypatch.setattr(backend, "realised", refusing)
    q, k, v = (t.requires_grad_() for t in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.FallbackWarning)
        check_gradients(attention, fl.compile(attention, fallback="error"), (q, k, v))
    assert len(attempts) == 2
