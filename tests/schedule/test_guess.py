"""A softmax about a number that is near its maximum: where that serves, and where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels.cubin import compile_ttir, simplified
from fl_pallas.schedule.passes import guess
from fl_pallas.schedule.plan import Guess
from tests.kernels.test_cubins import kernels_made
from tests.oracle import run_and_check
from tests.unrun import unrun


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses for short rows too."""
    monkeypatch.setattr(guess, "LEAST", 32)


def inputs(device: torch.device, dtype: torch.dtype = torch.bfloat16, keys: int = 100) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, 2, n, 32, generator=generator) for n in (70, keys, keys))
    return tuple(t.to(device, dtype) for t in made)


def guesses(fn: Callable, *given: Tensor) -> list[Guess]:
    with unrun():
        return [g for plan in fl.explain(fn, *given).kernels for loop in plan.loops for g in loop.guesses]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 32**-0.5


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
    return scores(q, k).masked_fill(i[:, None] < j, -math.inf).softmax(-1) @ v


def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) - 0.4 * scores(q * 2, k.flip(-1)).softmax(-1)) @ v


def entropy(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Another loop, about the same number."""
    p = scores(q, k).softmax(-1)
    return p @ v, -(p * (p + 1e-9).log()).sum(-1)


def logarithm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def largest_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two maxima, of which one runs."""
    s = scores(q, k)
    return s.softmax(-1) @ v, s.amax(-1)


def off_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    m = s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return e @ v / (e.sum(-1, keepdim=True) + (-m).exp())


def late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is large comes late: far beyond what the first keys let expect."""
    far = torch.where(torch.arange(k.shape[-2], device=k.device) > 80, 400.0, 0.0).to(k.dtype)
    return (q @ (k + far[:, None] * q.mean(-2, keepdim=True)).mT).softmax(-1) @ v


def hidden_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Padding on the left, by a number."""
    padding = torch.where(torch.arange(k.shape[-2], device=k.device) < 70, -30000.0, 0.0)
    return (scores(q, k) + padding.to(q.dtype)).softmax(-1) @ v


def small(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) - 300).softmax(-1) @ v


def empty_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.arange(q.shape[-2], device=q.device) % 3 == 0
    return scores(q, k).masked_fill(hidden[:, None], -math.inf).softmax(-1) @ v


def not_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2], device=q.device) == 5
    return scores(q.masked_fill(at[:, None], math.nan), k).softmax(-1) @ v


SERVES = [plain, causal, two, entropy, logarithm, largest_too, off_by_one]
DOES_NOT = [late, hidden_first, small, empty_rows, not_a_number]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", SERVES + DOES_NOT)
def test_sums_about_guesses(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    given = inputs(device, dtype)
    assert guesses(fn, *given) or fn in (hidden_first, largest_too)
    run_and_check(fn, fl.compile(fn), given)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("keys", [1, 31, 64, 97])
def test_ends(keys: int, device: torch.device) -> None:
    run_and_check(plain, fl.compile(plain), inputs(device, keys=keys))


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
    return (scores(q, k) - (0.5 * (i[:, None] - j).abs()).to(q.dtype)).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
    return scores(q, k).masked_fill((i[:, None] - j).abs() > 16, -math.inf).softmax(-1) @ v


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("fn", [distances, window])
def test_running_maxima_remain(fn: Callable) -> None:
    """Where the first keys say nothing of the last, where loops are short, and where products take long anyway."""
    assert not guesses(fn, *inputs(torch.device("cpu"), torch.bfloat16))
    assert not guesses(plain, *inputs(torch.device("cpu"), torch.float32))


def many(keys: int) -> list[Tensor]:
    """Rows enough for all of a GPU."""
    return [torch.empty(2, 8, keys, 32, dtype=torch.bfloat16) for _ in range(3)]


def test_training_keeps_true_maxima() -> None:
    assert not guesses(plain, *(t.requires_grad_() for t in many(2048)))


def test_short_rows_have_none() -> None:
    assert not guesses(plain, *many(512))
    (found,) = guesses(plain, *many(2048))
    assert found.bits == pytest.approx(32**-0.5 / math.log(2))


@pytest.mark.parametrize("fn", [plain, causal])
def test_the_other_loop_takes_few_registers(fn: Callable) -> None:
    """Of 64 rows: Hopper's products are there, and four programs fit a processor, as with a running maximum alone."""

    ((plan, lower),) = kernels_made(fn, [torch.randn(1, 8, 2048, 64, dtype=torch.bfloat16) for _ in range(3)])
    assert any(loop.guesses for loop in plan.loops)
    cubin = compile_ttir(simplified(lower(plan), 90), 90)
    assert "wgmma" in cubin.asm["ptx"] and cubin.stack == 0 and cubin.registers <= 128
