"""The corpus through the compiler, against float64 and eager PyTorch."""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Iterator
from functools import partial

import pytest
import torch

import fl_pallas as fl

from .oracle import run_and_check
from .programs import BY_NAME, FALLBACKS, FUSED, Case
from .unrun import unrun

pytestmark = pytest.mark.usefixtures("repeated")

GPU_LENGTHS = (1, 17, 100, 257, 1024)
# Too short for a blow-up, and long enough for one.
SHORT, LONG = range(100), range(100, 2000)


EXPLAINED = 512
"""A length at which every score matrix of the corpus outgrows its operands."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def runs(case: Case) -> Iterator[tuple[torch.dtype, int]]:
    """(dtype, length) pairs: all of them on a GPU."""
    if torch.cuda.is_available():
        yield from ((dtype, n) for dtype in (torch.float32, torch.bfloat16, torch.float16) for n in GPU_LENGTHS)
        return
    # Two lengths of the four, one in each dtype; which ones varies from case to case, for CI's time.
    mark = zlib.crc32(case.name.encode())
    first, second = (torch.float32, torch.bfloat16) if mark & 1 else (torch.bfloat16, torch.float32)
    yield first, (1, 17)[mark >> 1 & 1]
    yield second, (100, 257)[mark >> 2 & 1]


def parameters(cases: tuple[Case, ...], lengths: range = range(1, 2000)) -> list:
    return [
        pytest.param(case, dtype, n, id=f"{case.name}-{dtype_name(dtype)}-{n}")
        for case in cases
        for dtype, n in runs(case)
        if n in lengths
    ]


def by_name(cases: tuple[Case, ...]) -> list:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case, dtype, seq", parameters(FUSED, SHORT))
def test_fused_short(case: Case, dtype: torch.dtype, seq: int, device: torch.device) -> None:
    check_fused(case, dtype, seq, device)


@pytest.mark.parametrize("case, dtype, seq", parameters(FUSED, LONG))
def test_fused(case: Case, dtype: torch.dtype, seq: int, device: torch.device) -> None:
    check_fused(case, dtype, seq, device)


def check_fused(case: Case, dtype: torch.dtype, seq: int, device: torch.device) -> None:
    target = case.target(dtype, device)
    with warnings.catch_warnings():
        if case.kernels is None or seq in SHORT:  # PyTorch may keep it, and may say so
            warnings.simplefilter("ignore", fl.FallbackWarning)
        draw = partial(case.make_inputs, seq, dtype, device)
        run_and_check(target, fl.compile(target), draw(), name=case.name, draw=draw)


def test_float16_numbers_stay_in_range(device: torch.device) -> None:
    """(x / 4)^4 as x^4 / 256 would not: what scales an operand of a product is applied before it is narrowed."""
    case = BY_NAME["polynomial"]
    run_and_check(case.fn, fl.compile(case.fn), case.make_inputs(257, torch.float16, device))


@pytest.mark.parametrize("case", by_name(FUSED))
def test_kernel_count(case: Case, device: torch.device) -> None:
    target = case.target(torch.float32, device)
    with unrun():
        explanation = fl.explain(target, *case.make_inputs(EXPLAINED, torch.float32, device))
    if case.kernels is not None:
        assert explanation.kernel_count == case.kernels, str(explanation)
        assert not explanation.fallbacks, str(explanation)


@pytest.mark.parametrize("case, dtype, seq", parameters(FALLBACKS))
def test_fallback(case: Case, dtype: torch.dtype, seq: int, device: torch.device) -> None:
    inputs = case.make_inputs(seq, dtype, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_and_check(case.fn, fl.compile(case.fn), inputs, name=case.name)
    messages = [str(w.message) for w in caught if issubclass(w.category, fl.FallbackWarning)]
    if seq >= 100:  # a shorter one has nothing to fuse, and so nothing to warn of
        assert any(re.search(case.falls_back, message) for message in messages), messages


@pytest.mark.parametrize("case", by_name(FALLBACKS))
def test_fallback_is_explained(case: Case, device: torch.device) -> None:
    explanation = fl.explain(case.fn, *case.make_inputs(EXPLAINED, torch.float32, device))
    assert explanation.fallbacks
    for fallback in explanation.fallbacks:
        assert fallback.what and fallback.why and fallback.where, str(explanation)


@pytest.mark.parametrize("case", by_name(FALLBACKS))
def test_fallback_error(case: Case, device: torch.device) -> None:
    compiled = fl.compile(case.fn, fallback="error")
    with pytest.raises(fl.Unsupported, match=case.falls_back):
        compiled(*case.make_inputs(EXPLAINED, torch.float32, device))
