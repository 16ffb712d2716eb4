"""What is the same for each of many is computed once, and summed as many times at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

N, D = 90, 24


def pairs(s: Tensor, t: Tensor) -> Tensor:
    """Cross entropies of all pairs of distributions."""
    return -(t.softmax(-1)[:, None] * s.log_softmax(-1)[None]).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda s, t: pairs(s, t).mean(),
    "sum": lambda s, t: pairs(s, t).sum(),
    "means of rows": lambda s, t: pairs(s, t).mean(1),
    "sums of columns": lambda s, t: pairs(s, t).sum(0) * t.sum(-1),
    "products": lambda s, t: (t[:, None] * s[None]).sum(-1).mean(),
    "of each feature": lambda s, t: (t[:, None] * s[None]).mean((0, 1)),
    "of none": lambda s, t: (t[:0, None] * s[None]).sum(-1).sum(),
    "cubes": lambda s, t: ((t[:, None] + s[None]) ** 3).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_mean_of_pairs(name: str, device: torch.device) -> None:
    """Nobody stores as many numbers as there are pairs and features, which it would be of one and the same."""
    fn = LOSSES[name]
    given = [torch.randn(N, D, device=device) for _ in range(2)]
    graphs = explain(fn, *[t.cpu().requires_grad_() for t in given]).graphs
    assert not any(graph.fallbacks for graph in graphs)
    run_and_check(fn, fl.compile(fn), given, name=name)
    check_gradients(fn, fl.compile(fn), given, name=name)


def test_results_are_memory_of_their_own() -> None:
    """A sum that is the same for each row is returned as PyTorch does, not expanded."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, None].expand(N, N, D) * 2).sum(-1) * y

    x, y = torch.randn(N, D, requires_grad=True), torch.randn(N, N)
    out = fl.compile(fn)(x, y)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.stride() == x.stride()
    torch.testing.assert_close(out, fn(x, y))
    torch.testing.assert_close(grad, torch.autograd.grad(fn(x, y).sum(), x)[0], rtol=1e-4, atol=1e-4)
