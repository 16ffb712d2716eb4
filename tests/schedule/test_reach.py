"""What a number can be where a condition holds, beside what it is; and the tiles that are skipped by it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.build import cast, op, reduce, select
from fl_pallas.schedule.expr import Axis, Expr, Op, const, free_axes, index, load, loads, ref, walk
from fl_pallas.schedule.plan import bounds_of
from fl_pallas.schedule.reach import MOST, Reach, reach
from tests.evaluate import _Evaluator
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

ROW, J, R = Axis("i", 5), Axis("j", 7), Axis("r", 3)
RNG = np.random.default_rng(3)
KNOWN = {"q": RNG.normal(size=(5, 3)) * 3, "k": RNG.normal(size=(7, 3)), "b": RNG.normal(size=7) * 20}
i, j, r = index(ROW), index(J), index(R)
causal = op("gt", j, i, dtype="bool")


def o(name: str, *args: Expr) -> Expr:
    return op(name, *args, dtype="bool" if name in ("lt", "le", "eq", "ne") else "f64")


def n(value: float) -> Expr:
    return const(value, "f64")


score = reduce("sum", R, o("mul", load("q", (i, r), "f64"), load("k", (j, r), "f64")), "f64")
LEAVES = st.sampled_from(
    [
        select(causal, n(-math.inf), score), select(causal, n(0.0), score), load("b", (j,), "f64"), score,
        n(0.0), n(1.0), n(-2.5), n(0.3), cast(op("sub", i, j, dtype="i64"), "f64"),
    ]
)  # fmt: skip
UNARY = ("exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "sqrt", "neg", "abs", "sign", "log", "log1p", "atan", "sin")


def _grown(of: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    tests = st.builds(o, st.sampled_from(["lt", "le", "eq", "ne"]), of, of)
    return st.one_of(
        st.builds(o, st.sampled_from(UNARY), of),
        st.builds(o, st.sampled_from(["add", "sub", "mul", "div", "max", "min"]), of, of),
        st.builds(select, tests, of, of),
    )


def _makes_infinity(e: Expr, values: Callable[[Expr], np.ndarray]) -> bool:
    """Whether an operation has an infinite result of finite numbers (a quotient by 0)."""
    if not isinstance(e, Op) or e.dtype == "bool" or not free_axes(e) <= {ROW, J}:
        return False
    finite = np.all([np.isfinite(values(a)) for a in e.args], axis=0)
    return bool(np.any(finite & ~np.isfinite(values(e))))


@settings(max_examples=600, deadline=None)
@given(st.recursive(LEAVES, _grown, max_leaves=12), st.booleans())
def test_what_is_computed_is_within_reach(e: Expr, outcome: bool) -> None:
    """Where no infinity comes of finite numbers: which are taken to stay finite."""
    found = reach(e, causal, outcome, lambda _: None)
    evaluator = _Evaluator(KNOWN)

    def values_of(e: Expr) -> np.ndarray:
        return np.broadcast_to(evaluator.at(e, (ROW, J)), (5, 7))

    with np.errstate(all="ignore"):
        assume(not any(_makes_infinity(n, values_of) for n in walk(e)))
        values = values_of(e)
    there = (np.arange(7)[None] > np.arange(5)[:, None]) == outcome
    for value in values[there].tolist():
        if math.isfinite(value):
            assert found.low <= value + 1e-9 + 1e-6 * abs(value)
            assert found.high >= value - 1e-9 - 1e-6 * abs(value)
    if found.low == found.high in (0.0, -math.inf, math.inf) and not found.nan:
        # One number stands for itself, if what made it stayed finite.
        assert all(v == found.low or not math.isfinite(v) or abs(v) < 1e-30 for v in values[there].tolist())


def test_running_values_may_be_anything() -> None:
    m = ref("m0", (ROW,), "f64")
    weight = o("exp", o("sub", select(causal, n(-math.inf), score), m))
    assert reach(weight, causal, True, lambda _: None).nan
    finite = reach(weight, causal, True, lambda e: Reach(-MOST, MOST) if e is m else None)
    assert finite.is_only(0.0)


def test_comparisons_with_nan() -> None:
    m = ref("m0", (ROW,), "f64")
    for name, low, high in (("lt", 0, 1), ("eq", 0, 1), ("ne", 0, 1)):
        assert reach(op(name, m, n(0.0), dtype="bool"), causal, True, lambda _: None) == Reach(low, high)
    far = Reach(2.0, 3.0, nan=True)
    assert reach(op("gt", m, n(1.0), dtype="bool"), causal, True, lambda e: far if e is m else None) == Reach(0, 1)
    assert reach(op("ne", m, n(1.0), dtype="bool"), causal, True, lambda e: far if e is m else None) == Reach(1, 1)


S = 200


def masked(q: Tensor, k: Tensor) -> Tensor:
    at = torch.arange(S)
    return (q @ k.mT / 4).masked_fill(at[None] > at[:, None], -math.inf)


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda q, k, v: torch.sigmoid(masked(q, k) - 3) @ v,
    "squared": lambda q, k, v: F.relu(masked(q, k)).square() @ v,
    "softplus": lambda q, k, v: F.softplus(masked(q, k)) @ v,
    "hard": lambda q, k, v: F.hardsigmoid(masked(q, k)) @ v,
    "error": lambda q, k, v: (torch.erf(masked(q, k)) + 1) @ v,
    "asked": lambda q, k, v: torch.where(masked(q, k) == -math.inf, 0.0, masked(q, k).tanh()) @ v,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_mask_makes_nothing_of_is_skipped(name: str) -> None:
    """In both passes."""
    given = [torch.randn(1, 2, S, 16).requires_grad_() for _ in range(3)]
    kernels = [k for graph in explain(VARIANTS[name], *given).graphs for k in graph.kernels]
    assert all(loop.lower is not None or loop.upper is not None for k in kernels for loop in k.loops)
    run_and_check(VARIANTS[name], fl.compile(VARIANTS[name]), [t.detach() for t in given], name=name)


def normalised(q: Tensor, k: Tensor, unseeing: int) -> Tensor:
    """Weights of causal attention, in which rows from `unseeing` on see nothing, and are NaN."""
    at = torch.arange(S)
    return (q @ k.mT / 4).masked_fill((at[None] > at[:, None]) | (at[:, None] >= unseeing), -math.inf).softmax(-1)


TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "threshold": lambda p: torch.where(p > 0.01, p, 0.0),
    "clamp": lambda p: p.clamp(max=0.3),
    "root": lambda p: p.sqrt(),
    "numbers": torch.nan_to_num,
    "sharp": lambda p: p.pow(1.5) / p.pow(1.5).sum(-1, keepdim=True),
    "positive": lambda p: F.relu(p - 0.01),
}


@pytest.mark.parametrize("unseeing", [S, 100])
@pytest.mark.parametrize("name", TWICE)
def test_a_second_pass_skips_where_the_first_ended_with_numbers(name: str, unseeing: int) -> None:
    """And makes NaN where PyTorch does: of rows that see nothing."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return TWICE[name](normalised(q, k, unseeing)) @ v

    given = [torch.randn(1, 2, S, 16) for _ in range(3)]
    (graph,) = explain(fn, *given).graphs
    second = [loop for k in graph.kernels for loop in k.loops if loop.finite]
    assert second and all(loop.upper is not None for loop in second)
    run_and_check(fn, fl.compile(fn), given, name=name)


