"""Bounds from data: what lies outside of them never counts, and much of what does not count lies outside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.build import TRUE, negate, op
from fl_pallas.schedule.expr import Axis, Expr, const, free_axes, index, load, ref
from fl_pallas.schedule.interior import interior_steps
from fl_pallas.schedule.passes import skip_tiles as skipping
from fl_pallas.schedule.passes.bound_loops import masks
from fl_pallas.schedule.passes.contributes import contribution
from fl_pallas.schedule.passes.skip_tiles import skip_tiles
from fl_pallas.schedule.plan import Accumulator, Choices, KernelPlan, Loop, Store
from fl_pallas.schedule.text import plan_text
from fl_pallas.schedule.verify import verify_plan
from tests.oracle import run_and_check
from tests.plan_evaluate import PlanRun, TileEvaluator, captured
from tests.terms import i64, is_, n
from tests.unrun import explain

LENGTH = 700
Mask = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def short_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "MIN_EXTENT", 256)


# --- programs -----------------------------------------------------------------------------------


def attention(mask: Mask) -> Callable[..., Tensor]:
    """Softmax attention; `mask(i, j, *data)` gives [b or 1, i, j]."""

    def fn(q: Tensor, k: Tensor, v: Tensor, *data: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2], device=q.device)[:, None]
        j = torch.arange(k.shape[-2], device=k.device)[None, :]
        keep = mask(i, j, *data)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(~(keep if keep.dim() == 2 else keep[:, None]), float("-inf")).softmax(-1) @ v

    return fn


def ids(n: int = LENGTH, count: int = 9, batch: int = 2) -> Tensor:
    return torch.randint(0, count, (batch, n)).sort(-1).values


def starts(n: int = LENGTH) -> tuple[Tensor, Tensor]:
    """First and past the last key of each query: those of its document."""
    doc = ids(n)[0]
    return torch.searchsorted(doc, doc), torch.searchsorted(doc, doc, right=True)


def packed() -> Tensor:
    """Positions inside of documents of 150, in a batch of packed sequences."""
    return (torch.arange(LENGTH) % 150).expand(2, LENGTH).contiguous()


def times_with_a_nan() -> Tensor:
    times = torch.rand(LENGTH).sort().values
    times[99] = torch.nan
    return times


def padding(empty: bool = False) -> Tensor:
    keep = torch.arange(LENGTH) < torch.tensor([[290], [0 if empty else 700]])
    return keep | (torch.arange(LENGTH) == 100) & (not empty)


PATTERNS: dict[str, tuple[Mask, Callable[[], tuple[Tensor, ...]]]] = {
    "documents": (lambda i, j, doc: doc[i] == doc[j], lambda: (ids()[0],)),
    "documents of a batch": (lambda i, j, doc: doc[:, :, None] == doc[:, None, :], lambda: (ids(),)),
    "documents, causal": (lambda i, j, doc: (doc[:, i[:, 0], None] == doc[:, None, :]) & (j <= i), lambda: (ids(),)),
    "unsorted documents": (lambda i, j, doc: doc[i] == doc[j], lambda: (torch.randint(0, 40, (LENGTH,)),)),
    "documents given by their ends": (lambda i, j, a, b: (a[i] <= j) & (j < b[i]), starts),
    "later segments": (lambda i, j, seg: seg[j] >= seg[i], lambda: (ids()[0],)),
    "narrow ids": (lambda i, j, doc: doc[i] == doc[j], lambda: (ids()[0].to(torch.int32),)),
    "padding": (lambda i, j, valid: valid[:, None, :] & (j <= i), lambda: (padding(),)),
    "padding of everything": (lambda i, j, valid: valid[:, None, :], lambda: (padding(empty=True),)),
    "padding of rows": (lambda i, j, valid: valid[:, :, None] & (j <= i), lambda: (padding(),)),
    "integer padding": (lambda i, j, m: (m[:, None, :] > 0) & (j <= i), lambda: (padding().long(),)),
    "positions": (lambda i, j, p: p[j] <= p[i], lambda: (torch.arange(LENGTH) // 3,)),
    "a window of positions": (
        lambda i, j, p: (p[:, :, None] - p[:, None, :] < 40) & (p[:, :, None] >= p[:, None, :]), lambda: (packed(),)
    ),
    "a window of distances": (lambda i, j, p: (p[i] - p[j]).abs() <= 30, lambda: (torch.arange(LENGTH) * 2,)),
    "a window by index": (lambda i, j, w: (i - j).abs() <= w[i], lambda: (torch.randint(0, 50, (LENGTH,)),)),
    "times": (lambda i, j, t: t[j] <= t[i], lambda: (torch.rand(LENGTH).sort().values,)),
    "times with a NaN": (
        lambda i, j, t: (t[j] <= t[i]) | (i == j), lambda: (times_with_a_nan(),)
    ),
    "extreme ids": (
        lambda i, j, doc: doc[i] == doc[j],
        lambda: (torch.where(torch.arange(LENGTH) < 300, torch.iinfo(torch.int64).max, -3),),
    ),
    "either": (lambda i, j, doc: (doc[i] == doc[j]) | (j < 20), lambda: (ids()[0],)),
    "neither": (lambda i, j, doc: ~((doc[i] != doc[j]) | (j > i)), lambda: (ids()[0],)),
    "keys of another length": (
        lambda i, j, a, b: a[i] == b[j], lambda: (ids(190)[0], ids()[0])
    ),
}  # fmt: skip


def tensors(name: str) -> tuple[Tensor, ...]:
    data = PATTERNS[name][1]()
    queries = 190 if name == "keys of another length" else LENGTH
    batch = data[0].shape[0] if data[0].dim() == 2 else 1
    q, k, v = (torch.randn(batch, 1, n, 16) for n in (queries, LENGTH, LENGTH))
    return q, k, v, *data


@pytest.mark.parametrize("name", PATTERNS)
def test_as_the_program(name: str) -> None:
    """The plans with their bounds and interiors give what the program means, NaN rows included."""
    run = captured(attention(PATTERNS[name][0]), tensors(name))
    expected = run.values()
    plans = []
    for plan, plan_run, _ in run.kernels(bounded=True):
        plans.append(plan)
        for store, found in plan_run.run().items():
            if store in expected:
                np.testing.assert_allclose(found, expected[store], rtol=1e-9, atol=1e-9)
    assert [p.name for p in plans] == ["r0_k0_tiles", "r0_k0"], plan_text(plans[-1])
    assert "empty tiles are skipped" in plan_text(plans[-1])


SPARSE = {
    "documents": 0.55, "documents, causal": 0.4, "documents given by their ends": 0.55, "padding": 0.55,
    "padding of everything": 0.25, "padding of rows": 0.4, "positions": 0.65, "a window of distances": 0.4,
    "a window by index": 0.5, "times": 0.65, "extreme ids": 0.7, "neither": 0.4, "later segments": 0.75,
}  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_tiles_are_skipped(name: str) -> None:
    """At most this share of the tiles is visited."""
    run = captured(attention(PATTERNS[name][0]), tensors(name))
    for plan, plan_run, _ in run.kernels(bounded=True):
        if plan.name == "r0_k0":
            low, high, *_ = plan_run.limits(plan.loops[0])
            visited = np.maximum((LENGTH if high is None else high) - (0 if low is None else low), 0)
            assert visited.mean() / LENGTH <= SPARSE[name], plan_text(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PATTERNS)
def test_end_to_end(name: str, dtype: torch.dtype, device: torch.device) -> None:
    if name == "padding of rows" and device.type == "cpu" and dtype != torch.float32:
        pytest.skip("PyTorch's bfloat16 product on a CPU spreads the NaN of a row to the row before it")
    fn = attention(PATTERNS[name][0])
    inputs = tuple(t.to(dtype) if t.dim() == 4 else t for t in tensors(name))
    run_and_check(fn, fl.compile(fn), tuple(t.to(device) for t in inputs), name=name)


def two_passes(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).masked_fill(doc[:, None] != doc, float("-inf"))
    weights = scores.softmax(-1)
    return torch.where(weights > 0.01, weights, 0) @ v


def decoding(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    return (q[:, :, :1] @ k.transpose(-1, -2)).masked_fill(~valid[:, None, None], float("-inf")).softmax(-1) @ v


def unnormalised(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
    return torch.where(doc[:, None] == doc, q @ k.transpose(-1, -2), 0) @ v


@pytest.mark.parametrize(
    "fn, data", [(two_passes, lambda: ids()[0]), (decoding, padding), (unnormalised, lambda: ids()[0])]
)
def test_other_programs(fn: Callable[..., Tensor], data: Callable[[], Tensor], device: torch.device) -> None:
    inputs = tuple(t.to(device) for t in (*(torch.randn(2, 2, LENGTH, 16) for _ in range(3)), data()))
    assert explain(fn, *inputs).kernels[0].name == "r0_k0_tiles"
    run_and_check(fn, fl.compile(fn), inputs)


def test_split_loops(device: torch.device) -> None:
    """The parts of a split loop share out what the bounds leave, and rows of grouped heads have their own ids."""

    def fn(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
        keep = valid[:, None, None] & (ours[:, None, :, None] == theirs[:, None, None])
        return (q @ k.transpose(-1, -2)).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    keys = 2500
    valid = torch.arange(keys) < torch.tensor([[2100], [300]])
    theirs = ids(keys, 4)
    q, k, v = (torch.randn(2, 2, n, 16) for n in (3, keys, keys))
    inputs = tuple(t.to(device) for t in (q, k, v, valid, theirs[:, [0, 100, 290]], theirs))
    assert [p.name for p in explain(fn, *inputs).kernels] == ["r0_k0_tiles", "r0_k0", "r0_k1"]
    run_and_check(fn, fl.compile(fn), inputs)


def test_short_loops_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "MIN_EXTENT", LENGTH + 1)
    run = captured(attention(PATTERNS["documents"][0]), tensors("documents"))
    assert [p.name for plans in run.made.kernels for p in plans] == ["r0_k0"]


def test_masks_without_data_are_left_alone() -> None:
    q = torch.randn(1, 1, LENGTH, 16)
    run = captured(attention(lambda i, j: j <= i), (q, q, q))
    assert [p.name for plans in run.made.kernels for p in plans] == ["r0_k0"]


def test_all_but_itself_empties_no_tile() -> None:
    """A supervised contrastive loss: all other rows count, some of them twice."""

    def fn(x: Tensor, label: Tensor) -> Tensor:
        other = ~torch.eye(len(x), dtype=torch.bool)
        scores = (x @ x.mT).masked_fill(~other, -torch.inf)
        alike = (label[:, None] == label) & other
        return (alike * scores.exp()).sum(-1) / scores.exp().sum(-1)

    run = captured(fn, (torch.randn(LENGTH, 16), ids(LENGTH, 9)[0]))
    assert "tiles" not in " ".join(p.name for plans in run.made.kernels for p in plans)


def test_text(golden: Callable[[str], None]) -> None:
    run = captured(attention(PATTERNS["documents, causal"][0]), tensors("documents, causal"))
    golden("\n\n".join(plan_text(p) for plans in run.made.kernels for p in plans))


# --- any mask -----------------------------------------------------------------------------------

B, ROWS, J = Axis("b", 2), Axis("i", 300), Axis("j", 330)
i, j, b = index(ROWS), index(J), index(B)


ROW_DATA = [load("q_ids", (b, i), "i64"), load("ends", (i,), "i64")]
COLUMN_DATA = [load("k_ids", (b, j), "i64"), load("noise", (j,), "i64")]
NUMBERS = st.integers(-5, 340)
ATOMS = st.one_of(
    st.sampled_from([*ROW_DATA, *COLUMN_DATA, *COLUMN_DATA, i, j, load("lengths", (b,), "i64")]), NUMBERS.map(n)
)
SUMS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(i64, st.sampled_from(["add", "sub", "max", "min"]), inner, inner),
        st.builds(lambda e: i64("abs", e), inner),
        st.builds(lambda e, k: i64("mul", e, n(k)), inner, st.sampled_from([-2, -1, 2, 3])),
        st.builds(lambda e, k: i64("floordiv", e, n(k)), inner, st.sampled_from([2, 7, 64])),
        st.builds(lambda e, k: i64("mod", e, n(k)), inner, st.sampled_from([2, 7, 64])),
    ),
    max_leaves=4,
)
RELATIONS = ["lt", "le", "gt", "ge", "eq", "ne"]
LEAVES = st.one_of(
    st.builds(is_, st.sampled_from(RELATIONS), SUMS, SUMS),
    st.builds(is_, st.sampled_from(RELATIONS), st.sampled_from(COLUMN_DATA), st.sampled_from([*ROW_DATA, i])),
    st.sampled_from([load("valid", (b, j), "bool"), load("asked", (i,), "bool"), load("pairs", (i, j), "bool")]),
    st.builds(
        lambda name, k: is_(name, load("times", (k,), "f32"), load("times", (i,), "f32")),
        st.sampled_from(RELATIONS), st.just(j),
    ),
)  # fmt: skip
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda x, y: is_("and", x, y), inner, inner),
        st.builds(lambda x, y: is_("or", x, y), inner, inner),
        st.builds(negate, inner),
        st.builds(lambda x, y, z: op("select", x, y, z, dtype="bool"), inner, inner, inner),
    ),
    max_leaves=4,
)


def data(rng: np.random.Generator) -> dict[str, np.ndarray]:
    times = np.sort(rng.random(330))
    times[rng.integers(0, 330, 2)] = np.nan
    valid = np.zeros((2, 330), bool)
    valid[0, rng.integers(330) :] = True
    return {
        "q_ids": np.sort(rng.integers(0, 6, (2, 300))), "k_ids": np.sort(rng.integers(0, 6, (2, 330))),
        "ends": np.sort(rng.integers(0, 330, 300)), "noise": rng.integers(-400, 400, 330),
        "lengths": rng.integers(0, 330, 2), "valid": valid, "asked": np.arange(300) < rng.integers(300),
        "pairs": rng.random((300, 330)) < 0.3, "times": times, "x": rng.standard_normal((2, 300, 330)),
    }  # fmt: skip


VALID, PAIRS = load("valid", (b, j), "bool"), load("pairs", (i, j), "bool")


@settings(max_examples=150)
@example(is_("and", op("select", VALID, TRUE, VALID, dtype="bool"), PAIRS), 16, 1337160651)
@given(CONDITIONS, st.sampled_from([16, 64, 128]), st.integers(0, 2**32))
def test_any_mask(condition: Expr, side: int, seed: int) -> None:
    """What the bounds leave out does not count, and what an interior holds counts whole."""
    known = data(np.random.default_rng(seed))
    score = load("x", (b, i, j), "f32")
    masked = op("select", condition, score, const(-np.inf, "f32"), dtype="f32")
    if not free_axes(condition) & {i.axis, j.axis}:  # type: ignore[union-attr]
        return
    step = Accumulator("m0", "max", (B, ROWS), masked, "f32", None)
    loop = Loop(J, (step,))
    tiles = Choices(((B, 1), (ROWS, side), (J, 32)))
    store = Store("out", (B, ROWS), "f32", ref("m0", (B, ROWS), "f32"))
    *before, plan = skip_tiles(KernelPlan("k", (B, ROWS), (), (loop,), (store,), "f32", tiles))
    for p in (*before, plan):
        verify_plan(p)
    for p in before:
        known |= PlanRun(p, known, bounded=True).run()
    run = PlanRun(plan, known, bounded=True)
    sides = zip(run.limits(plan.loops[0]), (0, J.extent) * 2, strict=False)
    low, high, *inner = (np.asarray(missing if e is None else e[..., None]) for e, missing in sides)
    at = np.arange(J.extent)
    shape = (B.extent, ROWS.extent, J.extent)
    counts = np.broadcast_to(TileEvaluator(known, {}).at(contribution(loop), (B, ROWS, J)), shape)
    assert not (counts & ~((at >= low) & (at < high))).any(), plan_text(plan)
    if inner and not any(masks(interior_steps(plan.loops[0]))):
        # An interior may begin where the loop does not go: there a mask hides all, as a whole.
        within = (at >= np.maximum(low, inner[0])) & (at < np.minimum(high, inner[1]))
        assert not (within & ~counts).any(), plan_text(plan)
    np.testing.assert_array_equal(run.run()["out"], PlanRun(plan, known).run()["out"])
