"""Sums over flattened dimensions fall apart where that sets something free, and mean the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fl_pallas as fl
from fl_pallas.schedule import pipeline
from fl_pallas.schedule.build import op, reduce
from fl_pallas.schedule.expr import Axis, Expr, index, load, reductions
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.passes.unflatten import unflatten
from fl_pallas.schedule.text import expr_text
from tests.plan_evaluate import TileEvaluator
from tests.programs import BY_NAME
from tests.terms import i64, n
from tests.unrun import unrun

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
    """Together, rows and columns would have a kernel store a matrix of rows for each of their pairs."""
    case = BY_NAME["mixed_heads"]
    inputs = [x.requires_grad_() for x in case.make_inputs(48, torch.float32, "cpu")]
    monkeypatch.setattr(pipeline, "unflatten", lambda fused: fused)
    with unrun():
        (both,) = fl.explain(case.target(torch.float32, "cpu"), *inputs).graphs
    assert not both.kernels
    assert any("would be stored in more places" in f.why for f in both.fallbacks)
