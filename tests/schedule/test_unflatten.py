"""Sums over flattened dimensions fall apart where that sets something free, and mean the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule import pipeline
from fl_pallas.schedule.build import op, reduce, select
from fl_pallas.schedule.expr import Axis, Expr, const, index, load, reductions
from fl_pallas.schedule.passes import cut
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.passes.unflatten import unflatten
from fl_pallas.schedule.text import expr_text, plan_text
from tests.oracle import check_gradients
from tests.plan_evaluate import TileEvaluator
from tests.programs import BY_NAME
from tests.terms import i64, is_, n
from tests.unrun import explain, unrun

BATCH, ROWS, KEYS = 3, 20, 15
X, K, FLAT = Axis("x", 4), Axis("k", KEYS), Axis("flat", BATCH * ROWS * KEYS)
DRAW = np.random.default_rng(0)
KNOWN = {"s": DRAW.normal(size=(BATCH, ROWS, KEYS)), "w": DRAW.normal(size=(4, BATCH * ROWS * KEYS))}
flat = index(FLAT)
b, i = i64("floordiv", flat, n(ROWS * KEYS)), i64("mod", i64("floordiv", flat, n(KEYS)), n(ROWS))
j = i64("mod", flat, n(KEYS))
score = load("s", (b, i, j), "f32")
weight = load("w", (index(X), flat), "f32")


def f32(name: str, *args: Expr) -> Expr:
    return op(name, *args, dtype="f32")


def apart(body: Expr, axis: Axis = FLAT) -> Expr:
    """The sum of `body` over the flattened axis after the pass, checked to mean what it did."""
    e = reduce("sum", axis, body, "f32")
    after = unflatten(Fused((Output("out", (X,), "f32", e),))).outputs[0].expr
    before, now = (np.asarray(TileEvaluator(KNOWN, {}).at(x, (X,))) for x in (e, after))
    np.testing.assert_allclose(np.broadcast_to(now, (4,)), np.broadcast_to(before, (4,)), rtol=1e-9)
    return after


def test_a_rows_own_reduction_sets_them_apart() -> None:
    highest = reduce("max", K, f32("mul", load("s", (b, i, index(K)), "f32"), reduce_of_features(b, i)), "f32")
    text = expr_text(apart(f32("mul", weight, f32("sub", score, highest))))
    assert "//" not in text and "%" not in text
    assert text.count("sum[r3]") == text.count("sum[r20]") == 1


def reduce_of_features(*row: Expr) -> Expr:
    f = Axis("f", KEYS)
    return reduce("sum", f, f32("mul", load("s", (*row, index(f)), "f32"), load("s", (*row, index(f)), "f32")), "f32")


def test_nothing_to_gain() -> None:
    """A flattened axis that all of the body goes along, as a row of keys in two dimensions does, stays whole."""
    assert [r.axis.extent for r in reductions(apart(f32("mul", weight, score)))] == [FLAT.extent]


def test_what_would_store_more_than_pytorch_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, rows and columns would have a kernel store a matrix of rows for each of their pairs, were sizes no
    reason to compute anything again."""
    case = BY_NAME["mixed_heads"]
    inputs = [x.requires_grad_() for x in case.make_inputs(48, torch.float32, "cpu")]
    monkeypatch.setattr(pipeline, "unflatten", lambda fused: fused)
    monkeypatch.setattr(cut, "is_larger_than", lambda r, read, times=1: False)
    with unrun():
        graphs = fl.explain(case.target(torch.float32, "cpu"), *inputs).graphs
    stored = [math.prod(s.shape) for graph in graphs for plan in graph.kernels for s in plan.stores]
    assert max(stored) <= 2 * 2 * 48 * 48
    assert any("kernels would store more on the way to it" in f.why for graph in graphs for f in graph.fallbacks)


HEADS, QUERIES, WIDE = 3, 100, Axis("r5", 5)
HEAD_OF = {
    "heads first": (Axis("flat", HEADS * QUERIES), "floordiv", "mod", QUERIES),
    "queries first": (Axis("flat", HEADS * QUERIES), "mod", "floordiv", HEADS),
}


