"""Feature maps that are larger than what they are made of: tables of keys and values, and rows that read them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import free_axes
from fl_pallas.schedule.plan import KernelPlan, bounds_of
from fl_pallas.schedule.text import plan_text
from tests.oracle import check, check_gradients
from tests.unrun import explain


def features(x: Tensor) -> Tensor:
    """1, x and its products, [..., d] to [..., 1 + d + d²]: of the exponential of a product up to its second power."""
    products = torch.einsum("...i,...j->...ij", x, x).flatten(-2) * 0.5**0.5
    return torch.cat((x.new_ones(*x.shape[:-1], 1), x, products), -1)


def padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q, k, v [b,h,n,d], seen [b,n]."""
    hidden = ~seen[:, None, :, None]
    q, k, v = features(q / 4), features(k).masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    total = torch.einsum("bhnd,bhd->bhn", q, k.sum(-2)).clamp(min=1e-5)
    return torch.einsum("bhnd,bhde->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v)) / total[..., None]


def inputs(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(n)
    seen = torch.rand(2, n) < 0.9
    seen[:, 0] = True
    return (*(torch.randn(2, 4, n, d).to(dtype) for _ in range(3)), seen)


@pytest.fixture(scope="module")
def plans() -> list[KernelPlan]:
    return explain(padded, *inputs(2048, 16, torch.bfloat16)).kernels


def test_what_no_row_changes_is_summed_once(plans: list[KernelPlan]) -> None:
    """The feature that is 1 in all rows asks for the sum of all values: no program of rows goes over all keys."""
    rows = plans[-1]
    assert all(loop.axis.extent < 2048 for loop in rows.loops), plan_text(rows)
    assert any(a.extent == 2048 for a in rows.grid)


def test_tables_are_products_of_matrices(plans: list[KernelPlan]) -> None:
    """Keys and values are both masked, and neither side is a row by itself."""
    table = next(p for p in plans if p.loops[0].axis.extent == 2048 and any(a.extent == 272 for a in p.grid))
    sides = {a.extent: table.choices.tile(a) for a in table.grid}
    assert sides[272] >= 16 and sides[16] == 16, plan_text(table)
    assert len(table.loops[0].steps) == 2, "the sum of keys goes along"


def test_one_kernel_summarises_a_mask(plans: list[KernelPlan]) -> None:
    made = [p for p in plans if p.minor]
    assert [p.name for p in made] == ["r0_k0_tiles"]
    bounded = [p for p in plans if any(e is not None and free_axes(e) for loop in p.loops for e in bounds_of(loop))]
    assert len(bounded) == 2
    assert not any("r0_k3_tiles" in note for p in plans for note in p.notes)


def moments(x: Tensor, seen: Tensor) -> Tensor:
    """Sums of products of any two features of tokens that are seen: x [b,n,d], seen [b,n], out [b,d,d]."""
    return torch.where(seen[:, :, None, None], x[..., :, None] * x[..., None, :], 0).sum(1)


def test_masked_products_are_of_masked_sides() -> None:
    _, plan, *_ = explain(moments, torch.randn(2, 2048, 64), torch.rand(2, 2048) < 0.9).kernels
    tiles = [plan.choices.tile(a) for a in plan.grid if a.extent == 64]
    assert tiles == [64, 64], plan_text(plan)


def test_what_is_hidden_counts_for_nothing(device: torch.device) -> None:
    torch.manual_seed(0)
    seen = torch.rand(2, 300, device=device) < 0.8
    x = torch.randn(2, 300, 16, device=device).masked_fill(~seen[..., None], float("nan"))
    x[:, 0], seen[:, 0] = float("inf"), False
    compiled = fl.compile(moments, dynamic=False)
    check(moments, [x, seen], compiled(x, seen))


@pytest.mark.parametrize("n", [19, 150])
def test_results(n: int, device: torch.device) -> None:
    args = tuple(x.to(device) for x in inputs(n, 8, torch.float32))
    compiled = fl.compile(padded, dynamic=False)
    check_gradients(padded, compiled, [x.requires_grad_(x.is_floating_point()) for x in args])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sides", [1, 2])
def test_feature_maps_that_are_softmaxes(sides: int, grad: bool) -> None:
    """Hedgehog's linear attention: what multiplies two of them has a region, and they are PyTorch's."""

    def features(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([(x @ w).softmax(-1), (-x @ w).softmax(-1)][:sides], -1)

    def linear(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        scores = (features(q, w) @ features(k, w).mT).masked_fill(i > i[:, None], 0)
        return (scores @ v) / (scores.sum(-1, keepdim=True) + 1e-6)

    q, k, v = (torch.randn(1, 8, 2048, 64, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3))
    w = torch.randn(8, 64, 64, dtype=torch.bfloat16, requires_grad=grad)
    told = explain(linear, q, k, v, w)
    assert [len(g.kernels) for g in told.graphs] == ([1, 3] if grad else [1]) and not told.fallbacks
