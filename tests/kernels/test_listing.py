"""Machine code as text."""

from __future__ import annotations

import re

import pytest
import torch

from tests.kernels.test_cubins import kernels_of

pytest.importorskip("triton", reason="kernels are compiled by the package triton")

from triton import knobs

from fl_pallas.kernels.cubin import Cubin, compile_ttir
from fl_pallas.kernels.listing import listing, told


def made(*names: str) -> list[Cubin]:
    return [
        compile_ttir(lower(plan), 90) for name in names for plan, lower in kernels_of(name, torch.bfloat16)
    ]  # the scheduler's pick


def instructions(text: str) -> list[str]:
    """Without addresses, and where jumps go to."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*?)\s*;", text)
    return [
        re.sub(r"\b0x[0-9a-f]+$", "", line) if re.search(r"\b(BRA|BSSY|WARPSYNC|CALL)", line) else line
        for line in found
    ]


def test_instructions_are_those_of_the_file() -> None:
    """Which takes half as long again to list."""
    (cubin,) = made("softcap")
    alone = told([knobs.nvidia.cuobjdump.path, "--dump-sass"], cubin.binary)
    assert instructions(listing(cubin.binary, 90)) == instructions(alone)


def test_jumps_go_to_addresses_of_the_listing() -> None:
    (cubin,) = made("causal_where")
    text = listing(cubin.binary, 90)
    places = {int(a, 16) for a in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/", text, re.MULTILINE)}
    jumps = [int(a, 16) for a in re.findall(r"BRA (?:U?P\w+, )?0x([0-9a-f]+)", text)]
    assert jumps and places.issuperset(jumps)


def test_what_nvdisasm_does_not_know_is_listed_from_its_file() -> None:
    (cubin,) = made("vanilla")
    assert instructions(listing(cubin.binary, 91)) == instructions(listing(cubin.binary, 90))
