"""Small kernels of rows that go into the prologue of one that has these rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.build import op, reduce
from fl_pallas.schedule.expr import Axis, Expr, index, load, ref
from fl_pallas.schedule.passes.prologue import into_prologues
from fl_pallas.schedule.plan import Accumulator, Choices, KernelPlan, Loop, Store, operand_names
from fl_pallas.schedule.verify import verify_plan
from tests.oracle import check_gradients
from tests.unrun import unrun

H, X, J, D = Axis("h", 4), Axis("x", 64), Axis("j", 64), Axis("d", 16)


def small(*stores: Store) -> KernelPlan:
    tiles = tuple((a, {H: 1, X: 32}.get(a, 16)) for a in (H, X, D))
    grid = tuple(a for a in (H, X, D) if any(a in s.axes for s in stores))
    return KernelPlan("small", grid, (D,) if D in grid else (), (), stores, "f32", Choices(tiles))


def sums() -> Store:
    axis = Axis("r", 16)
    body = load("a", (index(H), index(X), index(axis)), "f32")
    return Store("sums", (H, X), "f32", reduce("sum", axis, op("mul", body, body, dtype="f32"), "f32"))


def host(name: str, row: Expr, rows: tuple[Axis, ...] = (H, X), tile: int = 16) -> KernelPlan:
    """Sums of `k[h, j, d] * sums[h, row]` over j."""
    update = op(
        "mul", load("k", (index(H), index(J), index(D)), "f32"), load("sums", (index(H), row), "f32"), dtype="f32"
    )
    axes = (*rows, D)
    loop = Loop(J, (Accumulator("a0", "sum", axes, update, "f32", None),))
    tiles = ((H, 1), (X, 32), (D, tile), (J, 32))
    store = Store(name, axes, "f32", ref("a0", axes, "f32"))
    return KernelPlan(name, axes, (D,), (loop,), (store,), "f32", Choices(tiles))


def test_the_kernel_with_the_rows_takes_it_and_goes_first() -> None:
    columns = replace(host("columns", index(J)), name="columns")
    made = into_prologues([small(sums()), columns, host("rows", index(X))], {"rows", "columns"})
    assert [p.name for p in made] == ["rows", "columns"]
    assert [s.name for s in made[0].stores] == ["rows", "sums"] and operand_names(made[0]) == ("k", "a")
    for plan in made:
        verify_plan(plan)


def test_what_nobody_else_reads_is_not_stored() -> None:
    (made,) = into_prologues([small(sums()), host("rows", index(X))], {"rows"})
    assert [s.name for s in made.stores] == ["rows"]


@pytest.mark.parametrize(
    "other",
    [
        host("columns", index(J)),  # it has them as columns
        host("halves", index(X), tile=8),  # two programs have each row
        host("first", op("floordiv", index(X), index(X), dtype="i64")),  # not each row
        replace(host("parts", index(X)), loops=(replace(host("parts", index(X)).loops[0], parts=H),)),
    ],
    ids=lambda p: p.name,
)
def test_not_where_rows_are_not_in_one_program_each(other: KernelPlan) -> None:
    plans = [small(sums()), other]
    assert into_prologues(plans, {other.name}) == plans


def test_not_where_it_would_come_too_late() -> None:
    """A kernel that needs it has to run before the one with the rows."""
    columns = host("columns", index(J))
    rows = host("rows", index(X))
    store = rows.stores[0]
    needs = load("columns", tuple(map(index, store.axes)), "f32")
    rows = replace(rows, stores=(replace(store, expr=op("add", store.expr, needs, dtype="f32")),))
    plans = [small(sums()), columns, rows]
    assert into_prologues(plans, {"rows"}) == plans


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    return (q @ k.mT / 4).masked_fill(i[:, None] < i, -torch.inf).softmax(-1) @ v


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k, v) * torch.sigmoid(q)


def inputs(dtype: torch.dtype = torch.float32, n: int = 70) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("fn", [causal, gated])
def test_a_backward_pass_is_two_kernels(fn: Callable) -> None:
    with unrun():
        backward = fl.explain(fn, *inputs()).graphs[1]
    assert len(backward.kernels) == 2 and all(k.loops for k in backward.kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [causal, gated])
def test_gradients(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn), [t.detach().to(device) for t in inputs(dtype)])


def test_what_is_computed_for_rows_is_a_number(device: torch.device) -> None:
    """The normaliser of xLSTM: which of two is larger is asked in loops, and was stored for them as a number."""

    def mlstm(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores / torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-g)) @ v

    inputs = [torch.randn(1, 33, width, device=device) for width in (16, 16, 16, 1)]
    check_gradients(mlstm, fl.compile(mlstm, fallback="error"), inputs)
