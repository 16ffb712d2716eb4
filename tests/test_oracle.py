"""The oracle itself: what it must let pass, and what it must not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .oracle import check, errors, reference, run_and_check
from .programs import CORPUS, Case


def double(x: Tensor) -> Tensor:
    return x.float() * 2


def log(x: Tensor) -> Tensor:
    return torch.log(x)


X = torch.linspace(-1.0, 2.0, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_is_float64_whatever_the_program_casts(dtype: torch.dtype) -> None:
    assert reference(double, [X.to(dtype)]).dtype == torch.float64
    assert reference(lambda x: x + torch.arange(7, dtype=dtype), [X]).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_accepts_eager() -> None:
    check(double, [X.bfloat16()], double(X.bfloat16()))


def test_rejects_an_error_and_says_how_to_repeat_it() -> None:
    with pytest.raises(AssertionError, match=r"(?s)error 0.001.*variant double.*float32\[7\].*python -m pytest"):
        check(double, [X], double(X) * 1.001)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: log(x).nan_to_num(nan=0.0, neginf=-torch.inf), "isnan holds at 0"),
        (lambda x: log(x).nan_to_num(nan=torch.nan, neginf=-1e9), "isneginf holds at 0"),
        (lambda x: log(x).double(), "dtype torch.float64"),
        (lambda x: log(x)[None], "shape"),
        (lambda x: (log(x),), "returned a tuple"),
    ],
)
def test_rejects_another_pattern_or_type(wrong, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(log, [torch.tensor([-1.0, 0.0, 1.0, 2.0])], wrong(torch.tensor([-1.0, 0.0, 1.0, 2.0])))


def test_rejects_a_write_to_an_input() -> None:
    with pytest.raises(AssertionError, match="input 0 was written to"):
        run_and_check(double, lambda x: x.add_(1) * 2 - 2, [X.clone()])


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CORPUS])
def test_corpus_is_well_conditioned(case: Case) -> None:
    """Eager float32 is close to float64, so that the bound on compiled code is a sharp one."""
    target, inputs = case.target(torch.float32, "cpu"), case.make_inputs(100, torch.float32, "cpu")
    assert all(e.eager < 3e-6 for e in errors(target, inputs, target(*inputs)))
