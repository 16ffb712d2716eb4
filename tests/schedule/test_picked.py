"""Sums of which one index counts are what stands there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.build import cast, op, reduce, select
from fl_pallas.schedule.expr import Axis, Expr, Reduce, const, index, load, walk
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.passes.picked import picked
from fl_pallas.schedule.plan import expressions
from fl_pallas.schedule.text import expr_text
from tests.oracle import check_gradients
from tests.unrun import unrun

ROW, CLASS = Axis("i", 8), Axis("c", 300)
R, C = index(ROW), index(CLASS)
LABEL, ZERO = load("label", (R,), "i64"), const(0.0, "f32")
SCORE, WEIGHT = load("score", (R, C), "f32"), load("weight", (C,), "f32")
GRADIENT = load("gradient", (R,), "f32")


def found(body: Expr) -> Expr:
    total = reduce("sum", CLASS, body, "f32")
    return picked(Fused((Output("out", (ROW,), "f32", total),))).outputs[0].expr


def at(place: Expr, then: Expr) -> Expr:
    return select(op("eq", C, place, dtype="bool"), then, ZERO)


def product(a: Expr, b: Expr) -> Expr:
    return op("mul", a, b, dtype="f32")


INSIDE = "label[i] >= 0 & label[i] < 300"


@pytest.mark.parametrize(
    "body, wanted",
    [
        (at(LABEL, WEIGHT), f"select({INSIDE}, weight[label[i]], 0)"),
        (product(at(LABEL, const(-1.0, "f32")), GRADIENT), f"select({INSIDE}, -1, 0) * gradient[i]"),
        (at(op("add", R, const(5, "i64"), dtype="i64"), SCORE), "score[i, i + 5]"),
    ],
)
def test_what_is_picked(body: Expr, wanted: str) -> None:
    assert expr_text(found(body)) == wanted


@pytest.mark.parametrize(
    "body",
    [
        product(at(LABEL, const(1.0, "f32")), SCORE),  # an infinite one beside it makes NaN
        at(op("add", R, op("mod", C, const(2, "i64"), dtype="i64"), dtype="i64"), WEIGHT),
        select(op("gt", C, LABEL, dtype="bool"), WEIGHT, ZERO),
        select(op("eq", C, LABEL, dtype="bool"), WEIGHT, const(1.0, "f32")),
        select(op("eq", cast(C, "f32"), GRADIENT, dtype="bool"), WEIGHT, ZERO),
    ],
)
def test_what_is_not(body: Expr) -> None:
    assert any(isinstance(n, Reduce) for n in walk(found(body)))


def labelled(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.mT, labels, ignore_index=3)


def compared(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """Labels that are none of the classes count for nothing."""
    classes = torch.arange(w.shape[0], device=w.device)
    scores = (x @ w.mT).log_softmax(-1)
    return torch.where(classes == labels[:, None], scores, 0.0).sum(-1).sum()


def inputs(length: int, classes: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 64, generator=generator).to(torch.bfloat16) for n in (length, classes))
    labels = torch.randint(0, classes, (length,), generator=generator)
    return [x.to(device), w.to(device), labels.to(device)]


def test_no_sums_of_classes_for_a_label(device: torch.device) -> None:
    x, w, labels = inputs(500, 300, device)
    with unrun():
        graphs = fl.explain(labelled, x.requires_grad_(), w.requires_grad_(), labels).graphs
    sums = {n for g in graphs for p in g.kernels for e in expressions(p) for n in walk(e) if isinstance(n, Reduce)}
    assert sums and all(n.axis.extent == 64 for n in sums)


@pytest.mark.parametrize("fn", [labelled, compared])
def test_gradients(fn: Callable[..., Tensor], device: torch.device) -> None:
    x, w, labels = inputs(70, 30, device)
    if fn is compared:
        labels[::5] = torch.tensor([-1, 30], device=device).repeat(7)
    check_gradients(fn, fl.compile(fn), [x, w, labels])
