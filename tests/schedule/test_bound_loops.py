"""Loop bounds from masks: nothing that counts lies outside of them, and the plain masks get exact ones."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_pallas.schedule.build import cast, negate, op, reduce, select
from fl_pallas.schedule.expr import Axis, Expr, Op, const, free_axes, index, load, ref
from fl_pallas.schedule.passes.bound_loops import bound_loop, solve
from fl_pallas.schedule.passes.contributes import contributes
from fl_pallas.schedule.plan import Accumulator, Loop
from fl_pallas.schedule.text import expr_text
from tests.plan_evaluate import TileEvaluator
from tests.terms import i64, is_, n

B, ROWS, J = Axis("b", 3), Axis("i", 37), Axis("j", 41)
SCOPE = (B, ROWS, J)
TILED = frozenset([ROWS])
KNOWN = {
    "lengths": np.array([1, 17, 41]),
    "q_ids": np.arange(3 * 37).reshape(3, 37) // 11,
    "k_ids": np.arange(3 * 41).reshape(3, 41) // 13,
    "x": np.linspace(-1, 1, 41),
}
i, j, b = index(ROWS), index(J), index(B)
HELD = {"m0": np.full((1, 37, 1), 0.5)}


def both(a: Expr, c: Expr) -> Expr:
    return op("and", a, c, dtype="bool")


def either(a: Expr, c: Expr) -> Expr:
    return op("or", a, c, dtype="bool")


def lengths() -> Expr:
    return load("lengths", (b,), "i64")


distance = i64("sub", i, j)
causal = is_("le", j, i)
MASKS: dict[str, Expr] = {
    "causal": causal,
    "anticausal": is_("lt", i, j),
    "causal with an offset": is_("le", j, i64("add", i, n(4))),
    "causal with a negative offset": is_("le", j, i64("sub", i, n(6))),
    "causal by a float": is_("ge", cast(distance, "bf16"), const(0.0, "bf16")),
    "window by a float": is_("lt", cast(i64("abs", distance), "bf16"), const(9.0, "bf16")),
    "window": both(causal, is_("lt", distance, n(9))),
    "window, abs": is_("le", i64("abs", distance), n(5)),
    "window, abs turned": is_("gt", n(5), i64("abs", i64("sub", j, i))),
    "outside of a window": is_("gt", i64("abs", distance), n(5)),
    "prefix": is_("lt", j, n(7)),
    "prefix or causal": either(causal, is_("lt", j, n(7))),
    "suffix": is_("ge", j, n(30)),
    "blocks": is_("eq", i64("floordiv", i, n(8)), i64("floordiv", j, n(8))),
    "other blocks": is_("ne", i64("floordiv", i, n(8)), i64("floordiv", j, n(8))),
    "blocks of two sizes": is_("ge", i64("floordiv", i, n(5)), i64("floordiv", i64("add", j, n(2)), n(7))),
    "blocks, abs": is_("le", i64("abs", i64("sub", i64("floordiv", i, n(6)), i64("floordiv", j, n(6)))), n(1)),
    "blocks and causal": both(is_("eq", i64("floordiv", i, n(8)), i64("floordiv", j, n(8))), causal),
    "dilated": is_("eq", i64("mod", distance, n(3)), n(0)),
    "lengths": is_("lt", j, lengths()),
    "lengths from the end": is_("ge", j, i64("sub", n(41), lengths())),
    "lengths and causal": both(is_("lt", j, lengths()), causal),
    "lengths of queries": is_("lt", i, lengths()),
    "documents": is_("eq", load("q_ids", (b, i), "i64"), load("k_ids", (b, j), "i64")),
    "documents and causal": both(is_("eq", load("q_ids", (b, i), "i64"), load("k_ids", (b, j), "i64")), causal),
    "steep": is_("le", i64("mul", j, n(3)), i),
    "flat": is_("le", j, i64("mul", i, n(3))),
    "falling": is_("lt", i64("add", i, j), n(30)),
    "scaled falling": is_("lt", i64("add", i64("mul", i, n(2)), i64("mul", j, n(3))), n(60)),
    "equal": is_("eq", i, j),
    "equal, scaled": is_("eq", i64("mul", i, n(2)), j),
    "middle": is_("eq", j, i64("floordiv", i, n(2))),
    "largest": is_("le", j, i64("max", i, n(12))),
    "least": is_("le", j, i64("min", i, n(12))),
    "not causal": negate(causal),
    "neither": negate(either(causal, is_("ge", j, n(35)))),
    "not both": negate(both(causal, is_("lt", distance, n(9)))),
    "never": is_("gt", j, n(100)),
    "always": is_("lt", j, n(100)),
    "data": is_("gt", load("x", (j,), "f32"), const(0.0, "f32")),
    "data and causal": both(is_("gt", load("x", (j,), "f32"), const(0.0, "f32")), causal),
    "causal whatever its length": either(causal, is_("lt", j, lengths())),
}


@dataclass(frozen=True)
class Bounds:
    """Solved bounds of one tile and batch entry, and the indices that count: (first, one past the last)."""

    low: int
    high: int
    first: int | None
    last: int | None


def check(condition: Expr, side: int, solved: tuple[Expr | None, Expr | None] | None = None) -> list[Bounds]:
    """Assert that the bounds of every tile hold all that count."""
    lower, upper = solve(condition, J, TILED) if solved is None else solved
    shape = tuple(a.extent for a in SCOPE)
    true = np.broadcast_to(TileEvaluator(KNOWN, HELD).at(condition, SCOPE), shape)
    out = []
    for e in (lower, upper):
        assert e is None or free_axes(e) <= {B}, expr_text(e)
    for start in range(0, ROWS.extent, side):
        stop = min(start + side, ROWS.extent)
        ends = {"i.first": np.full((1,), start), "i.last": np.full((1,), stop - 1)}
        low, high = (
            np.broadcast_to(default if e is None else TileEvaluator(KNOWN, ends).at(e, (B,)), (B.extent,))
            for e, default in ((lower, 0), (upper, J.extent))
        )
        for batch in range(B.extent):
            counts = np.flatnonzero(true[batch, start:stop].any(axis=0))
            first, last = (int(counts[0]), int(counts[-1]) + 1) if len(counts) else (None, None)
            rows = f"rows {start}..{stop - 1} of {batch}"
            message = f"{expr_text(condition)}: {rows}: {low[batch]}..{high[batch]}, counted {counts}"
            if first is not None and last is not None:
                assert low[batch] <= first and last <= high[batch], message
            clipped = [int(np.clip(x[batch], 0, J.extent)) for x in (low, high)]
            out.append(Bounds(clipped[0], clipped[1], first, last))
    return out


@pytest.mark.parametrize("side", [1, 4, 16, 64])
@pytest.mark.parametrize("name", MASKS)
def test_nothing_that_counts_is_skipped(name: str, side: int) -> None:
    check(MASKS[name], side)


TIGHT = (
    "causal", "anticausal", "causal with an offset", "causal with a negative offset", "causal by a float",
    "window by a float", "window", "window, abs", "window, abs turned", "prefix", "suffix", "blocks", "lengths",
    "lengths from the end", "steep", "flat", "falling", "scaled falling", "equal", "not causal", "never", "always",
    "middle", "least", "largest",
)  # fmt: skip


@pytest.mark.parametrize("side", [1, 4, 16])
@pytest.mark.parametrize("name", TIGHT)
def test_plain_masks_get_exact_bounds(name: str, side: int) -> None:
    exact = 0
    for found in check(MASKS[name], side):
        if found.first is None:
            assert found.high <= found.low, f"{name}: an empty tile runs over {found.low}..{found.high}"
        else:
            assert (found.low, found.high) == (found.first, found.last), name
            exact += 1
    assert exact or name == "never"


def test_floats_that_round_are_compared() -> None:
    """300 and 301 are one number in bfloat16; half of one is not whole."""
    for limit in (300.0, 0.5):
        test = is_("ge", cast(distance, "bf16"), const(limit, "bf16"))
        assert isinstance(test, Op) and test.args[0].dtype == "bf16"


def test_bounds_of_a_prefix_or_causal() -> None:
    """A disjunction takes the wider of the two."""
    for found in check(MASKS["prefix or causal"], 4):
        assert (found.low, found.high) == (found.first, found.last)


NUMBERS = st.integers(-12, 50)
POSITIVE = st.integers(1, 9)


def affine(axis: Axis) -> st.SearchStrategy[Expr]:
    x = index(axis)
    plain = st.builds(lambda k, c: i64("add", i64("mul", x, n(k)), n(c)), st.sampled_from([1, 1, 1, 2, 3, -1]), NUMBERS)
    return st.one_of(st.just(x), plain, st.builds(lambda e, w: i64("floordiv", e, n(w)), plain, POSITIVE))


RELATIONS: dict[str, Callable] = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
OTHERS = st.one_of(
    affine(ROWS), affine(ROWS), NUMBERS.map(n), st.just(lengths()),
    st.builds(lambda a, c: i64("max", a, n(c)), affine(ROWS), NUMBERS), st.just(load("q_ids", (b, i), "i64")),
)  # fmt: skip
SUMS = st.builds(lambda name, a, c: i64(name, a, c), st.sampled_from(["sub", "add"]), affine(J), OTHERS)
LEAVES = st.one_of(
    st.builds(is_, st.sampled_from([*RELATIONS, "eq", "ne"]), affine(J), OTHERS),
    st.builds(is_, st.sampled_from([*RELATIONS, "eq", "ne"]), SUMS, NUMBERS.map(n)),
    st.builds(lambda name, e, c: is_(name, i64("abs", e), n(c)), st.sampled_from([*RELATIONS, "eq"]), SUMS, NUMBERS),
    st.builds(lambda e, w, c: is_("eq", i64("mod", e, n(w)), n(c)), SUMS, POSITIVE, st.integers(0, 3)),
)
CONDITIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(both, inner, inner),
        st.builds(either, inner, inner),
        st.builds(negate, inner),
        st.builds(select, inner, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=200)
@given(CONDITIONS, st.sampled_from([1, 8, 64]))
def test_any_mask(condition: Expr, side: int) -> None:
    check(condition, side)


# --- what counts --------------------------------------------------------------------------------

X = load("x", (j,), "f32")
Z, MINUS, PLUS = const(0.0, "f32"), const(-np.inf, "f32"), const(np.inf, "f32")


def f32(name: str, *args: Expr) -> Expr:
    return op(name, *args, dtype="f32")


masked = select(causal, X, MINUS)
m0 = ref("m0", (ROWS,), "f32")
guarded = select(op("eq", m0, MINUS, dtype="bool"), Z, m0)
UPDATES: dict[str, tuple[str, Expr]] = {
    "max of a masked score": ("max", masked),
    "max, mask inverted": ("max", select(negate(causal), MINUS, X)),
    "max of a scaled one": ("max", f32("mul", masked, const(2.0, "f32"))),
    "max with a mask added": ("max", f32("add", X, select(causal, Z, MINUS))),
    "min": ("min", select(causal, X, PLUS)),
    "min of a difference": ("min", f32("sub", X, select(causal, Z, MINUS))),
    "sum of weights": ("sum", f32("exp", f32("sub", masked, guarded))),
    "weighted sum": ("sum", f32("mul", f32("exp", f32("sub", masked, guarded)), X)),
    "gated": ("sum", select(causal, f32("mul", X, X), Z)),
    "0 or 1": ("sum", f32("mul", X, select(causal, const(1.0, "f32"), Z))),
    "any": ("any", both(causal, is_("gt", X, Z))),
}


@pytest.mark.parametrize("name", UPDATES)
def test_masks_are_found(name: str) -> None:
    """Each spelling of a causal mask gives the causal bound, and outside of it nothing counts."""
    kind, update = UPDATES[name]
    condition = contributes(update, kind)
    loop = bound_loop(Loop(J, (Accumulator("s0", kind, (ROWS,), update, "f32", None),)), TILED)
    check(condition, 4, (loop.lower, loop.upper))
    found = check(causal, 4, (loop.lower, loop.upper))
    assert all((f.low, f.high) == (f.first, f.last) for f in found), expr_text(condition)


@pytest.mark.parametrize("name", UPDATES)
def test_what_does_not_count_is_the_identity(name: str) -> None:
    kind, update = UPDATES[name]
    identity = {"max": -np.inf, "min": np.inf, "sum": 0.0, "any": False}[kind]
    shape = tuple(a.extent for a in SCOPE)
    with np.errstate(invalid="ignore"):
        values = np.broadcast_to(TileEvaluator(KNOWN, HELD).at(update, SCOPE), shape)
    counts = np.broadcast_to(TileEvaluator(KNOWN, HELD).at(contributes(update, kind), SCOPE), shape)
    assert (values[~counts] == identity).all()


def test_nan_of_an_infinite_reference_is_kept() -> None:
    """exp(-inf - m) is no 0 where m is -inf: a row that is masked whole must run, to become NaN as in PyTorch. So the
    bounds hold where no row's is."""
    update = f32("exp", f32("sub", masked, m0))
    loop = bound_loop(Loop(J, (Accumulator("a0", "sum", (ROWS,), update, "f32", None),)), TILED)
    assert loop.upper is not None and loop.finite == ("m0",)


def test_one_unmasked_step_takes_the_bounds_away() -> None:
    steps = (
        Accumulator("m0", "max", (ROWS,), masked, "f32", None),
        Accumulator("a0", "sum", (ROWS,), X, "f32", None),
    )
    loop = bound_loop(Loop(J, steps), TILED)
    assert loop.lower is None and loop.upper is None


def test_all_and_prod_are_not_bounded() -> None:
    for kind in ("all", "prod"):
        update = causal if kind == "all" else select(causal, X, const(1.0, "f32"))
        loop = bound_loop(Loop(J, (Accumulator("s0", kind, (ROWS,), update, "f32", None),)), TILED)
        assert loop.upper is None


def test_a_reduction_inside_of_a_step_bounds_no_loop() -> None:
    """Its index is no place that the tile has; `masked` under it lets some of its terms through, and others not."""
    within = reduce("sum", ROWS, f32("mul", select(causal, Z, X), X), "f32")
    loop = bound_loop(Loop(J, (Accumulator("a0", "sum", (B,), f32("mul", within, X), "f32", None),)), frozenset([B]))
    assert (loop.lower, loop.upper, loop.interior) == (None, None, None)