@pytest.mark.parametrize("order", HEAD_OF)
def test_what_both_sides_of_a_product_share_goes_outside(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat, heads and queries would be one axis of both sides, and the product none of matrices."""
    axis, to_head, to_query, stride = HEAD_OF[order]
    h, q = (i64(name, index(axis), n(stride)) for name in (to_head, to_query))
    monkeypatch.setitem(KNOWN, "q", DRAW.normal(size=(HEADS, QUERIES, 5)))
    monkeypatch.setitem(KNOWN, "k", DRAW.normal(size=(4, HEADS, 5)))
    sides = load("q", (h, q, index(WIDE)), "f32"), load("k", (index(X), h, index(WIDE)), "f32")
    after = apart(reduce("sum", WIDE, f32("mul", *sides), "f32"), axis)
    assert [r.axis.extent for r in reductions(after)] == [5, QUERIES, HEADS]
    assert "//" not in expr_text(after) and "%" not in expr_text(after)


def test_what_a_mask_does_not_ask_for_goes_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over the queries of one head has an end where it is causal; one over those of all heads has none."""
    axis, to_head, to_query, stride = HEAD_OF["heads first"]
    h, q = (i64(name, index(axis), n(stride)) for name in (to_head, to_query))
    monkeypatch.setitem(KNOWN, "g", DRAW.normal(size=(HEADS, QUERIES)))
    seen = select(is_("ge", q, index(X)), load("g", (h, q), "f32"), const(0.0, "f32"))
    assert [r.axis.extent for r in reductions(apart(seen, axis))] == [QUERIES, HEADS]


def test_parts_larger_than_what_they_are_made_of_stay_together() -> None:
    heads, queries, keys = 300, 2, Axis("x", 20)
    axis = Axis("flat", heads * queries)
    h, q = (i64(name, index(axis), n(queries)) for name in ("floordiv", "mod"))
    seen = select(is_("ge", q, index(keys)), load("g", (h, q), "f32"), const(0.0, "f32"))
    output = Output("out", (keys,), "f32", reduce("sum", axis, seen, "f32"))
    assert unflatten(Fused((output,))).outputs == (output,)


@pytest.mark.parametrize("name", ["decoupled_rotary", "latent_absorbed"])
def test_heads_that_share_keys_have_loops_of_their_own(name: str) -> None:
    """The keys' gradient is one of all heads; their sums are added up by a kernel that reads whole rows."""
    case = BY_NAME[name]
    inputs = [x.requires_grad_() for x in case.make_inputs(512, torch.bfloat16, "cpu")]
    with unrun():
        (graph,) = [g for g in fl.explain(case.target(torch.bfloat16, "cpu"), *inputs).graphs if g.name == "backward"]
    assert graph.schedule is not None
    plans = [p for kernels in graph.schedule.kernels for p in kernels]
    assert all(loop.lower or loop.upper for p in plans for loop in p.loops)
    assert not any(s in plan_text(p) for p in plans for s in ("j0 //", "j0 %"))
    assert all(p.features == (p.grid[-1],) for p in plans if not p.loops)


@pytest.mark.parametrize("names", [(), ("u", "w")], ids=["q alone", "with biases"])
def test_a_batch_folded_into_rows_is_parted(names: tuple[str, ...], device: torch.device) -> None:
    """einsum("ibnd,jnd->bnij") folds the batch into the queries, whose positions are then shifted by data of none; its
    gradient comes so. With the biases it is one of three results of the queries' kernel."""
    case = BY_NAME["xlnet"]
    q, k, v, r, u, w = case.make_inputs(512, torch.bfloat16, device)
    given = [x.requires_grad_() for x in (q, k, v, r)]
    given += [x.requires_grad_(name in names) for name, x in (("u", u), ("w", w))]
    with unrun():
        (graph,) = [g for g in fl.explain(case.target(torch.bfloat16, device), *given).graphs if g.name == "backward"]
    assert not any("%" in line for plan in graph.kernels for line in plan_text(plan).split("\n") if "sum(" in line)
    lengths = [len(plan.loops) for plan in graph.kernels if plan.loops]
    assert lengths == [1] * 3, "queries, keys, positions"


def shifted_alone(q: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Positions without content: q, v [s,b,h,d], r [2s,h,d]."""
    position = torch.einsum("ibnd,pnd->bnip", q, r)
    b, n, i, p = position.shape
    position = position.reshape(b, n, p, i)[:, :, 1:].reshape(b, n, i, p - 1)[..., : len(v)]
    return torch.einsum("bnij,jbnd->ibnd", (position / 4).softmax(-1), v)


def test_positions_without_content(device: torch.device) -> None:
    """A sheared product inside of a reduction that is no loop of the kernel."""
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(70, 2, 3, 16, generator=generator).to(device) for _ in range(2))
    r = torch.randn(140, 3, 16, generator=generator).to(device)
    check_gradients(shifted_alone, fl.compile(shifted_alone), [q, v, r])


def picked_blocks(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
    """Blocks of 16 beside each other, the first, and those of a table; a packed projection (BigBird)."""
    batch, tokens, c = x.shape
    q, k, v = (x @ qkv).view(batch, tokens, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    block = torch.arange(tokens, device=x.device) // 16
    near = ((block[:, None] - block).abs() <= 1) | (block[:, None] == 0) | (block == 0)
    seen = near | (table[block][:, :, None] == block).any(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(x.shape)


def blocks(tokens: int, c: int) -> list[Tensor]:
    torch.manual_seed(tokens)
    count = -(-tokens // 16)
    return [torch.randn(2, tokens, c), torch.randn(c, 3 * c) / c**0.5, torch.randint(0, count, (count, 2))]


def test_blocks_of_a_mask_leave_rows_whole() -> None:
    """Rows and keys lie behind a batch in a projection, and are read as they are: one kernel, with tiles of rows."""
    x, qkv, table = blocks(1024, 128)
    plan, *others = explain(picked_blocks, x.bfloat16().repeat(8, 1, 1), qkv.bfloat16(), table).kernels
    assert not others
    assert [plan.choices.tile(a) for a in plan.grid if a.extent == 1024] == [64]
    assert [loop.axis.extent for loop in plan.loops] == [1024]


@pytest.mark.parametrize("tokens", [48, 100])
def test_picked_blocks(tokens: int, device: torch.device) -> None:
    x, qkv, table = (t.to(device) for t in blocks(tokens, 32))
    args = [x.requires_grad_(), qkv.requires_grad_(), table]
    check_gradients(picked_blocks, fl.compile(picked_blocks, dynamic=False), args)
