"""Integers of few bits wrap round as PyTorch's: of uint8, 3 - 5 is 254."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from tests.oracle import run_and_check


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
    assert "mod" not in str(fl.explain(documents, q, t)) and "%" not in str(fl.explain(documents, q, t))