@pytest.mark.parametrize("hidden", [-1e9, torch.finfo(torch.float32).min, -10000.0])
@pytest.mark.parametrize("unseeing, window", [(S, None), (S, 30), (100, None), (100, 30)])
def test_masks_of_large_negative_numbers_are_skipped(hidden: float, unseeing: int, window: int | None) -> None:
    """Rows of nothing else take the mean of all values, those of skipped tiles too."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(S)
        out = (at[None] > at[:, None]) | (at[:, None] >= unseeing)
        if window is not None:
            out |= at[:, None] - at[None] > window
        return (q @ k.mT / 4).masked_fill(out, hidden).softmax(-1) @ v

    given = [torch.randn(1, 2, S, 16) for _ in range(3)]
    ((kernel,),) = (graph.kernels for graph in explain(fn, *given).graphs)
    (loop,) = kernel.loops
    assert loop.settled and loop.upper is not None and (loop.lower is not None or window is None)
    run_and_check(fn, fl.compile(fn), given, name=f"{hidden}")
    low = [t.clone() for t in given]
    low[0][:, :, 40:50] = 1e6  # scores that are below what the mask says, or far above
    run_and_check(fn, fl.compile(fn), low, name=f"{hidden} and beyond")


@pytest.mark.parametrize("hidden", [-1e9, -10000.0])
@pytest.mark.parametrize("unseeing", [S, 100])
def test_gradients_of_keys_skip_them_where_all_rows_see_something(hidden: float, unseeing: int) -> None:
    """The gradient of a value is a sum over rows: of nothing, but for one that sees nothing else."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(S)
        out = (at[None] > at[:, None]) | (at[:, None] >= unseeing)
        return (q @ k.mT / 4).masked_fill(out, hidden).softmax(-1) @ v

    given = [torch.randn(1, 2, S, 16) for _ in range(3)]
    _, backward = explain(fn, *[t.clone().requires_grad_() for t in given]).graphs
    loops = [loop for k in backward.kernels for loop in k.loops]
    assert any(loop.above for loop in loops)
    assert all(loop.lower is not None or loop.upper is not None for loop in loops)
    check_gradients(fn, fl.compile(fn), given, name=f"{hidden}")


