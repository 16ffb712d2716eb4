"""Machine code as text."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.kernels.test_cubins import kernels_of

pytest.importorskip("triton", reason="kernels are compiled by the package triton")

from triton import knobs

from fl_pallas.kernels import listing as module
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


@pytest.mark.long
@pytest.mark.parametrize("side_by_side", [1, 2])
def test_kernels_that_wait_together_are_listed_as_each_by_itself(
    side_by_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instruction by instruction, in fewer runs than there are kernels."""
    monkeypatch.setattr(module, "RUNS", side_by_side)
    cubins = made("vanilla", "causal_where", "softcap", "sliding_window")
    runs: list[int] = []
    original = module.told
    monkeypatch.setattr(module, "told", lambda command, given: runs.append(len(given)) or original(command, given))
    listing.cache_clear()
    with ThreadPoolExecutor(len(cubins)) as threads:
        texts = list(threads.map(lambda c: listing(c.binary, 90), cubins))
    assert len(runs) < len(cubins)
    for text, cubin in zip(texts, cubins, strict=True):
        alone = told([knobs.nvidia.cuobjdump.path, "--dump-sass"], cubin.binary)
        assert instructions(text) == instructions(alone)


def test_jumps_go_to_addresses_of_the_same_listing() -> None:
    first, second = made("causal_where", "vanilla")
    listing.cache_clear()
    with ThreadPoolExecutor(2) as threads:
        texts = threads.map(lambda c: listing(c.binary, 90), (first, second))
    for text in texts:
        places = {int(a, 16) for a in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/", text, re.MULTILINE)}
        jumps = [int(a, 16) for a in re.findall(r"BRA (?:U?P\w+, )?0x([0-9a-f]+)", text)]
        assert jumps and places.issuperset(jumps)


def test_what_nvdisasm_does_not_know_is_listed_from_its_file() -> None:
    (cubin,) = made("vanilla")
    assert instructions(listing(cubin.binary, 91)) == instructions(listing(cubin.binary, 90))


def test_an_error_reaches_all_that_wait() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        module._disassembler("SM91").listed(b"\0" * 32)
    with pytest.raises(subprocess.CalledProcessError):
        module._disassembler("SM91").listed(b"\0" * 32)
