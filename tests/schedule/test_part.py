"""Training steps whose kernels have several sums over features: which of them share a kernel, and with what tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.explain import Graph
from fl_pallas.schedule.expr import reductions
from fl_pallas.schedule.plan import Accumulator, KernelPlan
from tests.corpus.science import evoformer_row
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain, unrun


def outputs_subtracted(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    first, second = ((q @ k.mT / 8).softmax(-1) for q, k in ((q1, k1), (q2, k2)))
    return first @ v - scale * (second @ v)


def doubled(d: int, length: int = 2048) -> list[Tensor]:
    """q and k twice, v of twice their features, a factor."""
    tensors = [torch.randn(2, 4, length, n, dtype=torch.bfloat16) for n in (d, d, d, d, 2 * d)]
    return [*tensors, torch.tensor(0.2, dtype=torch.bfloat16)]


def evoformer_inputs() -> list[Tensor]:
    q, k, v, gate = (torch.randn(2, 32, 2, 256, 64, dtype=torch.bfloat16) for _ in range(4))
    return [q, k, v, torch.ones(2, 32, 256, dtype=torch.bfloat16), torch.randn(2, 2, 256, 256).bfloat16(), gate]


def passes(fn: Callable, inputs: Sequence[Tensor]) -> tuple[Graph, Graph]:
    with unrun():
        forward, backward = fl.explain(fn, *(t.requires_grad_() for t in inputs)).graphs
    return forward, backward


def wide_sums(plan: KernelPlan) -> list[Accumulator]:
    """The sums over features."""
    steps = [s for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    return [s for s in steps if set(s.axes) & set(plan.features)]


def test_results_of_one_sum_share_it() -> None:
    """The output and the two terms that are kept: two sums over features, not four."""
    forward, _ = passes(outputs_subtracted, doubled(64))
    assert [len(wide_sums(p)) for p in forward.kernels] == [2]


@pytest.mark.parametrize("fn, inputs", [(outputs_subtracted, doubled(64)), (evoformer_row, evoformer_inputs())])
def test_sums_are_exchanged_in_flattened_dimensions(fn: Callable, inputs: list[Tensor]) -> None:
    """What PyTorch's products flattened, a batch and its heads, is a fact in the gradient's own dimensions."""
    _, backward = passes(fn, inputs)
    assert max(len(p.loops) for p in backward.kernels) == 1, [str(p.name) for p in backward.kernels]


def test_features_behind_a_gate() -> None:
    _, backward = passes(evoformer_row, evoformer_inputs())
    for plan in backward.kernels:
        for s in wide_sums(plan):
            assert all(plan.choices.tile(a) == 64 for a in s.axes if a.extent == 64), plan.name
    assert sum(len(wide_sums(p)) for p in backward.kernels) == 3


def test_a_bias_that_a_batch_shares() -> None:
    """Its gradient is summed over the batch a tile of 64 by 64 at a time."""
    _, backward = passes(evoformer_row, evoformer_inputs())
    square = [p for p in backward.kernels if any(len([a for a in s.axes if a.extent == 256]) == 2 for s in p.stores)]
    (plan,) = (p for p in square if reductions(p.stores[0].expr))
    assert sorted(n for _, n in plan.choices.tiles if n > 1) == [64, 64]


def weights_subtracted(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    first, second = ((q @ k.mT / 8).softmax(-1) for q, k in ((q1, k1), (q2, k2)))
    return (first - scale * second) @ v


@pytest.mark.parametrize("fn, counts", [(outputs_subtracted, [1, 1, 1, 1, 2]), (weights_subtracted, [2, 3])])
def test_sums_that_leave_no_registers_are_parted(fn: Callable, counts: list[int]) -> None:
    """Of two softmaxes, the gradients of keys, of queries and of the values; of their difference, rows and columns."""
    _, backward = passes(fn, doubled(64))
    assert sorted(len(wide_sums(p)) for p in backward.kernels if wide_sums(p)) == counts


def weights_subtracted(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    first, second = ((q @ k.mT / 8).softmax(-1) for q, k in ((q1, k1), (q2, k2)))
    return (first - scale * second) @ v


@pytest.mark.parametrize("d, loops", [(64, [1]), (128, [1, 1, 0])])
def test_results_of_wide_features_are_joined_apart(d: int, loops: list[int]) -> None:
    """Two sums over 256 features have a kernel each; loading one behind the loop of the other would halve its tiles."""
    with unrun():
        (graph,) = fl.explain(weights_subtracted, *doubled(d, 4096)).graphs
    assert [len(p.loops) for p in graph.kernels] == loops


@pytest.mark.parametrize("length", [33, 100])
def test_results_joined_apart_are_right(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = doubled(128, length)
    monkeypatch.setattr("fl_pallas.schedule.pipeline.cheapest", lambda ways, _: ways[-1])
    assert len(explain(weights_subtracted, *inputs).kernels) == 3
    ours = fl.compile(weights_subtracted)(*inputs).double()
    exact = weights_subtracted(*(t.double() for t in inputs))
    eager = weights_subtracted(*inputs).double()
    assert (ours - exact).norm() <= 1.5 * (eager - exact).norm()


def with_a_loss_of_rows(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention, and how far the mean of its heads' weights is from an indexer's, which has heads of its own."""
    at = torch.arange(q.shape[-2], device=q.device)
    index = torch.relu(a @ b.mT[:, None]).sum(1).float().masked_fill(at[:, None] < at, float("-inf"))
    picked = torch.zeros(index.shape, dtype=torch.bool, device=q.device).scatter(-1, index.topk(9, -1).indices, True)
    seen = picked & (at[:, None] >= at)
    weights = (q @ k.mT / 8).masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    target = weights.detach().float().mean(1)
    log = index.masked_fill(~seen, float("-inf")).log_softmax(-1).masked_fill(~seen, 0)
    return weights @ v, (torch.xlogy(target, target) - target * log).sum(-1)


def indexed(length: int, dtype: torch.dtype) -> list[Tensor]:
    tensors = [torch.randn(2, 8, length, 64, dtype=dtype) for _ in range(3)]
    return [*tensors, torch.randn(2, 4, length, 32, dtype=dtype), torch.randn(2, length, 32, dtype=dtype)]


def test_what_heads_share_is_no_head_s() -> None:
    """A kernel of each head would sum up the indexer's rows for each head."""
    for kernel in (k for graph in passes(with_a_loss_of_rows, indexed(1024, torch.bfloat16)) for k in graph.kernels):
        heads = {a for a in kernel.grid if a.extent == 8 and kernel.choices.tile(a) == 1}
        parts = {loop.parts for loop in kernel.loops}
        if kernel.loops and not any(a in parts for a in heads):
            assert all(heads <= {*s.axes} for s in kernel.stores), kernel.name


def test_what_heads_share_is_right(device: torch.device) -> None:
    inputs = [t.to(device) for t in indexed(70, torch.float32)]
    run_and_check(with_a_loss_of_rows, fl.compile(with_a_loss_of_rows), inputs)
    check_gradients(with_a_loss_of_rows, fl.compile(with_a_loss_of_rows), inputs)
