"""Every case with heads of 64 features, both passes, on a GPU: results with the error of eager PyTorch's or less."""

from __future__ import annotations

import pytest
import torch

import fl_pallas as fl

from .oracle import check_gradients, run_and_check
from .programs import FUSED, Case
from .wide import wide_inputs

SEQ = 384


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning", "ignore:Error detected in:UserWarning")
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in FUSED])
def test_wide(case: Case, device: torch.device) -> None:
    inputs = wide_inputs(case, SEQ, torch.bfloat16, device)
    if inputs is None:
        pytest.skip(f"{case.name} takes inputs of its own shapes alone")
    run_and_check(case.fn, fl.compile(case.fn), inputs, name=case.name)
    if case.name != "in_place":  # PyTorch itself cannot differentiate it
        check_gradients(case.fn, fl.compile(case.fn), inputs, name=case.name)
