"""Masks that heads share, and that take more than a load, are told once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.passes import stored_masks, unfused
from tests.masked import Mask, attention
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

LENGTH = 150


@pytest.fixture(autouse=True)
def masks_of_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_masks, "LAUNCH", 0)
    monkeypatch.setattr(stored_masks, "CLEARLY", 1)
    monkeypatch.setattr(unfused, "COST", float("inf"))


def best() -> Tensor:
    """The keys that an indexer has picked for each query of a batch, itself first."""
    found = torch.randint(0, LENGTH, (2, 1, LENGTH, 12))
    found[..., 0] = torch.arange(LENGTH)
    return found


PATTERNS: dict[str, tuple[Mask, Callable[[], tuple[Tensor, ...]]]] = {
    "picked keys": (
        lambda i, j, p: torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool, device=p.device).scatter(-1, p, True)
        & (j <= i),
        lambda: (best(),),
    ),
    "rings by a logarithm": (lambda i, j: ((i - j).abs() + 1).float().log2().floor() % 3 != 1, tuple),
    "powers, and a sink": (lambda i, j: (1.5 ** ((i % 16) - (j % 16)).abs().float() < 12) | (j == 0), tuple),
}  # fmt: skip


def inputs_of(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    qkv = (torch.randn(2, 4, LENGTH, 16, dtype=dtype) for _ in range(3))
    return tuple(t.to(device) for t in (*qkv, *PATTERNS[name][1]()))


@pytest.mark.parametrize("hidden", [float("-inf"), -1e9])
@pytest.mark.parametrize("name", PATTERNS)
def test_results(name: str, hidden: float, device: torch.device) -> None:
    fn, inputs = attention(PATTERNS[name][0], hidden), inputs_of(name, torch.float32, device)
    first, *_, last = explain(fn, *inputs).kernels
    assert [(s.name, s.dtype) for s in first.stores] == [("r0_m0", "bool")]
    assert any("is told once, by r0_m0" in note for note in last.notes)
    run_and_check(fn, fl.compile(fn), inputs, name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    fn, inputs = attention(PATTERNS[name][0]), inputs_of(name, dtype, device)
    check_gradients(fn, fl.compile(fn), inputs, name=name)


@pytest.mark.parametrize(
    "mask",
    [lambda i, j: (j <= i) & (i - j < 40), lambda i, j: i % 3 == j % 3, lambda i, j: (i.float().exp() < 9) | (j < i)],
)
def test_what_a_load_would_not_beat(mask: Mask) -> None:
    """Comparisons of positions, and what is told of rows alone."""
    kernels = explain(attention(mask), *inputs_of("powers, and a sink", torch.float32, torch.device("cpu"))).kernels
    assert not any(s.name.startswith("r0_m") for k in kernels for s in k.stores)


def test_where_data_bounds_the_loop() -> None:
    """A batch whose documents bound its loops tells the same mask as others do."""
    powers = PATTERNS["powers, and a sink"][0]
    fn = attention(lambda i, j, d: powers(i, j) & (d[:, None, :, None] == d[:, None, None, :]))
    documents = torch.arange(8 * 1024).view(8, -1) // 300
    *_, last = explain(fn, *(torch.randn(8, 1, 1024, 16) for _ in range(3)), documents).kernels
    assert any("is told once, by r0_m0" in note for note in last.notes)
