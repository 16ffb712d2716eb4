"""Loops that visit certain granules: what they leave out never counts, and they leave out what a list can."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fl_pallas as fl
from fl_pallas.bridge import splice
from fl_pallas.bridge.splice import Kernel, RegionRunner
from fl_pallas.schedule.passes import skip_tiles, unfused, visits
from fl_pallas.schedule.text import plan_text
from tests.masked import Mask, attention
from tests.oracle import check_gradients, run_and_check
from tests.plan_evaluate import captured
from tests.unrun import explain

LENGTH = 600
GRANULE = 64


@pytest.fixture(autouse=True)
def lists_for_short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_tiles, "MIN_EXTENT", 256)
    monkeypatch.setattr(visits, "LAUNCH", 0)
    monkeypatch.setattr(unfused, "COST", float("inf"))


def picked(n: int = LENGTH, count: int = 2, size: int = GRANULE) -> Tensor:
    """For each head and block of queries, blocks of keys: its own, and others."""
    blocks = -(-n // size)
    found = torch.randint(0, blocks, (2, blocks, count))
    found[..., 0] = torch.arange(blocks)
    return found


def chosen(n: int = LENGTH) -> Tensor:
    blocks = -(-n // GRANULE)
    return (torch.rand(2, blocks, blocks) < 0.2) | torch.eye(blocks, dtype=torch.bool)


def seen_by_each(n: int = LENGTH) -> Tensor:
    """Of two heads, documents; the first rows of the second see nothing."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return torch.stack([(i // 170 == j // 170) & (j <= i), (i // 90 == j // 90) & (j > 20)])


