"""Plans in numpy: streamed in tiles of any side they mean what PyTorch computes, and parts of a loop merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fl_pallas.schedule.expr import ref_names
from fl_pallas.schedule.passes.merge_partials import merge_of
from fl_pallas.schedule.plan import Accumulator, Choices, KernelPlan, Loop
from tests.oracle import leaves
from tests.plan_evaluate import Captured, Held, PlanRun, TileEvaluator, captured
from tests.programs import BY_NAME, Case

SEQ = 37

STREAMED = (
    "vanilla causal_where causal_gpt2 sdpa_gqa cross decode_step packed_qkv broadcast_products mha_module "
    "sliding_window local_window banded_ones prefix_lm prefix_lm_lengths document_causal padding_lengths "
    "padding_bert additive_mask sdpa_masked_rows masked_rows masked_rows_zeroed neighbourhood_2d "
    "dilated_window chunked cache_offset alibi t5_bias softcap rope cosine forgetting_gates talking_heads "
    "gaussian_kernel l1_distance bahdanau adaptive_temperature standardised_scores softmax_unsafe "
    "softmax_base_2 softmax_by_logs softmax_one sink sigmoid_causal squared_relu l2_normalised linear_causal "
    "retention retention_normalised max_plus min_plus_values max_times thresholded two_softmax_mixture "
    "sharpened with_lse with_max with_entropy value_variance value_variance_centred expected_distance "
    "entropy_normalised effective_keys two_layers any_and_count differential evoformer_row triangle_ending "
    "ipa"
).split()


def capture(case: Case) -> Captured:
    inputs = case.make_inputs(SEQ, torch.float64, "cpu")
    target = case.target(torch.float64, "cpu")
    made = captured(target, inputs)
    with torch.no_grad():
        wanted = list(leaves(target(*inputs)).values())
    values = made.values()
    assert len(wanted) == len(made.program.outputs)
    for name, want in zip(made.program.outputs, wanted, strict=True):
        np.testing.assert_allclose(values[name], want.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)
    return made


def small_tiles(plan: KernelPlan) -> KernelPlan:
    """The plan with every tile that is wider than one index cut to 8, so that loops have many tiles to skip."""
    return plan.with_choices(Choices(tuple((a, n if n == 1 else 8) for a, n in plan.choices.tiles)))


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_in_any_tiles(name: str) -> None:
    made = capture(BY_NAME[name])
    values = made.values()
    stored = set()
    assert made.made.kernels, "nothing was fused"
    for how in ({"side": 1}, {"side": 3}, {"side": 16}, {"bounded": True}):
        for plan, run, known in made.kernels(**how):
            if how.get("bounded"):
                run = PlanRun(small_tiles(plan), known, bounded=True)
            for output, got in run.run().items():
                if output in values:
                    stored.add(output)
                    message = f"{output} of {plan.name}, {how}"
                    np.testing.assert_allclose(got, values[output], rtol=1e-8, atol=1e-10, err_msg=message)
    assert stored, "no kernel stores a value of the program"


# --- merge --------------------------------------------------------------------------------------


def merge(plan: KernelPlan, loop: Loop, known: dict[str, np.ndarray], outer: Held, left: Held, right: Held) -> Held:
    """Two partial results of a loop as one, by the derived merge of each accumulator."""
    held = {**outer}
    for name in left:
        held[f"{name}.left"], held[f"{name}.right"] = left[name], right[name]
    out: Held = {}
    run = PlanRun(plan, known)
    for step in loop.steps:
        ev = TileEvaluator(known, held)
        with np.errstate(all="ignore"):
            if isinstance(step, Accumulator):
                value = ev.at(merge_of(step, plan.compute), run.scope).astype(left[step.name].dtype)
            else:
                value = ev.at(step.value, run.scope)
                seen = np.where(right[step.name] != 0, right[step.name], left[step.name])
                value = np.where(np.isfinite(value), value, seen)
        held[step.name] = out[step.name] = value
    return out


def splits(extent: int) -> list[tuple[int, ...]]:
    """Where the loop is cut; an empty part stands for a split that saw no key."""
    return [(1,), (extent // 2,), (extent - 1,), (0,), (extent,), (5, 20), (extent // 3, extent // 3, extent - 2)]


MERGED = (
    "vanilla causal_where masked_rows padding_lengths sink softmax_by_hand with_entropy entropy_normalised "
    "with_lse with_max value_variance value_variance_centred expected_distance effective_keys max_plus "
    "max_plus_scores min_plus_values max_times two_softmax_mixture thresholded retention_normalised "
    "l2_normalised any_and_count differential linear_causal sigmoid standardised_scores softmax_unsafe"
).split()


@pytest.mark.parametrize("name", MERGED)
def test_parts_merge_into_the_whole(name: str) -> None:
    made = capture(BY_NAME[name])
    merged_loops = 0
    for plan, _, known in made.kernels(side=4):
        outer: Held = {}
        run = PlanRun(plan, known, side=4)
        for loop in plan.loops:
            whole = run.loop(loop, outer)
            finals = {}
            for cuts in splits(loop.axis.extent):
                ends = [0, *cuts, loop.axis.extent]
                parts = [run.loop(loop, outer, a, b) for a, b in zip(ends, ends[1:])]
                total = parts[0]
                for part in parts[1:]:
                    total = merge(plan, loop, known, outer, total, part)
                finals[f"{cuts}, from the left"] = total
                total = parts[-1]
                for part in parts[-2::-1]:
                    total = merge(plan, loop, known, outer, part, total)
                finals[f"{cuts}, from the right"] = total
            merged_loops += 1
            want = run.stores({**outer, **whole}) if loop is plan.loops[-1] else {}
            for how, total in finals.items():
                message = f"{name}, {plan.name}, loop {loop.axis}, cut at {how}"
                for step in loop.steps:
                    if isinstance(step, Accumulator) and step.correct is None:
                        np.testing.assert_allclose(
                            total[step.name], whole[step.name], rtol=1e-8, atol=1e-10, err_msg=message
                        )
                if want:
                    for output, got in run.stores({**outer, **total}).items():
                        np.testing.assert_allclose(
                            got, want[output], rtol=1e-8, atol=1e-9, err_msg=f"{output}, {message}"
                        )
            outer.update(whole)
    assert merged_loops


def test_merge_names_both_sides() -> None:
    """The merge of a corrected sum: each side corrected to the merged maximum, then added."""
    made = capture(BY_NAME["vanilla"])
    ((plan, _, _),) = made.kernels()
    for step in plan.loops[0].steps:
        assert isinstance(step, Accumulator)
        names = ref_names(merge_of(step, plan.compute))
        assert {f"{step.name}.left", f"{step.name}.right"} <= names
        assert not any(n.endswith(".old") for n in names)
        if step.correct is not None:
            assert {"m0.left", "m0.right", "m0"} <= names


def test_merge_keeps_the_type() -> None:
    """Counts are merged as integers: a float32 would lose the last ones."""
    made = capture(BY_NAME["any_and_count"])
    ((plan, _, _),) = made.kernels()
    counts = [s for s in plan.loops[0].steps if isinstance(s, Accumulator) and s.update.dtype == "i64"]
    assert [merge_of(s, plan.compute).dtype for s in counts] == ["i64"]
