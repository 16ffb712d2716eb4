"""Index expressions as `build.op` simplifies them, against plain arithmetic on every index value."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_pallas.schedule.build import negate, op, select, substitute
from fl_pallas.schedule.expr import Axis, Expr, const, free_axes, index
from fl_pallas.schedule.integer import bounds
from fl_pallas.schedule.text import expr_text
from tests.evaluate import _Evaluator
from tests.terms import i64

AXES = (Axis("i", 7), Axis("j", 12), Axis("b", 2), Axis("one", 1))
GRID = np.indices([a.extent for a in AXES])
Pair = tuple[Expr, np.ndarray]

INFIX: dict[str, Callable] = {"add": operator.add, "sub": operator.sub, "max": np.maximum, "min": np.minimum}
COMPARE: dict[str, Callable] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne
}  # fmt: skip


def constant(n: int) -> Pair:
    return const(n, "i64"), np.full(GRID.shape[1:], n)


LEAVES = st.one_of(
    st.sampled_from([(index(a), GRID[n]) for n, a in enumerate(AXES)]), st.integers(-20, 20).map(constant)
)


def grow(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    positive = st.integers(1, 9)

    def infix(name: str, a: Pair, b: Pair) -> Pair:
        return i64(name, a[0], b[0]), INFIX[name](a[1], b[1])

    def chosen(c: Pair, a: Pair, b: Pair) -> Pair:
        return select(c[0], a[0], b[0]), np.where(c[1], a[1], b[1])

    def scaled(a: Pair, n: int, left: bool) -> Pair:
        args = (const(n, "i64"), a[0]) if left else (a[0], const(n, "i64"))
        return i64("mul", *args), a[1] * n

    return st.one_of(
        st.builds(infix, st.sampled_from(list(INFIX)), inner, inner),
        st.builds(lambda a: (i64("neg", a[0]), -a[1]), inner),
        st.builds(lambda a: (i64("abs", a[0]), np.abs(a[1])), inner),
        st.builds(lambda a, b: (i64("mul", a[0], b[0]), a[1] * b[1]), inner, inner),
        st.builds(scaled, inner, st.integers(-4, 9), st.booleans()),
        st.builds(lambda a, n: (i64("floordiv", a[0], const(n, "i64")), a[1] // n), inner, positive),
        st.builds(lambda a, n: (i64("mod", a[0], const(n, "i64")), a[1] % n), inner, positive),
        st.builds(chosen, conditions(inner), inner, inner),
    )


def conditions(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    def compared(name: str, a: Pair, b: Pair) -> Pair:
        return op(name, a[0], b[0], dtype="bool"), COMPARE[name](a[1], b[1])

    return st.builds(compared, st.sampled_from(list(COMPARE)), inner, inner)


INTEGERS = st.recursive(LEAVES, grow, max_leaves=8)


def value(e: Expr) -> np.ndarray:
    return np.broadcast_to(_Evaluator({}).at(e, AXES), GRID.shape[1:])


def check(pair: Pair) -> None:
    e, want = pair
    np.testing.assert_array_equal(value(e), want, err_msg=expr_text(e))
    span = bounds(e)
    if span is not None:
        assert span[0] <= want.min() and want.max() <= span[1], f"{expr_text(e)} is said to lie in {span}"


@given(INTEGERS)
def test_integers(pair: Pair) -> None:
    check(pair)


@given(conditions(INTEGERS))
def test_conditions(pair: Pair) -> None:
    check(pair)
    check((negate(pair[0]), ~pair[1]))


@given(conditions(INTEGERS), conditions(INTEGERS), st.sampled_from(["and", "or"]))
def test_connectives(a: Pair, b: Pair, name: str) -> None:
    want = a[1] & b[1] if name == "and" else a[1] | b[1]
    check((op(name, a[0], b[0], dtype="bool"), want))
    check((negate(op(name, a[0], b[0], dtype="bool")), ~want))


@given(INTEGERS, st.sampled_from(AXES[:2]), st.integers(-3, 3), st.integers(0, 5))
def test_substitution(pair: Pair, axis: Axis, slope: int, shift: int) -> None:
    """Replacing an index is evaluating elsewhere (here: at an index in range, so arrays can tell)."""
    moved = i64(
        "mod", i64("add", i64("mul", index(axis), const(slope, "i64")), const(shift, "i64")), const(axis.extent, "i64")
    )
    at = np.moveaxis(pair[1], AXES.index(axis), 0)[(np.arange(axis.extent) * slope + shift) % axis.extent]
    check((substitute(pair[0], {axis: moved}), np.moveaxis(at, 0, AXES.index(axis))))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 40))
def test_views_leave_no_trace(rows: int, columns: int, shift: int) -> None:
    """Splitting a flat index and joining it again gives the index back: no division stays."""
    flat = Axis("n", rows * columns)
    n, w = index(flat), const(columns, "i64")
    joined = i64("add", i64("mul", i64("floordiv", n, w), w), i64("mod", n, w))
    assert joined is n
    i, j = index(Axis("i", rows)), index(Axis("j", columns))
    address = i64("add", i64("mul", i, w), j)
    assert i64("floordiv", address, w) is i
    assert i64("mod", address, w) is j
    back = i64("sub", i64("add", address, const(shift, "i64")), const(shift, "i64"))
    assert back is address


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(0, 5), st.integers(0, 30))
def test_heads_and_features_come_apart(batch: int, heads: int, features: int, first: int, more: int) -> None:
    """Heads of a batch with features from `first` on: the quotient by all features of a member is of the head alone."""
    side = features + first
    h, f = Axis("h", batch * heads), Axis("f", features)
    at = i64("add", i64("mul", index(h), const(side, "i64")), i64("add", index(f), const(first + more * side, "i64")))
    whole = const(heads * side, "i64")
    quotient, rest = i64("floordiv", at, whole), i64("mod", at, whole)
    assert f not in free_axes(quotient)
    hs, fs = np.arange(h.extent)[:, None], np.arange(f.extent)
    expected = hs * side + fs + first + more * side
    for made, wanted in ((quotient, expected // (heads * side)), (rest, expected % (heads * side))):
        for a in range(h.extent):
            for b in range(f.extent):
                known = substitute(made, {h: const(a, "i64"), f: const(b, "i64")})
                assert known is const(int(wanted[a, b]), "i64")


@pytest.mark.parametrize("name", COMPARE)
def test_decided_comparisons_fold(name: str) -> None:
    """A comparison that bounds decide is a constant: masks out of reach disappear."""
    i = index(AXES[0])
    for limit in (-1, 7, 100):
        made = op(name, i, const(limit, "i64"), dtype="bool")
        assert not free_axes(made), expr_text(made)
        np.testing.assert_array_equal(value(made), COMPARE[name](GRID[0], limit))