PADDED = torch.tensor([300, 1100])


@pytest.mark.parametrize("rows, gradients", [(1, False), (1100, False), (1100, True)])
def test_padding_of_large_negative_numbers_is_skipped(rows: int, gradients: bool) -> None:
    """Also where a loop's parts are different programs: one that sees padding alone has its share of it."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padding = torch.arange(k.shape[-2]) >= PADDED.to(q.device)[:, None, None, None]
        return (q @ k.mT / 4).masked_fill(padding, -1e9).softmax(-1) @ v

    given = [torch.randn(2, 1, n, 16) for n in (rows, 1100, 1100)]
    graph = explain(fn, *[t.clone().requires_grad_(gradients) for t in given]).graphs[-1]
    masked = [loop for k in graph.kernels for loop in k.loops if loop.axis.extent > 64]
    assert masked and all(loop.lower is not None or loop.upper is not None for loop in masked)
    assert any(loop.settled or loop.above for loop in masked)
    if not gradients:
        run_and_check(fn, fl.compile(fn), given, name="padding")
        given[1][0, :, 600:] = 1e3  # what padding hides is as large as may be
        run_and_check(fn, fl.compile(fn), given, name="padding of large numbers")
    else:
        check_gradients(fn, fl.compile(fn), given, name="padding")


@pytest.mark.long
def test_documents_apart_by_large_negative_numbers_are_skipped() -> None:
    """By what a kernel finds of their ids; a token of no document sees nothing."""

    def fn(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (q @ k.mT / 4).masked_fill(a[:, None] != b[None], torch.finfo(q.dtype).min).softmax(-1) @ v

    ids = torch.arange(1100) // 300
    given = [*(torch.randn(1, 1, 1100, 16) for _ in range(3)), ids, ids.clone()]
    for alone in (False, True):
        if alone:
            given[3][5] = 7
        (graph,) = explain(fn, *given).graphs
        bounds = [e for k in graph.kernels for loop in k.loops for e in bounds_of(loop) if e is not None]
        assert any(loads(e) for e in bounds)
        run_and_check(fn, fl.compile(fn), given, name="documents")
        grads = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
        _, backward = explain(fn, *grads).graphs
        assert any(loop.above and loop.upper is not None for k in backward.kernels for loop in k.loops)
        check_gradients(fn, fl.compile(fn), given, name="documents")


@pytest.mark.parametrize("low", [-30.0, -80.0])
def test_small_weights_are_not_nothing(low: float) -> None:
    """A row that sees nothing else is their mean, over all keys."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(S)
        out = (at[None] > at[:, None]) | (at[:, None] >= 100)
        w = (q @ k.mT / 4).masked_fill(out, low).exp()
        return w / w.sum(-1, keepdim=True) @ v

    run_and_check(fn, fl.compile(fn), [torch.randn(1, 2, S, 16) for _ in range(3)], name=f"{low}")


def test_what_is_small_may_be_zero_where_it_is_computed() -> None:
    for value, decided in ((-50.0, 1), (-80.0, 0), (-2000.0, 0)):
        weight = o("exp", select(causal, n(value), score))
        found = reach(o("lt", n(0.0), weight), causal, True, lambda _: None)
        assert found.low == decided and found.high == (value > -1000)


def test_the_least_number_that_is_added_hides_scores(device: torch.device) -> None:
    """An additive mask, of which some rows see nothing: those are means over all keys."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(S, device=q.device)
        hidden = (at[None] > at[:, None]) | (at[None] < 9)
        bias = torch.zeros(S, S, dtype=q.dtype, device=q.device).masked_fill(hidden, torch.finfo(q.dtype).min)
        return (q @ k.mT / 4 + bias).softmax(-1) @ v

    given = [torch.randn(1, 2, S, 16, device=device) for _ in range(3)]
    loops = [loop for k in explain(fn, *given).kernels for loop in k.loops]
    assert any(loop.upper is not None and loop.settled for loop in loops)
    run_and_check(fn, fl.compile(fn), given, name="added")
    check_gradients(fn, fl.compile(fn), given, name="added")
