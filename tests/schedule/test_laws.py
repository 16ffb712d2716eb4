"""The laws streaming rests on, each by number: what they split equals what they were given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fl_pallas.schedule.build import negate, op, reduce, select
from fl_pallas.schedule.expr import Axis, Expr, const, free_axes, index, load, raw_reduce, ref
from fl_pallas.schedule.laws import MAX_TERMS, Nonseparable, Scope, Term, non_negative, separate, split_sum, stable
from fl_pallas.schedule.passes import covered, cut, stream
from fl_pallas.schedule.passes.build_plan import build_plan
from fl_pallas.schedule.passes.fuse import Fused, Output
from fl_pallas.schedule.target import HOPPER
from fl_pallas.schedule.text import expr_text, plan_text
from fl_pallas.schedule.verify import verify_plan
from tests.evaluate import _Evaluator
from tests.plan_evaluate import PlanRun, TileEvaluator

J, ROWS = Axis("j", 11), Axis("i", 3)
RNG = np.random.default_rng(7)
KNOWN = {
    "f": RNG.normal(size=11), "g": RNG.normal(size=11), "p": RNG.uniform(0.1, 2, size=11),
    "h": RNG.normal(size=3), "w": RNG.uniform(0.2, 2, size=3),
}  # fmt: skip
HELD = {name: RNG.normal(size=(3, 1)) for name in ("m0", "m1")} | {
    name: RNG.uniform(0.5, 3, size=(3, 1)) for name in ("a0", "a1")
}
SCOPE = Scope(J, frozenset(HELD), "f64")
j, i = index(J), index(ROWS)


def n(value: float) -> Expr:
    return const(float(value), "f64")


def o(name: str, *args: Expr) -> Expr:
    return op(name, *args, dtype="f64")


def along(name: str) -> Expr:
    return load(name, (j,), "f64")


def r(name: str) -> Expr:
    return ref(name, (ROWS,), "f64")


f, g, p = map(along, "fgp")
h, w = load("h", (i,), "f64"), load("w", (i,), "f64")
m0, m1, a0, a1 = map(r, ("m0", "m1", "a0", "a1"))
mean = o("div", a0, a1)
causal = op("le", j, i, dtype="bool")
near = op("lt", j, const(6, "i64"), dtype="bool")
positive_row = op("gt", m0, n(0.0), dtype="bool")
ZERO, LOW = n(0.0), n(-math.inf)


def value(e: Expr) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.broadcast_to(TileEvaluator(KNOWN, HELD).at(e, (ROWS, J)), (3, 11))


def recombined(t: Term) -> np.ndarray:
    """A term's value, as its docstring defines it."""
    with np.errstate(all="ignore"):
        out = value(t.hoisted)
        exponent = sum((value(e) for e in (t.exponent, t.offset) if e is not None), np.zeros(()))
        out = out * np.exp(exponent)
        for factor in t.factors:
            out = out * value(factor)
        for s in t.shifts:
            out = out * (value(s.varying) + value(s.moving))
        for gate in t.gates:
            out = np.where(value(gate), out, 0.0)
    return out


def check(e: Expr, terms: list[Term]) -> None:
    total = sum((recombined(t) for t in terms), np.zeros((3, 11)))
    size = sum((np.abs(recombined(t)) for t in terms), np.ones((3, 11)))
    np.testing.assert_allclose(total / size, value(e) / size, rtol=1e-9, atol=1e-9, err_msg=expr_text(e))
    for t in terms:
        for name, part in (("hoisted", t.hoisted), ("offset", t.offset), *(("gate", x) for x in t.gates)):
            assert part is None or J not in free_axes(part), f"{name} of {expr_text(e)} varies"
        for name, part in (("exponent", t.exponent), *(("factor", x) for x in t.factors)):
            assert part is None or not SCOPE.moves(part), f"{name} of {expr_text(e)} moves"
        for s in t.shifts:
            assert not SCOPE.moves(s.varying) and J not in free_axes(s.moving)
            assert stable(s.moving, SCOPE)


