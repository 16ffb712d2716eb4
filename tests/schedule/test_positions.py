"""What goes to a short table's positions is summed from the tiles that may hold it, member by member of a batch; or by
diagonals, where distances decide (test_distances.py has more)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.passes import skip_tiles as skipping
from fl_pallas.schedule.text import plan_text
from tests.corpus.scores import t5_bucket
from tests.oracle import check_gradients, run_and_check
from tests.plan_evaluate import captured
from tests.unrun import unrun

LENGTH = 500
Bucket = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "MIN_EXTENT", 256)


def clipped(d: Tensor) -> Tensor:
    return d.clamp(-8, 8) + 8


def from_the_end(d: Tensor) -> Tensor:
    """Negative distances count from the table's end."""
    return d.clamp(-8, 8)


def roots(d: Tensor) -> Tensor:
    return d.abs().float().sqrt().long()


def logarithms(d: Tensor) -> Tensor:
    """The logarithm of 0 lands in the first bucket."""
    return (torch.log2(d.abs().float()).clamp(min=-1) + 1.5).long()


def halves(d: Tensor) -> Tensor:
    return torch.where(d < 0, -d // 100, 5 + d // 50)


# The table's length, and the share of the tiles that all of its positions together may visit, of one pass over all.
BUCKETS: dict[str, tuple[Bucket, int, float]] = {
    "t5": (t5_bucket, 32, 11.0),
    "clipped": (clipped, 17, 6.0),
    "from_the_end": (from_the_end, 17, 6.5),
    "roots": (roots, 23, 16.0),
    "logarithms": (logarithms, 11, 11.0),
    "halves": (halves, 16, 7.0),
}


def histogram(bucket: Bucket, length: int, step: int = 1) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum of weights in each bucket of distances, head by head, as a table's gradient is one.

    With a `step` of 2 (queries half as far apart as keys) no diagonal has one distance.
    """

    def fn(q: Tensor, k: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device)
        weights = (q @ k.mT / 4).tanh()
        found = torch.zeros(length, q.shape[0], device=q.device, dtype=q.dtype)
        return found.index_put((bucket((step * j - i[:, None]) // step),), weights.permute(1, 2, 0), accumulate=True)

    return fn


@pytest.mark.parametrize("name", BUCKETS)
@np.errstate(divide="ignore")  # the logarithm of a distance of 0
def test_as_the_program(name: str) -> None:
    """The plans with their bounds give what the program means, and skip most tiles."""
    bucket, length, share = BUCKETS[name]
    run = captured(histogram(bucket, length, step=2), (torch.randn(2, LENGTH, 16), torch.randn(2, LENGTH, 16)))
    expected = run.values()
    visited = 0.0
    for plan, plan_run, _ in run.kernels(bounded=True):
        for store, found in plan_run.run().items():
            if store in expected:
                np.testing.assert_allclose(found, expected[store], rtol=1e-9, atol=1e-9)
        loop = plan.loops[0]
        if loop.lower is not None:
            low, high, *_ = plan_run.limits(loop)
            assert low is not None and high is not None
            visited = np.maximum(high - low, 0).mean() / LENGTH * length
    assert 0 < visited <= share, visited


def biased(bucket: Bucket, step: int = 1) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2], device=q.device)
        return (q @ k.mT / 4 + table[bucket((step * i - i[:, None]) // step)].permute(2, 0, 1)).softmax(-1) @ v

    return fn


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", BUCKETS)
def test_nothing_is_stored_for_a_pair(name: str, batch: int, step: int) -> None:
    """Both passes, a batch that shares the bias included, store what is linear in the length."""
    bucket, length, _ = BUCKETS[name]
    q, k, v = (torch.randn(batch, 2, 1024, 16, requires_grad=True) for _ in range(3))
    with unrun():
        explained = fl.explain(biased(bucket, step), q, k, v, torch.randn(length, 2, requires_grad=True))
    assert not any(left for graph in explained.graphs for left in graph.left), explained.graphs
    sizes = {s.name: math.prod(s.shape) for graph in explained.graphs for p in graph.kernels for s in p.stores}
    assert max(sizes.values()) <= 1024 * 2 * batch * max(length, 16), sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["t5", "from_the_end"])
@pytest.mark.parametrize("step", [1, 2])
def test_gradients(step: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    bucket, length, _ = BUCKETS[name]
    q, k, v = (torch.randn(2, 2, 300, 16, device=device, dtype=dtype) for _ in range(3))
    table = torch.randn(length, 2, device=device, dtype=dtype)
    fn = biased(bucket, step)
    check_gradients(fn, fl.compile(fn, fallback="error"), (q, k, v, table), name=name)


def by_data(q: Tensor, k: Tensor, v: Tensor, table: Tensor, steps: Tensor) -> Tensor:
    """Graphormer's bias: an embedding of the length of the shortest path between two nodes."""
    return (q @ k.mT / 4 + table[steps].permute(0, 3, 1, 2)).softmax(-1) @ v


def test_keys_normalised_beside_a_table(device: torch.device) -> None:
    """A factor of each key has its place in the window of positions too."""

    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2], device=q.device)
        bias = table[i[:, None] - i + q.shape[-2] - 1]
        return (q @ torch.nn.functional.normalize(k, dim=-1).mT + bias).softmax(-1) @ v

    q, k, v = (torch.randn(2, 77, 16, device=device) for _ in range(3))
    check_gradients(fn, fl.compile(fn, fallback="error"), (q, k, v, torch.randn(153, device=device)))


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # scores are stored between two kernels
@pytest.mark.parametrize("of_column", ["first", "mean", "logsumexp"])
def test_scores_that_read_their_column_beside_a_table(of_column: str, device: torch.device) -> None:
    """What the table's gradient is made of loads what other kernels store."""

    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2], device=q.device)
        s = q @ k.mT / 4 + table[i[:, None] - i + q.shape[-2] - 1]
        read = {"first": s[..., :1, :], "mean": -s.mean(-2, keepdim=True), "logsumexp": s.logsumexp(-2, keepdim=True)}
        return (s + read[of_column]).softmax(-1) @ v

    q, k, v = (torch.randn(2, 64, 16, device=device) for _ in range(3))
    check_gradients(fn, fl.compile(fn, dynamic=False), (q, k, v, torch.randn(127, device=device)))


