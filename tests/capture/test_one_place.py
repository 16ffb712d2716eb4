"""Places that tensors of no dimensions tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import fl_pallas as fl
from fl_pallas.capture.one_place import at_lists
from tests.oracle import check

READS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, at: x[at],
    lambda x, at: x[:, at],
    lambda x, at: x[:, :, at],
    lambda x, at: x[..., at],
    lambda x, at: x[..., at, :],
    lambda x, at: x[at, ..., 1],
    lambda x, at: x[1, :, at],
    lambda x, at: x[:, at, None],
    lambda x, at: x[None, ..., at, 1:3],
]
WRITTEN = [(), (5,), (4, 5), (1, 5), (3, 4, 5)]


def captured(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[GraphModule]]:
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _: object) -> Callable[..., object]:
        at_lists(gm)
        graphs.append(gm)
        return gm

    return torch.compile(fn, backend=backend, fullgraph=True)(*inputs), graphs


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", [2, -1])
def test_reads(read: Callable[[Tensor, Tensor], Tensor], place: int) -> None:
    x, at = torch.randn(3, 4, 5), torch.tensor(place)
    out, (graph,) = captured(read, x, at)
    assert torch.equal(out, read(x, at)) and "unsqueeze" in graph.code


@pytest.mark.parametrize("shape", WRITTEN)
@pytest.mark.parametrize("place", range(3))
def test_writes(shape: tuple[int, ...], place: int) -> None:
    """What is written is broadcast as without."""
    x, at, index = torch.randn(2, 3, 4, 5), torch.tensor(1), (slice(None),) * place
    wanted = x[(*index, 1)].shape
    value = torch.randn([n if n == 1 else m for n, m in zip(shape, wanted[len(wanted) - len(shape) :])])

    def write(x: Tensor, at: Tensor, value: Tensor) -> Tensor:
        x = x.clone()
        x[(*index, at)] = value
        x[(..., at)] = 0.5
        return x

    out, (graph,) = captured(write, x, at, value)
    assert torch.equal(out, write(x, at, value)) and "unsqueeze" in graph.code


def test_other_indices_stay() -> None:
    def read(x: Tensor, at: Tensor, several: Tensor) -> Tensor:
        return x[several] + x[several, several][:, None] + x[:3] * at

    inputs = torch.randn(4, 4), torch.tensor(1), torch.tensor([0, 2, 1])
    out, (graph,) = captured(read, *inputs)
    assert torch.equal(out, read(*inputs)) and "unsqueeze" not in graph.code


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """A step of decoding."""
    keys[:, :, at] = k
    values[:, :, at] = v
    seen = torch.arange(keys.shape[-2], device=q.device) <= at
    return torch.softmax((q @ keys.mT / 4).masked_fill(~seen, -torch.inf), dim=-1) @ values


def test_caches_are_written_and_read(device: torch.device) -> None:
    q, k, v = (torch.randn(2, 2, *n, 16, device=device) for n in ((1,), (), ()))
    keys, values = (torch.randn(2, 2, 300, 16, device=device) for _ in range(2))
    at = torch.tensor(120, device=device)
    own = keys.clone(), values.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = fl.compile(step)(q, k, v, *own, at)
    check(lambda *a: step(*a[:3], a[3].clone(), a[4].clone(), a[5]), (q, k, v, keys, values, at), out)
    assert torch.equal(own[0][:, :, 120], k) and torch.equal(own[1][:, :, 120], v)
    assert torch.equal(own[0][:, :, 121:], keys[:, :, 121:])
