"""Control flow that data decides is Python's; the graphs in it fuse, both passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import fl_pallas as fl
from tests.oracle import check, check_gradients

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def near(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    hidden = (i[:, None] - i).abs() > width
    return (q @ k.mT / 4).masked_fill(hidden, -math.inf).softmax(-1) @ v


def by_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What comes before and behind is fused by itself."""
    x = near(q, k, v, 40)
    return near(
        torch.cond(x.sum() > 0, lambda x, k, v: near(x, k, v, 3), lambda x, k, v: near(x, k, v, 9), (x, k, v)), k, v, 5
    )


def by_sum_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = near(q, k, v, 40)
    return near(near(x, k, v, 3 if x.sum() > 0 else 9), k, v, 5)


def refined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def body(n: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return n + 1, near(x, k, v, 4)

    return while_loop(lambda n, x: n < 3, body, (torch.zeros((), dtype=torch.int64, device=q.device), q))[1]


def refined_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(3):
        q = near(q, k, v, 4)
    return q


def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return map_over(lambda x, k, v: near(x, k[0], v[0], 4), q, k, v)


def mapped_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return near(q, k[0], v[0], 4)


def scanned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return scan(lambda c, x: (c * 0.5 + near(x, k[0], v[0], 4), c * 2), torch.zeros_like(q[0]), q)


def scanned_plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    c, seen = torch.zeros_like(q[0]), []
    for x in q:
        seen.append(c * 2)
        c = c * 0.5 + near(x, k[0], v[0], 4)
    return c, torch.stack(seen)


PROGRAMS: dict[str, tuple[Attention, Attention, int]] = {
    "cond": (by_sum, by_sum_plain, 3),
    "while": (refined, refined_plain, 1),
    "map": (mapped, mapped_plain, 1),
    "scan": (scanned, scanned_plain, 1),
}


def draw(device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(3, 80, 16, generator=generator).to(device) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_in_control_flow_fuse(name: str, device: torch.device) -> None:
    flow, plain, kernels = PROGRAMS[name]
    inputs = draw(device)
    compiled = fl.compile(flow, fallback="error")
    with torch.no_grad():
        check(plain, inputs, compiled(*inputs))
        told = fl.explain(flow, *inputs)
    assert sum(len(g.schedule.regions) for g in told.graphs if g.schedule is not None) == kernels
    check_gradients(plain, fl.compile(flow, fallback="error"), inputs)


def test_a_branch_that_needs_no_gradient_is_no_rule(device: torch.device) -> None:
    """What is behind it is differentiated where the other branch is taken, whichever was taken first."""

    def fn(q: Tensor, k: Tensor, v: Tensor, flag: Tensor) -> Tensor:
        x = torch.cond(flag, lambda q, k, v: near(q, k, v, 3).detach(), lambda q, k, v: near(q, k, v, 9), (q, k, v))
        return near(x, k, v, 5)

    compiled = fl.compile(fn)
    q, k, v = draw(device)
    q.requires_grad_()
    for flag in (True, False, True):
        found = compiled(q, k, v, torch.tensor(flag, device=device))
        plain = near(q, k, v, 3).detach() if flag else near(q, k, v, 9)
        expected = near(plain, k, v, 5)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert flag or found.requires_grad
        if not flag:
            ours, theirs = (torch.autograd.grad(out.sin().sum(), q) for out in (found, expected))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_either_branch_is_taken(device: torch.device) -> None:
    compiled = fl.compile(by_sum, fallback="error")
    with torch.no_grad():
        taken = set[bool]()
        for seed in range(4):
            inputs = draw(device, seed)
            taken.add(bool(near(*inputs, 40).sum() > 0))
            check(by_sum_plain, inputs, compiled(*inputs))
    assert taken == {True, False}
