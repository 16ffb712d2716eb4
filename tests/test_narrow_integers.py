"""Integers of few bits wrap round as PyTorch's: of uint8, 3 - 5 is 254."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import run_and_check
from tests.unrun import explain


def wrapping(q: Tensor, t: Tensor) -> Tensor:
    """Scores with a bias for each operation that leaves its type, and for what is compared with it."""
    a, b = t[:, :, None], t[:, None]
    made = [a - b, a + b, a * b, -a + b, ~a ^ b, (a ^ b) << 3, (a - b).abs(), a + 100 - b, (a.long() * b).to(t.dtype)]
    s = q @ q.mT / 4
    for n, x in enumerate(made):
        s = s + x.float() * (0.01 + 0.003 * n) * 0.01
    s = s.masked_fill((a - b) > 90, -3.0)
    return s.masked_fill((a * b) % 7 == 0, -2.0).softmax(-1) @ q


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_wrapping(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    limits = torch.iinfo(dtype)
    t = torch.randint(limits.min, limits.max + 1, (2, 33), dtype=dtype, device=device)
    t[:, :2] = torch.tensor([limits.min, limits.max], dtype=dtype)
    run_and_check(wrapping, fl.compile(wrapping), (torch.randn(2, 33, 16, device=device), t))


def test_ids_of_few_bits_are_compared_as_they_are(device: torch.device) -> None:
    """What has room needs no more than what is given: documents, of which the tiles are known."""

    def documents(q: Tensor, t: Tensor) -> Tensor:
        same = t[:, :, None].long() - t[:, None].long() == 0
        return (q @ q.mT).masked_fill(~same, float("-inf")).softmax(-1) @ q

    t = torch.arange(200, device=device)[None].div(50, rounding_mode="floor").to(torch.uint8)
    q = torch.randn(1, 200, 16, device=device)
    run_and_check(documents, fl.compile(documents, fallback="error"), (q, t))
    assert "mod" not in str(explain(documents, q, t)) and "%" not in str(explain(documents, q, t))


def hashed(q: Tensor, t: Tensor) -> Tensor:
    """Products of ids and positions beyond 32 bits, and sums and views of such (buckets of hashes)."""
    i = torch.arange(t.shape[-1], dtype=torch.int32, device=t.device)
    own = (t * t)[:, :, None]
    made = [t[:, :, None] * t[:, None], (t[:, None] << 17) + t[:, :, None], (i[:, None] * 73856093) ^ (i * 19349663)]
    made += [t[:, :, None] * 40000 - t[:, None], own - own.mT, -own + t[:, None] * 3]
    s = q @ q.mT / 4
    for n, x in enumerate(made):
        s = s + 0.1 * (x % (n + 5)) + 0.1 * (x < 0)
    return s.softmax(-1) @ q


def test_products_of_32_bits_wrap(device: torch.device) -> None:
    torch.manual_seed(0)
    t = torch.randint(10**4, 10**5, (2, 33), dtype=torch.int32, device=device)
    run_and_check(hashed, fl.compile(hashed, fallback="error"), (torch.randn(2, 33, 16, device=device), t))


def test_lengths_of_32_bits_are_as_they_are(device: torch.device) -> None:
    """Sums of lengths and of offsets have room: nothing is asked of them."""

    def packed(q: Tensor, lengths: Tensor) -> Tensor:
        j = torch.arange(q.shape[-2], device=q.device)
        hidden = (j >= lengths[:, None] - 1)[:, None]
        return (q @ q.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ q

    given = torch.randn(2, 200, 16, device=device), torch.tensor([60, 150], dtype=torch.int32, device=device)
    run_and_check(packed, fl.compile(packed, fallback="error"), given)
    assert "%" not in str(explain(packed, *given))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_bitwise(dtype: torch.dtype, device: torch.device) -> None:
    """Bits of ids and of positions, put together: a mask of whole blocks, `(i | 31) >= j`, among them."""

    def bits(q: Tensor, t: Tensor) -> Tensor:
        i = torch.arange(t.shape[-1], device=t.device)
        a, b = t[:, :, None], t[:, None]
        s = (
            q @ q.mT / 4
            + 0.01 * (a | b)
            + 0.01 * (a & b)
            + 0.01 * (a ^ b)
            + 0.01 * ((t | 1)[:, None] + (~t & 7)[:, None])
        )
        return s.masked_fill((i | 15)[:, None] < i, float("-inf")).softmax(-1) @ q

    t = torch.randint(0, 100, (2, 65), device=device).to(dtype)
    run_and_check(bits, fl.compile(bits, fallback="error"), (torch.randn(2, 65, 16, device=device), t))


def test_sums_of_bytes(device: torch.device) -> None:
    """What wraps round before it is summed, over features that every pair has."""

    def apart(q: Tensor, t: Tensor) -> Tensor:
        return (q @ q.mT / 4 + (t[:, :, None] + t[:, None]).sum(-1) / 600).softmax(-1) @ q

    t = torch.randint(0, 256, (2, 65, 8), device=device).to(torch.uint8)
    run_and_check(apart, fl.compile(apart, fallback="error"), (torch.randn(2, 65, 16, device=device), t))


def test_views_of_what_wraps(device: torch.device) -> None:
    """A view says where its elements lie by products of its own, which are none of theirs."""

    def hashed(q: Tensor, t: Tensor) -> Tensor:
        h = (t * 40000).unflatten(-1, (13, 5)).transpose(1, 2).flatten(1)
        squares = (t * t).view(2, 13, 5).flatten(1)
        s = q @ q.mT / 4 + 0.3 * (h[:, :, None] - h[:, None] < 0)
        return (s + 0.1 * ((squares[:, :, None] + t[:, None] * 3) % 7)).softmax(-1) @ q

    t = torch.randint(10**4, 10**5, (2, 65), dtype=torch.int32, device=device)
    run_and_check(hashed, fl.compile(hashed, fallback="error"), (torch.randn(2, 65, 16, device=device), t))
