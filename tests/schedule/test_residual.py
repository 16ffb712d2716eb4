"""Gradients of what all of a row's scores share: sums whose terms cancel, of rows known by a rounded result."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.build import op, reduce, substitute
from fl_pallas.schedule.expr import Axis, Expr, Reduce, free_axes, index, load, loads, reductions
from fl_pallas.schedule.inner import is_matrix_product
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.passes.residual import with_residuals
from fl_pallas.schedule.plan import Accumulator
from fl_pallas.schedule.program import Value
from fl_pallas.schedule.text import plan_text
from tests.evaluate import evaluate_value
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check_gradients
from tests.unrun import unrun


def attend(scores: Tensor, v: Tensor) -> Tensor:
    return scores.float().softmax(-1).to(v.dtype) @ v


def temperature(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return attend((q @ k.mT).float() * t[:, None, None], v)


def causal_slopes(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.mT).float() / 4 - t[:, None, None] * (i[:, None] - i) / 8
    return attend(scores.masked_fill(i > i[:, None], -torch.inf), v)


def slopes(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Of which the gradient is summed over the batch before it is multiplied by positions."""
    i = torch.arange(q.shape[-2], device=q.device)
    return attend((q @ k.mT).float() / 4 - t[:, None, None] * (i[:, None] - i) / 8, v)


