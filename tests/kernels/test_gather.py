"""Sheared products: each element takes its place of a product of matrices over a window of positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels import tile
from fl_pallas.kernels.cubin import compile_ttir, simplified
from tests.kernels.test_cubins import kernels_of
from tests.oracle import run_and_check


def by_queries(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """r [2s, d]: a vector for each distance."""
    s = torch.arange(q.shape[-2])
    distances = s - s[:, None] + q.shape[-2]
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, r[distances])
    return torch.softmax(scores / 4, -1) @ v


def by_keys(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    s = torch.arange(q.shape[-2])
    distances = s[:, None] - s + q.shape[-2]
    scores = q @ k.mT + torch.einsum("bhjd,ijd->bhij", k, r[distances])
    return torch.softmax(scores / 4, -1) @ v


def by_sums(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Positions i + j, that only a causal mask keeps inside of the table."""
    s = torch.arange(q.shape[-2])
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, r[s[:, None] + s])
    return torch.softmax(scores.masked_fill(s > s[:, None], -torch.inf) / 4, -1) @ v


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what elements are gathered from."""
    found: list[tuple[int, ...]] = []
    plain = tile.gather

    def noted(x: torch.Tensor, *rest: object) -> object:
        found.append(x.shape)
        return plain(x, *rest)

    monkeypatch.setattr(tile, "gather", noted)
    return found


@pytest.mark.parametrize("fn", [by_queries, by_keys, by_sums])
@pytest.mark.parametrize("length", [64, 83, 20])
def test_matches(fn: Callable, length: int, gathered: list[tuple[int, ...]]) -> None:
    inputs = [*(torch.randn(1, 2, length, 16) for _ in range(3)), torch.randn(2 * length, 16)]
    run_and_check(fn, fl.compile(fn), inputs)
    assert gathered


def test_other_lengths(gathered: list[tuple[int, ...]]) -> None:
    compiled = fl.compile(by_queries)
    for length in (40, 56, 33):
        inputs = [*(torch.randn(1, 2, length, 16) for _ in range(3)), torch.randn(2 * length, 16)]
        run_and_check(by_queries, compiled, inputs)
    assert gathered


@pytest.mark.parametrize("name", ["xlnet", "transformer_xl"])
def test_in_triton_ir(name: str) -> None:
    ((plan, lower),) = kernels_of(name, torch.bfloat16)
    made = lower(plan)
    assert "elementwise_inline_asm" not in made.ttir and made.ttir.count("tt.gather") >= 1
    cubin = compile_ttir(simplified(made, 90), 90)
    assert "wgmma" in cubin.asm["ptx"] and cubin.stack == 0
