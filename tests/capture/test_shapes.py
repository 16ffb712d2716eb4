"""Operations that ask a tensor for its shape alone do not stand in the way of what makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.capture.aten import to_aten
from fl_pallas.capture.shapes import by_shape
from tests.unrun import explain

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": lambda x: torch.ones_like(x, dtype=torch.int32),
    "full": lambda x: torch.full_like(x, 2.5),
    "rand": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn": torch.randn_like,
    "randint": lambda x: torch.randint_like(x, 7),
    "randint from": lambda x: torch.randint_like(x, 3, 7, dtype=torch.int64),
    "new zeros": lambda x: x.new_zeros(3, 1),
    "new ones": lambda x: x.new_ones(x.shape[:1]),
    "new full": lambda x: x.new_full((2, 2), 1.5),
    "new empty": lambda x: x.new_empty(5, 1).fill_(1.0).bernoulli_(0.5),
    "empty": lambda x: torch.empty_like(x).exponential_(),
    "turned": lambda x: torch.randn_like(x.T),
}


@pytest.mark.parametrize("name", MADE)
def test_the_same_is_made(name: str) -> None:
    x = torch.randn(4, 3)
    gm = to_aten(torch.fx.symbolic_trace(lambda x: (MADE[name](x * 2),)), [x])
    by_shape(gm)
    gm.recompile()
    torch.manual_seed(0)
    (made,) = gm(x)
    torch.manual_seed(0)
    want = MADE[name](x * 2)
    assert torch.equal(made, want) and made.dtype == want.dtype and made.stride() == want.stride()
    (given,) = gm.graph.find_nodes(op="placeholder")
    assert bool(given.users) == (name == "turned")


def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.softmax(scores + torch.randn_like(scores), -1) @ v


def stochastic_depth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT, -1)
    return (weights @ v) * weights.new_empty(q.shape[0], 1, 1, 1).bernoulli_(0.7)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.parametrize("fn", [noisy, stochastic_depth])
def test_scores_are_not_stored_for_their_shape(fn: Callable[..., Tensor], device: torch.device) -> None:
    inputs = [torch.randn(2, 2, 40, 16, device=device, requires_grad=True) for _ in range(3)]
    found = []
    for call in (fl.compile(fn), fn):
        torch.manual_seed(1)
        out = call(*inputs)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    explained = explain(fn, *inputs)
    assert [(g.name, len(g.kernels) > 0) for g in explained.graphs] == [("forward", True), ("backward", True)]
    assert all("bmm" not in f.what for f in explained.fallbacks)
