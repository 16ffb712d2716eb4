"""Programs that hypothesis makes up, through the compiler."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

import fl_pallas as fl

from .generated import Spec, specs
from .generated_layers import LayerSpec, layers
from .oracle import check_gradients, run_and_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(spec=specs())
def test_generated(spec: Spec, dtype: torch.dtype, device: torch.device) -> None:
    note(str(spec))
    program = spec.build()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)  # a program too small to gain may stay in PyTorch
        run_and_check(program, fl.compile(program), spec.inputs(dtype, device), name=str(spec))


@settings(
    max_examples=settings.default.max_examples // 4,  # each has a backward pass
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=layers())
def test_gradients_of_generated_layers(spec: LayerSpec, device: torch.device) -> None:
    """Nothing of a layer is stored for each pair of tokens, and its gradients are PyTorch's."""
    note(str(spec))
    torch.compiler.reset()
    check_gradients(
        spec, fl.compile(lambda *inputs: spec(*inputs), fallback="error"), spec.inputs(torch.float32, device)
    )
