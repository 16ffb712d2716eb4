"""What is reduced again and again, or by few programs, has a kernel of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fl_pallas as fl
from fl_pallas.schedule.build import op, reduce
from fl_pallas.schedule.expr import Axis, Expr, index, load, reductions
from fl_pallas.schedule.passes.cut import cut
from fl_pallas.schedule.passes.fuse import Fused, Output
from tests.oracle import check_gradients, run_and_check
from tests.programs import BY_NAME
from tests.schedule.test_lay_out import heads_last, of_pairs
from tests.unrun import explain, unrun


def test_a_mean_over_rows_is_of_what_a_kernel_of_rows_stores() -> None:
    """The products of a row are made where rows are a grid, and not by the one program of the mean."""
    case = BY_NAME["mean_cross_entropy"]
    with unrun():
        (graph,) = fl.explain(case.target(torch.bfloat16, "cpu"), *case.make_inputs(1024, torch.bfloat16, "cpu")).graphs
    assert graph.schedule is not None
    (rows, *others) = (p for kernels in graph.schedule.kernels for p in kernels)
    assert len(rows.stores) == 1 and rows.stores[0].shape == (1024,)
    assert others and not any(reductions(s.expr) for p in others for s in p.stores)


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = q @ k.mT / 4
    weights = scores.softmax(-1)
    return weights @ v, weights, scores.logsumexp(-1)


def test_returned_weights_take_rows_from_the_result(device: torch.device) -> None:
    """One loop, whose kernel stores the weights' row sums too; weights of another need no loop."""
    inputs = [torch.randn(1, 2, 100, 16, device=device) for _ in range(3)]
    run_and_check(with_weights, fl.compile(with_weights, fallback="error"), inputs)
    first, second = (p for g in explain(with_weights, *inputs).graphs for p in g.kernels)
    assert len(first.loops) == 1 and not second.loops
    assert len(first.stores) == 4 and [s.shape for s in second.stores] == [(1, 2, 100, 100)]


def test_row_sums_are_made_once() -> None:
    """The gradients of q and of k ask for the same sums of rows, with other axes."""
    with unrun():
        kernels = fl.explain(heads_last, *(t.requires_grad_() for t in of_pairs(64))).graphs[-1].kernels
    rows = [s.expr for p in kernels for s in p.stores if sorted(s.shape) == [6, 64]]
    assert len(rows) == 1, [p.name for p in kernels]


def test_later_kernels_load_the_sums_of_earlier_ones() -> None:
    """Sinkhorn's rows and columns, normalised in turn: each kernel makes one pair of statistics, and the last none."""
    case = BY_NAME["sinkhorn"]
    found = explain(case.target(torch.bfloat16, "cpu"), *case.make_inputs(257, torch.bfloat16, "cpu"))
    *norms, last = (p for g in found.graphs for p in g.kernels)
    assert norms and all(sum(len(loop.steps) for loop in p.loops) == 2 for p in norms)
    assert sum(len(loop.steps) for loop in last.loops) == 1


class Moved(nn.Module):
    """Points that a network of each pair moves towards each other (an E(n)-equivariant layer)."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Sequential(nn.Linear(17, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, nodes: Tensor, points: Tensor) -> Tensor:
        size = (*points.shape[:2], points.shape[1], nodes.shape[2])
        apart = points[:, :, None] - points[:, None]
        known = nodes[:, :, None].expand(size), nodes[:, None].expand(size), apart.square().sum(-1, keepdim=True)
        return (apart * self.pairs(torch.cat(known, -1))).mean(2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # what linear layers read of pairs is stored
def test_sums_that_are_stored_over_flattened_pairs_are_loaded_so(device: torch.device) -> None:
    """Linear layers have all pairs as one dimension; kernels that store what another loads have two axes of it."""
    torch.manual_seed(0)
    layer = Moved().to(device)
    inputs = [torch.randn(1, 30, 8, device=device), torch.randn(1, 30, 3, device=device)]
    check_gradients(layer, fl.compile(layer), inputs)
    graphs = explain(layer, *(t.requires_grad_() for t in inputs)).graphs
    stores = [s for p in graphs[-1].kernels for s in p.stores]
    assert any(s.dims and 30 * 30 in s.shape for s in stores)


@pytest.mark.parametrize("centred", [False, True])
def test_what_a_mean_is_taken_off_is_stored_in_32_bits(centred: bool) -> None:
    """Weights' gradients, each a sum of what is itself a sum: in 16 bits their rows' means would not cancel in them."""
    row, key, column, feature, hidden = (
        Axis(name, n) for name, n in [("x0", 300), ("r0", 300), ("x1", 16), ("r1", 64), ("r2", 64)]
    )

    def times(*factors: Expr) -> Expr:
        first, *rest = factors
        for f in rest:
            first = op("mul", first, f, dtype="bf16")
        return first

    made = reduce(
        "sum",
        hidden,
        times(load("z", (index(row), index(hidden)), "bf16"), load("w", (index(hidden), index(feature)), "bf16")),
        "bf16",
    )
    gradient = reduce("sum", feature, times(load("g", (index(key), index(feature)), "bf16"), made), "bf16")
    mean = load("mean", (index(key),), "f32")
    left = op("sub", gradient, mean, dtype="f32") if centred else op("mul", gradient, mean, dtype="f32")
    total = reduce("sum", key, times(left, load("q", (index(key), index(column)), "bf16")), "bf16")
    stored, _ = cut(Fused((Output("dk", (row, column), "bf16", total),)), "r0")
    assert [o.dtype for o in stored.outputs] == ["f32" if centred else "bf16"]


@pytest.mark.parametrize("masked", [False, True])
def test_the_largest_of_all_scores(masked: bool, device: torch.device) -> None:
    """Of rows, by as many programs; then of those, and of the heads: no program goes through all scores."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / 4
        if masked:
            i = torch.arange(q.shape[-2], device=q.device)
            scores = scores.masked_fill(i[:, None] < i, -torch.inf)
        weights = (scores - scores.detach().max()).exp()
        return weights @ v / weights.sum(-1, keepdim=True)

    def inputs(n: int) -> list[Tensor]:
        return [torch.randn(2, 3, n, 16, device=device) for _ in range(3)]

    found = explain(attention, *inputs(2048))
    assert found.kernels and not any(g.fallbacks for g in found.graphs)
    assert all(k.grid for k in found.kernels if k.loops), "a program for all scores"
    run_and_check(attention, fl.compile(attention), inputs(90))
    check_gradients(attention, fl.compile(attention), inputs(90))


def test_kernels_that_would_wait_for_each_other_are_parted(device: torch.device) -> None:
    """Sinkhorn's normalisation, and a softmax: gradients of rows and of columns that one kernel would make need each
    other's."""

    def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT / 4
        for _ in range(3):
            s = s - s.logsumexp(-1, keepdim=True)
            s = s - s.logsumexp(-2, keepdim=True)
        return s.softmax(-1) @ v

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 16, generator=generator).to(device) for _ in range(3))
    check_gradients(normalised, fl.compile(normalised, fallback="error"), (q, k, v))
