"""The texts of the IRs for a few variants: a change of the schedule shows in review."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fl_pallas.schedule.program import Program
from fl_pallas.schedule.text import plan_text, program_text
from tests.plan_evaluate import captured
from tests.programs import BY_NAME

PLANS = (
    "vanilla causal_where sliding_window softcap with_entropy retention standardised_scores value_variance_centred "
    "differential max_plus padding_lengths two_layers"
).split()
PROGRAMS = ("causal_where",)
SEQ = 300


def made(name: str):
    case = BY_NAME[name]
    return captured(case.fn, case.make_inputs(SEQ, torch.float32, "cpu"))


def check(text: str, golden: Callable[[str], None]) -> None:
    assert ".py" not in text
    # TorchDynamo's order of a graph's inputs depends on its version: they are named as they appear here.
    names: dict[str, str] = {}
    golden(re.sub(r"\barg\d+_1\b", lambda m: names.setdefault(m[0], f"in{len(names)}"), text))


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str, golden: Callable[[str], None]) -> None:
    check("\n\n".join(plan_text(p) for plans in made(name).made.kernels for p in plans), golden)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, golden: Callable[[str], None]) -> None:
    """Without the source lines, which move with the corpus."""
    program = made(name).program
    check(program_text(Program(tuple(replace(v, where=None) for v in program.values), program.outputs)), golden)


def test_text_is_stable() -> None:
    """The same program gives the same text, whatever was compiled before it."""

    def text() -> str:
        torch.compiler.reset()
        return "\n".join(plan_text(p) for plans in made("with_entropy").made.kernels for p in plans)

    first = text()
    made("differential")
    assert text() == first


def test_text_has_no_path() -> None:
    """Source lines show the file's name alone, so that texts are the same on every machine."""
    text = program_text(made("vanilla").program)
    assert "basic.py:" in text
    assert "/basic.py" not in text
