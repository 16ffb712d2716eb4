"""Split loops in numpy: the parts merge into what PyTorch computes, for any number of parts; and when to split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_pallas.schedule.passes import split_loop as split
from fl_pallas.schedule.plan import Choices, KernelPlan
from fl_pallas.schedule.target import HOPPER
from fl_pallas.schedule.text import plan_text
from tests.corpus.basic import vanilla
from tests.corpus.case import Case
from tests.corpus.decode import CASES, alibi, gqa_window
from tests.corpus.normalisers import max_plus_scores
from tests.corpus.research import few_queries_max_plus
from tests.oracle import leaves
from tests.plan_evaluate import PlanRun, captured
from tests.programs import BY_NAME

SEQ = 2500
DECODE = {case.name: case for case in CASES}

# Of every law one; `masked_rows` has rows that no key contributes to, so most of its parts are empty.
SPLIT = (
    "vanilla causal_where masked_rows padding_lengths sliding_window sink with_entropy with_lse with_max "
    "value_variance_centred max_plus max_plus_scores two_softmax_mixture any_and_count differential sigmoid sdpa_gqa"
).split()


def check(fn, inputs, side: int | None = None) -> list[KernelPlan]:
    """Run all kernels in numpy, within their bounds; the plans."""
    made = captured(fn, inputs)
    with torch.no_grad():
        wanted = [x.numpy() for x in leaves(fn(*inputs)).values()]
    values = made.values()
    for name, want in zip(made.program.outputs, wanted, strict=True):
        np.testing.assert_allclose(values[name], want, rtol=1e-9, atol=1e-11)
    plans = []
    for plan, _, known in made.kernels():
        plans.append(plan)
        if side is not None:
            plan = plan.with_choices(Choices(tuple((a, n if n == 1 else side) for a, n in plan.choices.tiles)))
        for output, got in PlanRun(plan, known, bounded=True).run().items():
            if output in values:
                np.testing.assert_allclose(got, values[output], rtol=1e-8, atol=1e-10, err_msg=f"{output}, {side}")
    return plans


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode(case: Case) -> None:
    plans = check(case.fn, case.make_inputs(SEQ, torch.float64, "cpu"))
    assert len(plans) == case.kernels
    assert plans[0].loops[0].parts is not None


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_any_number_of_parts(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a length of 37, in tiles of 8: parts of one tile, and empty ones."""
    monkeypatch.setattr(split, "number_of_parts", lambda plan, target: parts if len(plan.loops) == 1 else 1)
    case = BY_NAME[name]
    plans = check(case.fn, case.make_inputs(37, torch.float64, "cpu"), side=8)
    assert any(p.loops and p.loops[0].parts is not None for p in plans)


def test_sums_without_weights_move_by_what_was_seen() -> None:
    """sum(s - max s): when the maximum moves, so does every term so far, and no other."""

    def spread(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k.mT
        return (scores - scores.amax(-1, keepdim=True)).sum(-1), scores.softmax(-1) @ v

    for sq in (1, 3):
        shapes = (1, 2, sq, 16), (1, 2, SEQ, 16), (1, 2, SEQ, 16)
        plans = check(spread, [torch.randn(s, dtype=torch.float64) for s in shapes], side=32)
        assert len(plans) == 2


def first_plan(fn, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> KernelPlan:
    return captured(fn, [torch.randn(s, dtype=dtype) for s in shapes]).made.kernels[0][0]


def parts_of(b: int, heads: int, queries: int, keys: int) -> int:
    plan = first_plan(vanilla, (b, heads, queries, 64), (b, heads, keys, 64), (b, heads, keys, 64))
    axis = plan.loops[0].parts
    return axis.extent if axis is not None else 1


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((1, 8, 1, 65536), 32),  # 8 programs become two for each processor
        ((1, 8, 1, 4096), 16),  # of 256 keys at least
        ((1, 8, 1, 1024), 4),
        ((1, 8, 1, 1023), 1),  # too short a loop
        ((8, 8, 1, 2048), 4),
        ((9, 8, 1, 2048), 2),
        ((9, 8, 1, 2047), 1),  # too short for so many programs
        ((8, 8, 1, 2047), 4),  # less than half of the processors have one
        ((17, 8, 1, 8192), 1),  # enough programs
        ((1, 9, 2048, 2048), 1),
        ((1, 2, 512, 4096), 8),  # of 512, for 16 programs become one for each processor
        ((1, 1, 300, 2048), 8),  # of 256: the least for tiles of 64 rows
        ((1, 5, 512, 4096), 4),  # of 1024: a tile of 64 rows wants long parts, where there are 40 programs
    ],
)
def test_when_to_split(sizes: tuple[int, int, int, int], parts: int) -> None:
    assert parts_of(*sizes) == parts


def test_steps_that_take_long_are_shared_out_further() -> None:
    """Distances of rows, feature by feature; maxima over tiles of rows by features by keys."""
    (loop,) = first_plan(few_queries_max_plus, (1, 1, 8, 64), *[(1, 1, 2048, 64)] * 2).loops
    assert loop.parts is not None and loop.parts.extent == 32
    shapes = [(1, 1, 1024, 64)] * 3
    (loop,) = first_plan(max_plus_scores, *shapes).loops
    assert loop.parts is not None and loop.parts.extent == 16
    assert first_plan(vanilla, *shapes).loops[0].parts is None


def test_loops_that_depend_on_each_other_stay_whole() -> None:
    plan = first_plan(vanilla, (1, 2, 1, 16), (1, 2, 4096, 16), (1, 2, 4096, 16))
    (loop,) = plan.loops
    two = replace(plan, loops=(replace(loop, parts=None), replace(loop, parts=None)))
    assert split.split_loop(two, "k1", HOPPER) == (two,)


def test_bounds_are_shared_out() -> None:
    """A window's parts divide the window, whatever its tile of queries spans."""
    case = DECODE["decode_gqa_window_4"]
    (plan, _) = captured(gqa_window, case.make_inputs(SEQ, torch.float32, "cpu")).made.kernels[0]
    assert f"for j0 in {SEQ - 4 - 255} .." in plan_text(plan)


def test_grouped_heads_are_rows() -> None:
    """What the loop loads does not depend on which head of a group, nor on the query, is computed."""
    for sq in (1, 4):
        case = DECODE[f"decode_alibi_{sq}"]
        (plan, merging) = captured(alibi, case.make_inputs(SEQ, torch.float32, "cpu")).made.kernels[0]
        tiled = [a for a in plan.grid if a not in plan.features and (plan.choices.tile(a) or 1) > 1]
        assert [(a.extent, plan.choices.tile(a)) for a in tiled] == [(4 * sq, 16)]
        assert merging.stores[0].shape == (2, 8, sq, 32)