PATTERNS: dict[str, tuple[Mask, Callable[[], tuple[Tensor, ...]]]] = {
    "sinks and a window": (lambda i, j: (j <= i) & ((j < 4) | (i - j < 70)), tuple),
    "strides": (lambda i, j: (j <= i) & ((i - j < 50) | (j % 256 >= 200)), tuple),
    "a slash and a column": (lambda i, j: (j <= i) & ((i - j < 20) | ((i - j) // 64 == 5) | (j // 32 == 3)), tuple),
    "blocks beside each other, and the first": (
        lambda i, j: ((i // 16 - j // 16).abs() <= 1) | (j < 16) | (i < 16), tuple
    ),
    "a band that a power bounds": (
        lambda i, j: ((i - j).abs() % 256).float().add(1).log2().floor() < 3, tuple
    ),
    "picked blocks": (lambda i, j, p: (p[:, i // 64] == (j // 64)[:, None]).any(-1) & (j <= i), lambda: (picked(),)),
    "picked small blocks": (
        lambda i, j, p: (p[:, i // 16] == (j // 16)[:, None]).any(-1) & (j <= i), lambda: (picked(size=16),)
    ),
    "a table of small blocks, or near": (
        lambda i, j, t: t[:, i // 16, j // 32] | (i // 8 == j // 8), lambda: (chosen()[:, :1].repeat(1, 40, 2),)
    ),
    "picked small blocks before, or its own": (
        lambda i, j, p: ((p[:, i // 16] == (j // 16)[:, None]).any(-1) & (j <= i)) | (i // 16 == j // 16),
        lambda: (picked(size=16),),
    ),
    "a table of blocks": (lambda i, j, t: t[:, i // 64, j // 64], lambda: (chosen(),)),
    "a mask that is given": (lambda i, j, m: m, lambda: (seen_by_each(),)),
    "a mask that is given, and a window": (lambda i, j, m: m & (i - j < 200), lambda: (seen_by_each(),)),
    "documents, and what all see": (
        lambda i, j, doc, seen: (j <= i) & ((doc[i] == doc[j]) | seen[j]),
        lambda: (torch.arange(LENGTH) // 130, torch.arange(LENGTH) == 3),
    ),
}  # fmt: skip


def inputs_of(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(1, 2, LENGTH, 16, dtype=dtype) for _ in range(3))
    return tuple(t.to(device) for t in (q, k, v, *PATTERNS[name][1]()))


def is_listed(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> bool:
    return any(loop.visits for k in explain(fn, *inputs).kernels for loop in k.loops)


@pytest.mark.parametrize("hidden", [float("-inf"), -1e9])
@pytest.mark.parametrize("name", PATTERNS)
def test_results_of_lists(name: str, hidden: float, device: torch.device) -> None:
    fn, inputs = attention(PATTERNS[name][0], hidden), inputs_of(name, torch.float32, device)
    assert is_listed(fn, inputs)
    run_and_check(fn, fl.compile(fn), inputs, name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    fn, inputs = attention(PATTERNS[name][0]), inputs_of(name, dtype, device)
    check_gradients(fn, fl.compile(fn), inputs, name=name)


@pytest.mark.parametrize("name", PATTERNS)
def test_as_the_program(name: str) -> None:
    """The plans with their visits give what the program means, in float64."""
    run = captured(attention(PATTERNS[name][0]), inputs_of(name, torch.float32, torch.device("cpu")))
    expected = run.values()
    for plan, plan_run, _ in run.kernels(bounded=True):
        for store, found in plan_run.run().items():
            if store in expected:
                np.testing.assert_allclose(found, expected[store], rtol=1e-9, atol=1e-9, err_msg=plan_text(plan))


def atoms() -> st.SearchStrategy[tuple[str, int, int]]:
    names = st.sampled_from(["near", "first", "causal", "stripe", "column", "far"])
    return st.tuples(names, st.integers(1, 300), st.integers(1, 90))


def holds(atom: tuple[str, int, int], i: Tensor, j: Tensor) -> Tensor:
    name, a, b = atom
    return {
        "near": (i - j).abs() < b, "first": j < b, "causal": j <= i, "stripe": (i - j) % (a + b) < b,
        "column": (j // b) % 3 == a % 3, "far": i - j > a,
    }[name]  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.lists(st.lists(atoms(), min_size=1, max_size=2), min_size=2, max_size=3), st.integers(300, 700))
def test_lists(terms: list[list[tuple[str, int, int]]], n: int) -> None:
    """Lists are permutations: granules that a mask lets through whole for a run of rows, others of which it lets
    something through, the rest."""

    def mask(i: Tensor, j: Tensor) -> Tensor:
        out = i == j
        for every in terms:
            found = holds(every[0], i, j)
            for a in every[1:]:
                found = found & holds(a, i, j)
            out = out | found
        return out

    q, k, v = (torch.randn(1, 1, n, 16) for _ in range(3))
    torch.compiler.reset()
    run = captured(attention(mask), (q, k, v))
    i, j = torch.arange(n)[:, None], torch.arange(n)
    seen = mask(i, j).numpy()
    for plan, _, known in run.kernels():
        if any(loop.visits for loop in plan.loops):
            order, whole, some = (known[f"{plan.name}_v0_{what}"] for what in ("order", "whole", "some"))
            side = next(s for s in (16, 32, 64, 128) if -(-n // s) == order.shape[0])
            for r, g in itertools.product(range(order.shape[0]), range(order.shape[1])):
                tile = seen[r * side : (r + 1) * side, g * GRANULE : (g + 1) * GRANULE]
                place = order[r].tolist().index(g)
                if place < whole[r]:
                    assert tile.all() and tile.shape[1] == GRANULE
                assert (place < some[r]) == bool(tile.any())


def test_one_query_of_a_ragged_cache(device: torch.device) -> None:
    """The last granule is beyond the keys in part; parts of the loop share out the list."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        j = torch.arange(k.shape[-2], device=k.device)
        seen = (j < 4) | (k.shape[-2] - 1 - j < 256)
        return (q @ k.transpose(-1, -2)).masked_fill(~seen, float("-inf")).softmax(-1) @ v

    inputs = tuple(torch.randn(1, 2, n, 16, device=device) for n in (1, 5000, 5000))
    assert is_listed(fn, inputs)
    run_and_check(fn, fl.compile(fn), inputs)


def test_little_is_visited() -> None:
    """Of 32 granules, a window of 70 and the first: the most that a run of rows visits."""
    fn = attention(PATTERNS["sinks and a window"][0])
    run = captured(fn, tuple(torch.randn(1, 1, 2048, 16) for _ in range(3)))
    (plan, known) = next((plan, known) for plan, _, known in run.kernels() if plan.loops and plan.loops[0].visits)
    assert known[f"{plan.name}_v0_some"].max() <= 6


def test_between_two_ends_there_is_no_list() -> None:
    """Causal masks and windows have no gaps, and a mask that leaves most is no list's."""
    for mask in (lambda i, j: j <= i, lambda i, j: (i - j).abs() < 50, lambda i, j: (j <= i) | (j % 64 < 60)):
        assert not is_listed(attention(mask), tuple(torch.randn(1, 2, LENGTH, 16) for _ in range(3)))


def test_lists_of_positions_are_made_once(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Later calls run the kernel that has the loop alone; so do CUDA graphs, for which they are never given up."""
    runners: list[RegionRunner] = []
    run = RegionRunner._with_kept
    monkeypatch.setattr(RegionRunner, "_with_kept", lambda self, *args: (runners.append(self), run(self, *args))[1])
    fn = attention(PATTERNS["sinks and a window"][0])
    compiled = fl.compile(fn)
    inputs = inputs_of("sinks and a window", torch.float32, device)
    for _ in range(4):
        run_and_check(fn, compiled, inputs)
    assert len({id(r) for r in runners}) == 1
    (runner, *_) = runners
    kept = runner._kept
    assert kept is not None and len(kept.tables) == len(runner._steps) - 1
    assert not any(k is kept for k in splice._recorded.values())
    calls = [0] * len(runner._steps)

    def counted(n: int, kernel: Kernel) -> Kernel:
        return lambda operands: (calls.__setitem__(n, calls[n] + 1), kernel(operands))[1]

    runner._steps = [(counted(n, kernel), *rest) for n, (kernel, *rest) in enumerate(runner._steps)]
    monkeypatch.setattr(splice, "current_stream", lambda: None)  # as while a graph is recorded
    run_and_check(fn, compiled, inputs)
    assert sum(calls) == calls[-1] > 0
    assert any(k is kept for k in splice._recorded.values())


def test_a_mask_that_sdpa_is_given(device: torch.device) -> None:
    """Rows that see nothing are 0; all three kernels go through lists."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v, mask = (*(torch.randn(1, 2, LENGTH, 16) for _ in range(3)), seen_by_each())
    inputs = tuple(t.to(device) for t in (q, k, v, mask))
    graphs = explain(fn, *(t.clone().requires_grad_(t.is_floating_point()) for t in inputs)).graphs
    assert sum(bool(loop.visits) for g in graphs for k in g.kernels for loop in k.loops) == 3
    run_and_check(fn, fl.compile(fn), inputs)
    check_gradients(fn, fl.compile(fn), inputs)
