"""float64 beside other floats: the one is PyTorch's on a GPU, what is left fuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fl_pallas as fl
from fl_pallas.capture.translate import translate
from fl_pallas.schedule.doubles import doubles
from fl_pallas.schedule.pipeline import schedule
from fl_pallas.schedule.program import left_to_pytorch

from .oracle import check, check_gradients
from .unrun import explain

SIZE = 96


def levels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias by levels of distance, as log-linear attention has them."""
    i = torch.arange(SIZE, device=q.device)
    level = torch.log2((i[:, None] - i).abs().clamp(min=1).double()).floor()
    return (q @ k.mT / 4 - level.to(q.dtype)).softmax(-1) @ v


def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask by angles."""
    at = torch.linspace(0, 3, SIZE, dtype=torch.float64, device=q.device)
    return (q @ k.mT / 4).masked_fill((at[:, None] - at).abs() > 1.5, -torch.inf).softmax(-1) @ v


def summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What comes of attention, added up in more digits."""
    out = (q @ k.mT / 4).softmax(-1) @ v
    return out, out.double().square().sum((-1, -2)).to(q.dtype)


FUNCTIONS = [levels, near, summed]


def made(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, SIZE, 16, generator=generator).to(device) for _ in range(3)]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_attention_fuses_beside_them(fn: Callable[..., Tensor]) -> None:
    program = translate(make_fx(fn, tracing_mode="fake")(*made(torch.device("cpu"))))
    left = left_to_pytorch(program, doubles(program), "")
    (kernels,) = schedule(left).kernels
    assert {k.compute for k in kernels} == {"f32"}
    assert not any(s.dtype == "f64" for k in kernels for s in k.stores)


def test_alone_they_are_as_they_were() -> None:
    inputs = [x.double() for x in made(torch.device("cpu"))]
    assert not doubles(translate(make_fx(near, tracing_mode="fake")(*inputs)))


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_right(fn: Callable[..., Tensor], device: torch.device) -> None:
    inputs = made(device)
    check(fn, inputs, fl.compile(fn)(*inputs))
    check_gradients(fn, fl.compile(fn), inputs)
    assert explain(fn, *inputs).kernels
