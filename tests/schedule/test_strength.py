"""What an element of a tile costs, taken out of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.build import cast, op
from fl_pallas.schedule.expr import Axis, Expr, Op, const, free_axes, index, load, walk
from fl_pallas.schedule.passes.strength import by_element
from fl_pallas.schedule.plan import Accumulator, Loop
from fl_pallas.schedule.program import Value
from fl_pallas.schedule.text import plan_text
from tests.evaluate import evaluate_value
from tests.oracle import run_and_check
from tests.plan_evaluate import captured

HEAD, ROW, COLUMN = Axis("h", 2), Axis("i", 7), Axis("j", 5)


def cheaper(e: Expr) -> Expr:
    """`e` as an update of a loop, after the pass."""
    (loop,) = by_element([Loop(COLUMN, (Accumulator("a0", "sum", (ROW,), e, "f32", None),))])
    (step,) = loop.steps
    assert isinstance(step, Accumulator)
    return step.update


def conversions(e: Expr) -> list[frozenset[Axis]]:
    """The axes of what is converted."""
    return [free_axes(n) for n in walk(e) if isinstance(n, Op) and n.name == "cast"]


@given(*(st.integers(-9, 9) for _ in range(3)), st.booleans())
def test_floats_of_rows_and_columns(a: int, b: int, c: int, positive: bool) -> None:
    terms = (op("mul", index(x), const(k, "i64"), dtype="i64") for x, k in ((ROW, a), (COLUMN, b)))
    whole = op("add", op("add", *terms, dtype="i64"), const(c, "i64"), dtype="i64")
    written = cast(op("abs", whole, dtype="i64") if positive else whole, "f32")
    made = cheaper(written)
    assert all(len(axes) < 2 for axes in conversions(made))
    before, after = (evaluate_value(Value("x", (ROW, COLUMN), "f32", e), {}) for e in (written, made))
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("extent", [2**23 - 4, 2**23])
def test_floats_only_where_they_are_exact(extent: int) -> None:
    long = Axis("k", extent)
    written = cast(op("sub", index(COLUMN), op("mul", index(long), const(2, "i64"), dtype="i64"), dtype="i64"), "f32")
    assert (cheaper(written) is written) == (extent == 2**23)


@pytest.mark.parametrize("base", [0.96875, 1.0, 1.5, 0.0, -0.875, -2.0, np.inf, -np.inf, np.nan])
def test_powers_of_whole_numbers(base: float) -> None:
    """Of any base, and of negative exponents too; of data in 16 bits."""
    held, beside = load("base", (index(HEAD),), "bf16"), load("x", (index(COLUMN),), "bf16")
    whole = cast(op("sub", index(ROW), index(COLUMN), dtype="i64"), "f32")
    written = op("mul", op("pow", held, whole, dtype="f32"), beside, dtype="f32")
    made = cheaper(written)
    assert not any(isinstance(n, Op) and n.name == "pow" for n in walk(made))
    logarithms = [n for n in walk(made) if isinstance(n, Op) and n.name == "log2"]
    assert [free_axes(n) for n in logarithms] == [{HEAD}]
    operands = {"base": np.array([base, 0.5]), "x": np.ones(COLUMN.extent)}
    with np.errstate(all="ignore"):
        before, after = (evaluate_value(Value("y", (HEAD, ROW, COLUMN), "f32", e), operands) for e in (written, made))
    np.testing.assert_allclose(after, before, rtol=1e-12)


def test_powers_that_stay() -> None:
    """Of exponents from memory; and where all is in 32 bits."""
    whole = cast(op("sub", index(ROW), index(COLUMN), dtype="i64"), "f32")
    for kind, exponent in (("bf16", load("x", (index(COLUMN),), "bf16")), ("f32", whole)):
        written = op("pow", load("base", (index(HEAD),), kind), exponent, dtype="f32")
        assert any(isinstance(n, Op) and n.name == "pow" for n in walk(cheaper(written)))


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i = torch.arange(q.shape[1], device=q.device)
    return (q @ k.mT * 0.3 + slopes[:, None, None] * (i - i[:, None])).softmax(-1) @ v


def distance_on_the_left(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i = torch.arange(q.shape[1], device=q.device)
    return ((i - i[:, None]).abs() * slopes[:, None, None] - q @ k.mT * 0.3).softmax(-1) @ v


def two_products(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + slopes[:, None, None] * (k @ q.mT)).softmax(-1) @ v


@pytest.mark.parametrize("fn", [alibi, distance_on_the_left, two_products])
@pytest.mark.parametrize("sign", [1, -1])
def test_factors_go_to_the_exponent(fn: Callable[..., Tensor], sign: int, device: torch.device) -> None:
    inputs = [torch.randn(2, 45, 16, device=device) for _ in range(3)] + [sign * torch.rand(2, device=device)]
    text = "\n".join(plan_text(p) for plans in captured(fn, inputs).made.kernels for p in plans)
    assert re.search(r"arg\d_1\[x0\] \* -?3\.33", text), text
    run_and_check(fn, fl.compile(fn), inputs)


def test_masks_keep_their_factors(device: torch.device) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.3 + (1 - mask) * -1e9).softmax(-1) @ v

    inputs = [torch.randn(2, 45, 16, device=device) for _ in range(3)] + [torch.zeros(45, 45, device=device)]
    inputs[3][:, ::2] = 1
    inputs[3][7] = 0
    run_and_check(masked, fl.compile(masked), inputs)


@pytest.mark.parametrize("power", [-3, -1.5, 0.5, 2.5, 8])
def test_powers_are_products(power: float, device: torch.device) -> None:
    """Of a root, where nothing is negative (of -inf it would be NaN); 0 among the bases, as a point's own distance."""

    def potential(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return ((x[:, None] - y).square().sum(-1) ** power).clamp(max=1e3) @ v

    x, y = torch.randn(40, 3, device=device), torch.randn(45, 3, device=device)
    y[7] = x[3]
    inputs = [x, y, torch.randn(45, 4, device=device)]
    text = "\n".join(plan_text(p) for plans in captured(potential, inputs).made.kernels for p in plans)
    assert "store" in text and "pow" not in text, text
    run_and_check(potential, fl.compile(potential), inputs)


@pytest.mark.parametrize("power", [0.5, -1.5, 3])
def test_powers_of_anything_are_pytorchs(power: float, device: torch.device) -> None:
    def power_of_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        p = (q @ k.mT + mask) ** power
        return torch.where(p.isfinite(), p, p.isnan() * 2.0).clamp(-1e3, 1e3) @ v

    # Whole numbers, whose products are exact: a power would show their rounding.
    q, k = (torch.randint(-2, 3, (40, 16), device=device).float() for _ in range(2))
    inputs = [q, k, torch.randn(40, 16, device=device), torch.zeros(40, 40, device=device)]
    inputs[3][:, ::5] = float("-inf")
    run_and_check(power_of_scores, fl.compile(power_of_scores), inputs)


CUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor": lambda a, b: ((a - b) / 7).floor().long() % 2 == 0,
    "ceil": lambda a, b: ((a - b) / 7).ceil() % 2 == 0,
    "floor of float": lambda a, b: (a - b).float() // 7 % 2 == 0,
    "remainder": lambda a, b: (a - b).float() % 7 == 0,
    "cast": lambda a, b: ((a - b) / 7).long() % 2 == 0,
    "compared": lambda a, b: a / 7 >= b / 7 + 1,
    "by a tensor": lambda a, b: ((a - b).float() / (b % 5 + 3).float()).floor() % 2 == 0,
}


@pytest.mark.parametrize("of", ["positions", "data"])
@pytest.mark.parametrize("cut", [pytest.param(f, id=name) for name, f in CUTS.items()])
def test_whole_quotients_are_cut_as_they_are(
    cut: Callable[[Tensor, Tensor], Tensor], of: str, device: torch.device
) -> None:
    """Seven times a rounded seventh may be less than one, and a block of keys begin too late."""

    def masked(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if of == "positions":
            a = b = torch.arange(q.shape[-2], device=q.device)
        return (q @ k.mT).masked_fill(~cut(a[:, None], b[None]), -9.0).softmax(-1) @ v

    i = torch.arange(129, device=device)
    operands = [torch.randn(1, 1, 129, 8, device=device) for _ in range(3)]
    run_and_check(masked, fl.compile(masked, fallback="error"), [*operands, i * 3 % 128, i])