def test_positions_of_data(device: torch.device) -> None:
    q, k, v = (torch.randn(2, 2, 100, 16, device=device) for _ in range(3))
    inputs = (q, k, v, torch.randn(9, 2, device=device), torch.randint(-9, 9, (2, 100, 100), device=device))
    check_gradients(by_data, fl.compile(by_data, fallback="error"), inputs)


def test_a_histogram(device: torch.device) -> None:
    fn = histogram(t5_bucket, 32)
    inputs = torch.randn(2, 300, 16, device=device), torch.randn(2, 300, 16, device=device)
    run_and_check(fn, fl.compile(fn, fallback="error"), inputs, name="histogram")


def test_what_is_no_larger_than_the_operands_is_stored() -> None:
    """A large batch of short sequences: positions read the gradient of its bias."""
    q, k, v = (torch.randn(12, 2, 128, 16, requires_grad=True) for _ in range(3))
    with unrun():
        *_, backward = fl.explain(biased(clipped), q, k, v, torch.randn(17, 2, requires_grad=True)).graphs
    assert [2, 128, 128] in [sorted(s.shape) for p in backward.kernels for s in p.stores]


def test_the_bounds_are_told() -> None:
    """A program asks, tile by tile, whether any of it goes to its position."""
    q, k, v = (torch.randn(1, 2, 1024, 16, requires_grad=True) for _ in range(3))
    with unrun():
        explained = fl.explain(biased(clipped, step=2), q, k, v, torch.randn(17, 2, requires_grad=True))
    texts = [plan_text(p) for graph in explained.graphs for p in graph.kernels]
    assert any("for j0 in min[" in text for text in texts), texts