weight = o("exp", o("sub", f, m0))
SEPARABLE: dict[str, tuple[Expr, int]] = {
    "free of the loop": (o("mul", m0, h), 1),
    "does not move": (o("tanh", o("mul", f, h)), 1),
    "exp(a + b) = exp(a) exp(b)": (weight, 1),
    "b on the left": (o("exp", o("sub", m0, f)), 1),
    "scaled exponent": (o("exp", o("mul", o("sub", f, m0), w)), 1),
    "divided exponent": (o("exp", o("div", o("sub", f, m0), w)), 1),
    "negated exponent": (o("exp", o("neg", o("add", f, m0))), 1),
    "two references": (o("exp", o("sub", o("sub", f, m0), o("log", a0))), 1),
    "factors hoist": (o("mul", o("mul", weight, a0), o("mul", g, h)), 1),
    "hoisted quotient": (o("div", weight, a0), 1),
    "quotient of exponentials": (o("div", g, o("exp", o("sub", f, m0))), 1),
    "quotient by a product": (o("div", weight, o("mul", p, a0)), 1),
    "x distributes over +": (o("mul", weight, o("add", g, o("mul", h, m1))), None),
    "sum of two weights": (o("add", o("mul", weight, a0), o("exp", o("sub", g, m1))), 2),
    "difference of two weights": (o("sub", weight, o("mul", h, o("exp", o("sub", g, m1)))), 2),
    "negated": (o("neg", weight), 1),
    "square": (o("pow", weight, n(2.0)), 1),
    "cube": (o("pow", weight, n(3.0)), 1),
    "about a mean": (o("sub", f, mean), 1),
    "about a maximum": (o("mul", g, o("sub", f, m0)), 1),
    "about a log": (o("mul", weight, o("sub", o("sub", f, m0), o("log", a0))), 1),
    "squared about a mean": (o("mul", weight, o("pow", o("sub", f, mean), n(2.0))), 1),
    "product of two differences": (o("mul", o("sub", f, mean), o("sub", g, m1)), 1),
    "masked weight": (select(causal, weight, ZERO), 1),
    "masked exponent": (o("exp", o("sub", select(causal, f, LOW), m0)), 1),
    "masked difference": (o("exp", select(causal, o("sub", f, m0), LOW)), 1),
    "mask inverted": (o("exp", select(causal, LOW, o("sub", f, m0))), 1),
    "masked factor": (select(causal, o("mul", g, a0), ZERO), 1),
    "masked hoist": (select(near, a0, ZERO), 1),
    "either of two": (select(near, weight, o("mul", o("exp", o("sub", g, m1)), a0)), 2),
    "gate": (select(positive_row, weight, ZERO), 1),
    "gate, other branch": (select(positive_row, ZERO, o("mul", g, a0)), 1),
    "gate in a product": (o("mul", g, select(positive_row, weight, ZERO)), 1),
}


@pytest.mark.parametrize("name", SEPARABLE)
def test_terms_recombine(name: str) -> None:
    e, count = SEPARABLE[name]
    terms = separate(e, SCOPE)
    check(e, terms)
    assert count is None or len(terms) == count


