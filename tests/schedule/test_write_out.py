"""Pairs of points of a few features: short axes are written out, and a thread has the sums of a row to itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels.cubin import compile_ttir
from fl_pallas.schedule.expr import reductions
from fl_pallas.schedule.plan import is_by_thread, step_expressions
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check_gradients, run_and_check


def forces(x: Tensor, mass: Tensor) -> Tensor:
    """Gravity, softened: x [i, 3], mass [i]."""
    d = x[None] - x[:, None]
    return (mass[None, :, None] * d * (d.square().sum(-1) + 1e-2).pow(-1.5)[..., None]).sum(1)


def energy(x: Tensor, y: Tensor) -> Tensor:
    """Energy distance between two samples."""

    def mean(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None] - b).square().sum(-1).add(1e-9).sqrt().mean()

    return 2 * mean(x, y) - mean(x, x) - mean(y, y)


def nearest(x: Tensor, y: Tensor) -> Tensor:
    """Chamfer distance."""
    d = (x[:, None] - y).square().sum(-1)
    return d.amin(-1).mean() + d.amin(-2).mean()


def embedded(x: Tensor, p: Tensor) -> Tensor:
    """t-SNE's loss: pairs p [i, j] are loaded."""
    w = 1 / (1 + (x[:, None] - x).square().sum(-1)) * (1 - torch.eye(len(x), device=x.device))
    return -(p * (w / w.sum() + 1e-9).log()).sum()


def boids(x: Tensor, v: Tensor) -> Tensor:
    """Alignment within a radius, and separation: several sums of two features, and a quotient of them."""
    d = x[:, None] - x
    near = (d.square().sum(-1) < 1).to(x.dtype)
    mean = (near[..., None] * v).sum(1) / near.sum(1, keepdim=True)
    return mean - v + (d / (d.square().sum(-1, keepdim=True) + 0.1)).sum(1)


def phases(theta: Tensor, weight: Tensor) -> Tensor:
    """Kuramoto's oscillators, one number each."""
    return (weight * torch.sin(theta[None] - theta[:, None])).mean(-1)


def inputs(fn: Callable[..., Tensor], n: int, device: torch.device | str) -> list[Tensor]:
    shapes = {
        forces: ((n, 3), (n,)),
        energy: ((n, 8), (n + 9, 8)),
        nearest: ((n, 3), (n - 7, 3)),
        embedded: ((n, 2), (n, n)),
        boids: ((n, 2), (n, 2)),
        phases: ((n,), (n,)),
    }
    given = [torch.randn(*shape, device=device) for shape in shapes[fn]]
    return [given[0], given[1].flatten().softmax(0).view(n, n)] if fn is embedded else given


ALL = [forces, energy, nearest, embedded, boids, phases]


@pytest.mark.parametrize("n", [70, 300])
@pytest.mark.parametrize("fn", ALL)
def test_right(fn: Callable[..., Tensor], n: int, device: torch.device) -> None:
    given = inputs(fn, n, device)
    run_and_check(fn, fl.compile(fn), given)
    check_gradients(fn, fl.compile(fn), given)


def test_parts_are_merged(device: torch.device) -> None:
    given = inputs(forces, 1100, device)
    assert [k.name for k in fl.explain(forces, *given).kernels] == ["r0_k0", "r0_k1"]
    run_and_check(forces, fl.compile(forces), given)


@pytest.mark.parametrize("fn", [forces, energy, nearest])
def test_threads_exchange_nothing(fn: Callable[..., Tensor]) -> None:
    kernels = [
        k
        for k in kernels_made(fn, inputs(fn, 900, "cpu"))
        if any(is_by_thread(k[0], loop) and loop.parts is None for loop in k[0].loops)
    ]
    assert kernels
    for plan, lower in kernels:
        assert not any(reductions(e) for loop in plan.loops for s in loop.steps for e in step_expressions(s))
        cubin = compile_ttir(lower(plan), 90)
        assert "shfl" not in cubin.asm["ptx"] and "mma" not in cubin.asm["ptx"] and cubin.stack == 0


def test_rows_of_several_channels_keep_their_tiles(device: torch.device) -> None:
    """Where neighbours lie side by side along another axis, as places of a maximum do, a tile has both axes."""

    def largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (v - (q @ k.mT)[..., None]).amin(-2)

    given = [torch.randn(*shape, device=device) for shape in ((300, 8), (1030, 8), (1030, 16))]
    check_gradients(largest, fl.compile(largest), given)
