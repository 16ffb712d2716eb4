"""PyTorch's flex_attention, called in what is compiled, is plain PyTorch to us."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fl_pallas as fl
from tests.unrun import explain

N = 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOCUMENTS = torch.arange(N, device=DEVICE) // 15
# (Inside of what is compiled PyTorch fails at it where warnings are errors.)
MASK = create_block_mask(lambda b, h, i, j: (i >= j) & (DOCUMENTS[i] == DOCUMENTS[j]), None, None, N, N, device=DEVICE)
TABLE = torch.randn(2, 2 * N - 1, generator=torch.Generator().manual_seed(0))


def qkv(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, N, 16, generator=generator).to(device) for _ in range(3)]


def same(found: object, want: object) -> None:
    """To what float32 products on a GPU, of three in TF32, leave of both."""
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def by_hand(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    i = torch.arange(N, device=q.device)
    return change(q @ k.mT / 4, i[:, None], i).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: 5 * torch.tanh(s / 5))


def tabled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = TABLE.to(q.device)
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + N - 1])


def in_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=MASK)


CASES = {
    capped: lambda s, i, j: 5 * torch.tanh(s / 5),
    tabled: lambda s, i, j: s + TABLE.to(s.device)[:, i - j + N - 1],
    in_documents: lambda s, i, j: s.masked_fill((i < j) | (i // 15 != j // 15), -math.inf),
}


@pytest.mark.parametrize("fn", CASES)
def test_is_fused(fn: Callable[..., Tensor], device: torch.device) -> None:
    given = qkv(device)
    same(fl.compile(fn, fallback="error")(*given), by_hand(*given, CASES[fn]))
    assert explain(fn, *given).kernel_count == 1


@pytest.mark.parametrize("fn", [capped, tabled])
def test_is_trained(fn: Callable[..., Tensor], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own has no gradients on CPUs, and says so before anything is captured."""
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    given = [t.requires_grad_() for t in qkv(device)]
    found = torch.autograd.grad(fl.compile(fn, fallback="error")(*given).square().sum(), given)
    want = torch.autograd.grad(by_hand(*given, CASES[fn]).square().sum(), given)
    same(found, want)


def test_what_a_function_reads_is_trained(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)

    def learned(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + N - 1])

    given = [t.requires_grad_() for t in (*qkv(device), TABLE.to(device, copy=True))]
    found = torch.autograd.grad(fl.compile(learned, fallback="error")(*given).square().sum(), given)
    want = by_hand(*given[:3], lambda s, i, j: s + given[3][:, i - j + N - 1])  # type: ignore[arg-type]
    same(found, torch.autograd.grad(want.square().sum(), given))


def test_sums_of_rows_and_shared_keys(device: torch.device) -> None:
    def with_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True, return_lse=True)

    q, k, v = qkv(device)
    out, sums = fl.compile(with_sums, fallback="error")(q, k, v)
    scores = q @ k[:, :1].mT / 4
    same((out, sums), (scores.softmax(-1) @ v[:, :1], scores.logsumexp(-1)))