def of_columns(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Softmax over the first of two dimensions: keys are rows of the scores."""
    weights = ((k @ q.mT).float() * t[:, None, None]).softmax(-2).to(v.dtype)
    return weights.mT @ v


def grouped(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """One temperature for all heads, which share one head of keys."""
    return attend((q @ k[:, :1].mT).float() * t[0], v[:, :1])


def two_chains(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Differential attention: the temperature is of both."""
    a, b = (attend((q @ x.mT).float() * t[:, None, None], v) for x in (k, v))
    return a - b * t[0].to(v.dtype)


def with_a_sink(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Of which the gradient is made of rows, too, and tells the exact sum from the one that is near."""
    i = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.mT).float() / 4 - t[:, None, None] * (i[:, None] - i) / 8
    scores = scores.masked_fill(i > i[:, None], -torch.inf)
    scores = torch.cat([scores, t[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1].to(v.dtype) @ v


PROGRAMS = (temperature, causal_slopes, slopes, of_columns, grouped, two_chains, with_a_sink)


@pytest.mark.parametrize("length", [33, 130])
@pytest.mark.parametrize("fn", PROGRAMS)
def test_gradients_as_exact_as_pytorchs(fn: Callable[..., Tensor], length: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn(3, 2, 2, length, 16, generator=generator, dtype=torch.float64)
    q, k, v = draw.to(torch.bfloat16).to(device)
    t = (torch.rand(2, generator=generator) + 0.5).to(device)
    check_gradients(fn, fl.compile(fn, fallback="error"), [q, k, v, t])


def test_a_temperature_of_each_row_of_sharp_scores(device: torch.device) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return ((q @ k.mT) * t[..., None]).softmax(-1) @ v

    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 1, 2, 150, 16, generator=generator).to(device)
    t = 5 * torch.rand(1, 2, 150, generator=generator).to(device) + 8
    check_gradients(fn, fl.compile(fn, fallback="error"), [q, k, v, t])


ROW, COLUMN, TERM = Axis("i", 5), Axis("j", 7), Axis("r", 7)
NEAR = load("near", (index(ROW),), "f32")
EXACT = reduce("sum", TERM, load("p", (index(ROW), index(TERM)), "f32"), "f32")
ABOUT = op("sub", load("p", (index(ROW), index(COLUMN)), "f32"), NEAR, dtype="f32")


def output(name: str, axes: tuple[Axis, ...], e: Expr, *summed: Axis) -> Output:
    for a in summed:
        e = reduce("sum", a, e, "f32")
    return Output(name, axes, "f32", e)


def test_sums_about_a_value_that_is_near() -> None:
    """Rows are corrected, and all of them together in either order; columns hear of the exact sum."""
    body = op("mul", load("x", (index(ROW), index(COLUMN)), "f32"), ABOUT, dtype="f32")
    outputs = [output("rows", (ROW,), body, COLUMN), output("columns", (COLUMN,), body, ROW)]
    outputs += [output("all", (), body, COLUMN, ROW), output("turned", (), body, ROW, COLUMN)]
    assert isinstance(EXACT, Reduce)
    near = {n: substitute(EXACT, {ROW: n.index[0]}) for o in outputs for n in loads(o.expr) if n.source == "near"}
    groups = with_residuals(tuple(Fused((o,)) for o in outputs), near)
    rng = np.random.default_rng(0)
    known = {"p": rng.random((5, 7)), "x": rng.random((5, 7)), "near": rng.random(5)}
    for g in groups:
        for o in sorted(g.outputs, key=lambda o: o.name != "near_exact"):
            known[o.name] = evaluate_value(Value(o.name, o.axes, o.dtype, o.expr), known)
    exact = known["x"] * (known["p"] - known["p"].sum(1, keepdims=True))
    for name, wanted in (
        ("rows", exact.sum(1)),
        ("columns", exact.sum(0)),
        ("all", exact.sum()),
        ("turned", exact.sum()),
    ):
        np.testing.assert_allclose(known[name], wanted)


def test_what_is_not_affine_stays() -> None:
    groups = (Fused((output("rows", (ROW,), op("mul", ABOUT, ABOUT, dtype="f32"), COLUMN),)),)
    assert isinstance(EXACT, Reduce) and with_residuals(groups, {NEAR: EXACT}) == groups


@pytest.mark.parametrize("fn", [temperature, slopes, with_a_sink])
def test_the_kernel_of_the_queries_has_all_of_it(fn: Callable[..., Tensor]) -> None:
    q, k, v = torch.randn(3, 2, 2, 130, 16).bfloat16()
    inputs = [x.requires_grad_() for x in (q, k, v, torch.rand(2))]
    with unrun():
        plans = [p for g in fl.explain(fn, *inputs).graphs for p in g.kernels]
    # One for the queries and all row sums, one for keys and values.
    assert sum("tangents" in plan_text(p) and bool(p.loops) for p in plans) == 2


def test_scores_are_not_taken_apart() -> None:
    """A temperature's gradient multiplies scores as they are, and no tile of queries by keys by features."""

    def attention(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return ((q @ k.mT).float() * t).softmax(-1).to(v.dtype) @ v

    inputs = [*torch.randn(3, 1, 2, 256, 64).bfloat16(), torch.rand(2, 1, 1)]
    for plan, _ in kernels_made(attention, [x.requires_grad_() for x in inputs]):
        tiled = frozenset(a for a, n in plan.choices.tiles if n > 1)
        for step in (s for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)):
            for r in reductions(step.update):
                assert len(free_axes(r.body) & tiled) < 2 or is_matrix_product(r.body, r.axis, tiled | {r.axis})


def cosines_with_bias(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Swin V2: cosines times what a head learns, with a bias that is as large."""
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return (cosines * scale.exp() + bias).softmax(-1) @ v


def test_weights_add_up_to_one_in_each_kernel(device: torch.device) -> None:
    """Where a product and a sum round at once in one kernel, and in turn in another."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 25, 8, generator=made) for _ in range(3))
    scale, bias = torch.full((2, 1, 1), math.log(50.0)), 16 * torch.rand(2, 25, 25, generator=made)
    inputs = tuple(x.to(device) for x in (q, k, v, scale, bias))
    check_gradients(cosines_with_bias, fl.compile(cosines_with_bias, dynamic=False), inputs)


def warm_with_cached_keys(q: Tensor, k: Tensor, v: Tensor, cached: Tensor, values: Tensor, t: Tensor) -> Tensor:
    """One softmax over the scores of two sets of keys: the weights of either do not add up to one."""
    s = torch.cat([q @ cached.mT, q @ k.mT], -1) * t
    return s.softmax(-1) @ torch.cat([values, v], -2)


def test_weights_of_a_part_of_the_keys(device: torch.device) -> None:
    made = torch.Generator().manual_seed(1)
    q, k, v, cached, values = (torch.randn(2, 2, n, 8, generator=made) for n in (40, 40, 40, 24, 24))
    inputs = tuple(x.to(device) for x in (q, k, v, cached, values, torch.tensor([0.5, 0.3])[:, None, None]))
    check_gradients(warm_with_cached_keys, fl.compile(warm_with_cached_keys, dynamic=False), inputs)