big_sum = o("add", o("add", weight, o("mul", g, a0)), o("exp", o("sub", g, m1)))
REFUSED: dict[str, tuple[Expr, str]] = {
    "function of a moving value": (
        o("tanh", o("sub", f, m0)),
        "`tanh` of a value that varies along the loop and moves",
    ),
    "max with a moving value": (o("max", f, m0), "`max` of a value that varies"),
    "power": (o("pow", o("sub", f, m0), n(1.5)), "`pow` of a value"),
    "fourth power": (o("pow", o("sub", f, m0), n(4.0)), "`pow` of a value"),
    "exponent": (o("exp", o("mul", f, m0)), "`mul` does not split into a varying and a moving part"),
    "exponent of a product of differences": (o("exp", o("mul", f, o("sub", g, m0))), "`mul` does not split"),
    "scale that moves": (o("exp", o("mul", o("sub", f, m0), a0)), "`mul` does not split"),
    "nested reduction": (
        raw_reduce("sum", Axis("k", 4), o("mul", o("mul", f, m0), load("g", (index(Axis("k", 4)),), "f64")), "f64"),
        "a nested reduction depends on a running value",
    ),
    "nested reduction in an exponent": (
        o(
            "exp",
            raw_reduce("max", Axis("k", 4), o("sub", o("sub", f, m0), load("g", (index(Axis("k", 4)),), "f64")), "f64"),
        ),
        "a nested reduction depends on a running value",
    ),
    "condition": (
        select(op("gt", f, m0, dtype="bool"), g, ZERO),
        "a condition on a value that varies along the loop and moves with it",
    ),
    "division by a sum": (o("div", g, o("add", weight, p)), "division by a sum of separable terms"),
    "division by a difference": (o("div", g, o("sub", f, mean)), "division by a sum of separable terms"),
    "division by a gate": (o("div", g, select(positive_row, weight, ZERO)), "division by a sum of separable terms"),
    "too many terms": (o("mul", big_sum, big_sum), "too many terms"),
    "third power of a difference": (o("pow", o("sub", f, mean), n(3.0)), "too high a power of a moving difference"),
    "about a bare sum": (o("mul", weight, o("sub", f, a0)), "no mean, maximum or logarithm would cancel"),
    "about a product of sums": (o("sub", f, o("mul", a0, a1)), "would cancel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    e, message = REFUSED[name]
    with pytest.raises(Nonseparable, match=message):
        separate(e, SCOPE)


def test_too_many_terms_is_the_documented_number() -> None:
    pair = o("add", weight, o("exp", o("sub", g, m1)))
    eight = o("mul", pair, o("mul", pair, pair))
    assert len(separate(eight, SCOPE)) == MAX_TERMS == 8
    check(eight, separate(eight, SCOPE))


# --- any expression -----------------------------------------------------------------------------

LEAVES = st.sampled_from([f, g, p, h, w, m0, m1, a0, a1, mean, o("log", a0), n(0.7), n(2.0), n(-1.3)])


def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    conditions = st.sampled_from([causal, near, positive_row, negate(near), op("gt", f, n(0.0), dtype="bool")])
    return st.one_of(
        st.builds(lambda name, a, b: o(name, a, b), st.sampled_from(["add", "sub", "mul", "mul", "div"]), inner, inner),
        st.builds(lambda a: o("exp", o("mul", a, n(0.3))), inner),
        st.builds(lambda a, b: o("exp", o("sub", a, b)), inner, inner),
        st.builds(lambda a: o("neg", a), inner),
        st.builds(lambda a: o("pow", a, n(2.0)), inner),
        st.builds(select, conditions, inner, st.one_of(st.just(ZERO), inner)),
        st.builds(lambda c, a, b: o("exp", o("sub", select(c, a, LOW), b)), conditions, inner, inner),
    )


EXPRESSIONS = st.recursive(LEAVES, grow, max_leaves=7)


@settings(max_examples=150)
@given(EXPRESSIONS)
def test_whatever_separates_recombines(e: Expr) -> None:
    now = value(e)
    assume(np.isfinite(now).all() and np.abs(now).max() < 1e6)
    try:
        terms = separate(e, SCOPE)
    except Nonseparable as refusal:
        assert str(refusal)
        return
    parts = [recombined(t) for t in terms]
    assume(all(np.isfinite(x).all() and np.abs(x).max() < 1e9 for x in parts))
    check(e, terms)


@settings(max_examples=150)
@given(EXPRESSIONS)
def test_whatever_splits_adds_up(e: Expr) -> None:
    assume(np.isfinite(value(e)).all() and np.abs(value(e)).max() < 1e6)
    try:
        varying, moving = split_sum(e, SCOPE)
    except Nonseparable:
        return
    parts = [x for x in (varying, moving) if x is not None]
    assume(all(np.abs(value(x)).max() < 1e9 for x in parts))
    np.testing.assert_allclose(sum(map(value, parts)), value(e), rtol=1e-8, atol=1e-6)
    assert varying is None or not SCOPE.moves(varying)
    assert moving is None or J not in free_axes(moving)


@settings(max_examples=150)
@given(EXPRESSIONS)
def test_non_negative_is_right(e: Expr) -> None:
    if non_negative(e, frozenset(["a0", "a1"])):
        now = value(e)
        assert (now[~np.isnan(now)] >= 0).all(), expr_text(e)


NON_NEGATIVE = {
    "exp": (o("exp", f), True),
    "square by mul": (o("mul", f, f), True),
    "product": (o("mul", f, g), False),
    "abs": (o("abs", f), True),
    "known reference": (a0, True),
    "unknown reference": (m0, False),
    "sum of exps": (o("add", o("exp", f), o("abs", g)), True),
    "difference": (o("sub", o("exp", f), o("abs", g)), False),
    "max with 0": (o("max", f, ZERO), True),
    "min with 0": (o("min", f, ZERO), False),
    "select": (select(causal, o("exp", f), ZERO), True),
    "select with a load": (select(causal, f, ZERO), False),
    "load": (p, False),
    "negative": (n(-1.0), False),
}


@pytest.mark.parametrize("name", NON_NEGATIVE)
def test_non_negative(name: str) -> None:
    e, want = NON_NEGATIVE[name]
    assert non_negative(e, frozenset(["a0", "a1"])) is want


STABLE = {
    "maximum": (m0, True),
    "mean": (mean, True),
    "logarithm": (o("log", a0), True),
    "log-sum-exp": (o("add", m0, o("log", a0)), True),
    "bare sum": (a0, False),
    "product of sums": (o("mul", a0, a1), False),
    "mean squared": (o("mul", mean, mean), True),
    "sum by a count": (o("div", a0, n(11.0)), False),
    "product over product": (o("div", o("mul", a0, a1), o("mul", a1, a1)), True),
    "sum plus a constant": (o("add", a0, n(1.0)), False),
    "difference of means": (o("sub", mean, o("div", a1, a0)), True),
}


@pytest.mark.parametrize("name", STABLE)
def test_stable(name: str) -> None:
    e, want = STABLE[name]
    assert stable(e, SCOPE) is want


# --- the laws, end to end: a reduction streamed tile by tile is the reduction -----------------------------------


def over(kind: str, body: Expr) -> Expr:
    return reduce(kind, J, body, "f64")


peak = over("max", o("mul", f, h))
score = o("mul", f, h)
e_score = o("exp", o("sub", score, peak))
total = over("sum", e_score)
lse = o("add", peak, o("log", total))
average = over("sum", o("mul", o("div", e_score, total), g))
LAWS: dict[str, tuple[Expr, int]] = {
    "factors hoist out of a sum": (over("sum", o("mul", o("mul", f, h), w)), 1),
    "max(a + b) = max a + b": (over("max", o("add", g, peak)), 1),
    "min(a + b) = min a + b": (over("min", o("sub", g, peak)), 1),
    "max(h f) = h max f, h >= 0": (over("max", o("mul", g, o("exp", peak))), 1),
    "max(f / h)": (over("max", o("div", e_score, total)), 1),
    "max(exp u) = exp(max u)": (over("max", e_score), 1),
    "min(exp u) = exp(min u)": (over("min", e_score), 1),
    "max(h f), h of unknown sign": (over("max", o("mul", g, peak)), 2),
    "softmax": (over("sum", o("mul", o("div", e_score, total), g)), 1),
    "log-sum-exp": (lse, 1),
    "entropy": (over("sum", o("mul", o("exp", o("sub", score, lse)), o("sub", score, lse))), 1),
    "variance under the weights": (
        over("sum", o("mul", o("div", e_score, total), o("pow", o("sub", g, average), n(2.0)))),
        1,
    ),
    "variance": (over("sum", o("pow", o("sub", score, o("div", over("sum", score), n(11.0))), n(2.0))), 2),
    "covariance": (
        over("sum", o("mul", o("div", e_score, total), o("mul", o("sub", f, average), o("sub", g, average)))),
        1,
    ),
    "masked softmax": (
        over("sum", o("mul", o("exp", o("sub", select(causal, f, LOW), over("max", select(causal, f, LOW)))), g)),
        1,
    ),
    "weights twice": (over("sum", o("mul", o("div", e_score, total), o("div", e_score, total))), 1),
    "tanh of a normalised score": (over("sum", o("mul", o("tanh", o("div", score, total)), g)), 2),
    "thresholded by the mean": (
        over("sum", select(op("gt", score, average, dtype="bool"), g, ZERO)),
        2,
    ),
    "any": (select(reduce("any", J, op("gt", score, n(1.0), dtype="bool"), "bool"), total, peak), 1),
    "gate on a final value": (
        over("sum", select(op("gt", total, n(3.0), dtype="bool"), o("mul", g, peak), ZERO)),
        None,
    ),
    "positive power": (over("sum", o("pow", o("div", e_score, total), n(3.0))), 1),
    "two maxima": (over("sum", o("add", e_score, o("exp", o("sub", g, over("max", g))))), 1),
}


@pytest.mark.parametrize("name", LAWS)
def test_streamed_equals_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in the number of loops the laws allow, with tiles of several sides."""
    monkeypatch.setattr(covered, "MAX_COVERED", 0)
    monkeypatch.setattr(cut, "MAX_COVERED", 0)
    e, passes = LAWS[name]
    fused = Fused((Output("out", (ROWS,), "f64", e),))
    loops, stores, notes = stream.stream(fused, "f64")
    plan = build_plan(stream.parallel_axes(fused), loops, stores, notes, "f64", HOPPER)
    verify_plan(plan)
    want = np.broadcast_to(_Evaluator(KNOWN).at(e, (ROWS,)), (3,))
    for side in (1, 3, 4, 16):
        got = PlanRun(plan, KNOWN, side=side).run()["out"]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12, err_msg=f"side {side}\n{plan_text(plan)}")
    assert passes is None or len(plan.loops) == passes, plan_text(plan)
    if passes == 2:
        assert any("takes another pass" in note for note in plan.notes)


@pytest.mark.parametrize("scale", [1.0, 300.0, 3000.0])
def test_exponents_never_overflow(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ exp(f - lse)·g stays finite, whatever tile the largest f is in."""
    monkeypatch.setattr(covered, "MAX_COVERED", 0)
    fused = Fused((Output("out", (ROWS,), "f64", over("sum", o("mul", o("exp", o("sub", f, lse_of())), g))),))
    known = {**KNOWN, "f": KNOWN["f"] * scale}
    loops, stores, notes = stream.stream(fused, "f64")
    plan = build_plan(stream.parallel_axes(fused), loops, stores, notes, "f64", HOPPER)
    weights = np.exp(known["f"] - known["f"].max())
    want = (weights * known["g"]).sum() / weights.sum()
    for side in (1, 4):
        got = PlanRun(plan, known, side=side).run()["out"]
        np.testing.assert_allclose(got, np.full(3, want), rtol=1e-9, err_msg=plan_text(plan))


def lse_of() -> Expr:
    top = over("max", f)
    return o("add", top, o("log", over("sum", o("exp", o("sub", f, top)))))


def test_a_term_is_what_its_fields_say() -> None:
    """`recombined` itself, on a term made by hand."""
    t = Term(a0, exponent=f, offset=m0, factors=(g,), gates=(positive_row,))
    by_hand = HELD["a0"] * np.exp(KNOWN["f"] + HELD["m0"]) * KNOWN["g"] * (HELD["m0"] > 0)
    np.testing.assert_allclose(recombined(t), by_hand)
