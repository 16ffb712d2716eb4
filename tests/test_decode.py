"""Decoding: a long loop is split over programs, and its parts merge into what PyTorch computes."""

from __future__ import annotations

import zlib

import pytest
import torch

import fl_pallas as fl

from .corpus.case import Case
from .corpus.decode import CASES
from .oracle import run_and_check
from .unrun import unrun

LENGTHS = (2500, 3000, 4096)


def parameters() -> list:
    """One type and one length for each case; which ones varies."""
    out = []
    for case in CASES:
        mark = zlib.crc32(case.name.encode())
        dtype = (torch.float32, torch.bfloat16)[mark & 1]
        out.append(pytest.param(case, dtype, LENGTHS[mark // 2 % 3], id=case.name))
    return out


@pytest.mark.parametrize("case, dtype, seq", parameters())
def test_decode(case: Case, dtype: torch.dtype, seq: int, device: torch.device) -> None:
    run_and_check(case.fn, fl.compile(case.fn), case.make_inputs(seq, dtype, device), name=case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_count(case: Case, device: torch.device) -> None:
    with unrun():
        explanation = fl.explain(case.fn, *case.make_inputs(2500, torch.bfloat16, device))
    assert explanation.kernel_count == case.kernels, str(explanation)
    assert "parts, for" in str(explanation)
