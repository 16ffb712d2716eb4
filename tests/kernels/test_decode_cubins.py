"""Decoding kernels become machine code: no spills, and loads that run ahead of their use. No GPU is needed."""

from __future__ import annotations

import pytest
import torch

from fl_pallas.kernels.fit import Fitted, fitting
from fl_pallas.kernels.lower import lower_contiguous
from fl_pallas.schedule.plan import operand_names
from tests.corpus.case import Case
from tests.corpus.decode import CASES
from tests.plan_evaluate import captured
from tests.test_decode import LENGTHS

DECODE = {case.name: case for case in CASES}
COMPILED = (
    "decode_plain_1 decode_plain_4 decode_gqa_sdpa_1 decode_gqa_window_4 decode_alibi_4 decode_lengths_1 "
    "decode_entropy_1 decode_two_sums_4 decode_softcap_1 decode_spread_4 decode_paged decode_quantised_pages "
    "decode_eight_bits decode_floats_of_4_bits_by_head decode_by_channel"
).split()


def compiled(case: Case, dtype: torch.dtype) -> list[Fitted]:
    made = captured(case.fn, case.make_inputs(max(LENGTHS), dtype, "cpu")).made
    tensors = {v.name: (v.shape, v.dtype) for v in made.program.values}
    found = []
    for plan in (p for plans in made.kernels for p in plans):
        tensors |= {s.name: (s.shape, s.dtype) for s in plan.stores}
        operands = [tensors[n] for n in operand_names(plan)]
        found += fitting(plan, lambda p, operands=operands: lower_contiguous(p, operands, None), 90)
    return found


@pytest.mark.parametrize("name", COMPILED)
def test_no_spills(name: str) -> None:
    made = compiled(DECODE[name], torch.bfloat16)
    assert len(made) == 2
    assert all(f.cubin.stack == 0 for f in made)
    assert "cp.async" in made[0].cubin.asm["ptx"], "loads that feed no matrix product wait for their data"


def test_packed_bytes_are_loaded_as_they_lie() -> None:
    """Sixteen at a time, ahead of their use, and taken apart then."""
    first, _ = compiled(DECODE["decode_four_bits"], torch.bfloat16)
    ptx = first.cubin.asm["ptx"]
    assert "cp.async" in ptx and "ld.global.b8" not in ptx and first.cubin.stack == 0


@pytest.mark.parametrize("name", ["decode_plain_1", "decode_gqa_sdpa_4"])
def test_float32(name: str) -> None:
    assert all(f.cubin.stack == 0 for f in compiled(DECODE[name], torch.float32))
