"""Functions of all pairs (`F.cosine_similarity`): products of matrices, in both passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.inner import as_product
from fl_pallas.schedule.plan import Accumulator
from tests.oracle import check, check_gradients, run_and_check
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


def mean_shift(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of distances: their gradients are sums of differences of points."""
    distances = (q[:, :, None] - k[:, None]).square().sum(-1)
    return torch.exp(-distances / 16) @ v


def points(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """AlphaFold 2's: q, k [batch, length, four points of three coordinates and more]."""
    a, b = (x[..., :12].unflatten(-1, (4, 3)) for x in (q, k))
    distances = (a[:, :, None] - b[:, None]).square().sum((-1, -2))
    return (q @ k.mT / 4 - distances / 8).softmax(-1) @ v


@pytest.mark.parametrize("fn", [mean_shift, points])
def test_sums_of_differences_are_products(fn: Callable, device: torch.device) -> None:
    with unrun():
        graphs = fl.explain(fn, *(t.requires_grad_() for t in inputs(300, torch.bfloat16, device))).graphs
    for plan in (p for g in graphs for p in g.kernels):
        wide = frozenset(a for a, n in plan.choices.tiles if n > 1)
        for loop in plan.loops:
            steps = [s for s in loop.steps if isinstance(s, Accumulator) and {*s.axes} & {*plan.features}]
            assert all(as_product(s.update, loop.axis, wide) is not None for s in steps)


@pytest.mark.parametrize("fn", [mean_shift, points])
@pytest.mark.parametrize(
    "dtype, origin", [(torch.float32, 3.0), *((torch.bfloat16, origin) for origin in (0.0, 3.0, 100.0))]
)
def test_far_from_the_origin(fn: Callable, dtype: torch.dtype, origin: float, device: torch.device) -> None:
    """What cancels is rounded alike on either side."""
    q, k, v = inputs(70, torch.float32, device)
    given = [*((x + origin).to(dtype) for x in (q, k)), v.to(dtype)]
    check_gradients(fn, fl.compile(fn), given)


def messages(h: Tensor, x: Tensor) -> Tensor:
    """Of an equivariant network: directions to all others, by distance, times features of the others."""
    d = x[:, :, None] - x[:, None]
    return torch.einsum("bijx,bjc->bicx", d / (d.square().sum(-1, keepdim=True) + 1e-3).sqrt(), h)


def averaged_messages(h: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bij,bijx,bjc->bicx", (h @ h.mT).softmax(-1), x[:, :, None] - x[:, None], h)


@pytest.mark.parametrize("fn", [messages, averaged_messages])
def test_differences_by_features_of_one_side(fn: Callable, device: torch.device) -> None:
    """A product of matrices rounds no weight times a feature that its other side has: nothing would cancel."""
    h, x = (t[:1] for t in inputs(37, torch.float32, device)[:2])
    given = [h[..., :8].bfloat16(), (x[..., :3] + 3).bfloat16()]
    run_and_check(fn, fl.compile(fn, fallback="error"), given, name="messages")


def interaction(x: Tensor, vectors: Tensor, a: Tensor, points: Tensor) -> Tensor:
    """Messages of channels by coordinates, of directions and of neighbours' vectors (PaiNN, TorchMD-NET)."""
    apart = points[:, None] - points
    near = torch.exp(-(apart.square().sum(-1) + 1e-10).sqrt())[..., None]
    return ((a * near)[..., None] * apart[:, :, None] + vectors * (x * near)[..., None]).sum(1)


def attended(x: Tensor, vectors: Tensor, a: Tensor, points: Tensor) -> Tensor:
    """The same, by a softmax of each channel."""
    apart = points[:, None] - points
    weights = torch.softmax(a[:, None] * x - (apart.square().sum(-1) + 1e-10).sqrt()[..., None], 1)
    return (weights[..., None] * (apart[:, :, None] + vectors)).sum(1)


@pytest.mark.parametrize("fn", [interaction, attended])
def test_channels_by_coordinates(fn: Callable[..., Tensor], device: torch.device) -> None:
    """One index of a coordinate in a tile: the sum of weighted points is no product of matrices, and rounds as one."""
    inputs = [torch.randn(47, *rest, device=device).bfloat16() for rest in ((8,), (8, 3), (8,), (3,))]
    run_and_check(fn, fl.compile(fn), inputs)
    check_gradients(fn, fl.compile(fn), inputs)
