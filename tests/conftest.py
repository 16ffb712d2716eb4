"""Fixtures: golden texts, the device, seeds; and how hypothesis runs."""

from __future__ import annotations

import os
from importlib.metadata import version

# oneDNN's AMX product of bfloat16 matrices carries the NaN of one row into others (torch 2.13): such a reference
# is worth nothing. It reads this when PyTorch first multiplies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# As bridge/dlpack.py tells XLA of small kernels; here of all, for each runs once.
# jaxlib 0.10 has flags for it that a later one ends the process at.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    * version("jaxlib").startswith("0.10."),
)

# Where an operation was traced is told by none of our errors, and looking it up takes a twentieth of a test.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import gc
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

import fl_pallas as fl
from fl_pallas import fallback
from fl_pallas.bridge.launch import DirectKernel

REPEATS = 4
THINNED = {
    "test_scheduled": 60,
    "test_end_to_end": 12,
    "test_fused_short": 24,
    "test_as_the_program": 16,
    "test_decode": 12,
    "test_streamed_in_any_tiles": 8,
    "test_compiles": 108,
    "test_short": 4,
    "test_needs_no_gradient": 4,
    "test_rows_that_see_nothing_but_finite_masks": 2,
    "test_results_of_rows_that_see_nothing": 12,
    "test_gradients_of_rows_that_see_nothing": 12,
    "test_far_from_the_origin": 4,
    "test_either_way_is_right": 6,
    "test_positions_are_exact": 4,
    "test_gradients": 12,
    "test_gradients_go_where_pytorchs_do": 4,
    "test_finite_differences": 16,
    "test_what_is_stored_serves_all_gradients": 4,
    "test_nothing_is_stored_for_each_pair": 2,
    "test_nothing_is_stored_for_a_pair": 7,
    "test_parts_merge_into_the_whole": 2,
    "test_matches": 5,
    "test_tables_by_distance": 6,
    "test_sums_about_guesses": 12,
    "test_the_largest_of_a_gate": 18,
    "test_training_fuses": 3,
    "test_writing_to_a_result_that_is_kept": 6,
    "test_equal_to_itself": 3,
    "test_rivals_compute_the_same": 4,
    "test_in_places": 6,
    "test_many_steps_are_planned": 4,
    "test_few_steps_are_right": 4,
    "test_a_statistic_that_is_returned": 2,
    "test_one_loop_over_keys": 6,
    "test_a_sum_is_of_what_was_rounded": 4,
    "test_fused": 11,
    "test_right": 6,
    "test_computes_the_same": 6,
    "test_same_numbers": 8,
    "test_gradients_as_exact_as_pytorchs": 8,
    "test_gradients_of_queries": 3,
    "test_a_maximum_of_linear_size_leaves_the_rest_fused": 4,
    "test_a_maximum_between_kernels": 2,
    "test_a_side_of_several": 2,
    "test_fills_that_are_tensors": 4,
    "test_part_of_a_result": 6,
    "test_both_sides_fuse": 4,
    "test_infinite_scores": 2,
    "test_transforms_inside": 4,
    "test_precision_of_products_may_be_set_either_way": 2,
    "test_lies_in_shared_memory": 2,
    "test_pairs_are_a_row_of_features": 2,
    "test_tiles_are_skipped": 2,
    "test_as_in_pytorch": 2,
    "test_threads_load_what_lies_scattered": 2,
    "test_no_pair_is_stored": 2,
    "test_any_number_of_parts": 4,
    "test_a_norm_before_a_head": 2,
    "test_no_spills": 2,
    "test_whole_quotients_are_cut_as_they_are": 2,
    "test_some_inputs_require_gradients": 2,
    "test_layers_as_one_function": 2,
    "test_kernel_count": 8,
    "test_masks_of_large_negative_numbers_are_skipped": 3,
    "test_one_table_serves_all_kernels": 3,
    "test_layers_that_widen_are_no_blow_ups": 2,
    "test_a_guarded_infinity": 3,
    "test_row_sums_are_known": 3,
    "test_gradients_of_keys_skip_them_where_all_rows_see_something": 2,
    "test_needs_one": 2,
    "test_a_second_pass_skips_where_the_first_ended_with_numbers": 3,
    "test_the_gradient_of_a_mean_of_pairs": 3,
    "test_labels": 2,
    "test_regions_end_at_the_projections": 2,
    "test_both_passes_fuse": 2,
    "test_no_scores_are_stored": 3,
    "test_what_a_mask_makes_nothing_of_is_skipped": 3,
    "test_sixteen_heads_are_right": 2,
    "test_rows_in_turn": 2,
    "test_attention_along_two_axes_is_made_once": 2,
    "test_sums_by_distance": 2,
    "test_scores_round_alike_where_they_are_compared": 2,
    "test_positions_that_are_data_compile": 2,
    "test_both_hops_are_fused": 2,
    "test_decays_fuse_however_short": 3,
    "test_products_are_pytorchs": 2,
    "test_each_has_regions_of_its_own": 3,
    "test_gradients_of_shifts": 2,
    "test_both_attentions_are_fused": 2,
    "test_tokens_that_are_not_rotated_need_no_kernels_of_their_own": 2,
    "test_is_as_exact_as_float32": 4,
    "test_feature_maps_of_queries_and_keys": 2,
    "test_pytorchs_own_operations": 4,
    "test_multi_head_attention": 2,
    "test_kernels_that_wait_together_are_listed_as_each_by_itself": 2,
    "test_compiles_without_spills": 2,
    "test_machine_code": 2,
    "test_one_kernel_for_all_sizes_that_a_tile_holds": 2,
    "test_gradients_of_two_layers_of_pairs_are_stored": 2,
    "test_places": 4,
    "test_totals_of_what_positions_decide": 3,
    "test_gradients_of_all_operands_are_one_kernels": 6,
    "test_rows_that_are_turned_from_some_on": 2,
    "test_a_view_of_heads_side_by_side": 2,
    "test_instances_are_compiled": 2,
    "test_statistics_are_kept_exactly": 2,
    "test_losses_follow_pytorchs": 2,
    "test_channels_by_coordinates": 2,
    "test_padding_of_large_negative_numbers_is_skipped": 2,
    "test_scores_that_read_their_column_beside_a_table": 2,
    "test_a_graph_for_each": 2,
    "test_heads_that_share_keys_have_loops_of_their_own": 2,
    "test_a_batch_folded_into_rows_is_parted": 2,
    "test_inside_torch_compile": 2,
    "test_heads_flattened_into_a_batch": 2,
    "test_is_written_for_a_gpu": 2,
    "test_gradients_of_layers": 5,
    "test_corpus_is_well_formed": 3,
    "test_fastest": 2,
    "test_accuracy": 2,
    "test_fuses": 2,
    "test_gradients_are_nan_where_pytorchs_are": 2,
    "test_plain_masks_get_exact_bounds": 3,
    "test_nothing_that_counts_is_skipped": 3,
    "test_sums": 2,
    "test_corpus_is_well_conditioned": 4,
    "test_streamed_equals_written": 2,
    "test_terms_recombine": 2,
    "test_reduction": 2,
    "test_view": 2,
    "test_pointwise": 3,
    "test_unary": 3,
    "test_when_to_split": 2,
    "test_no_loop_is_over_what_rows_tell": 3,
    "test_results_of_lists": 3,
    "test_bisection": 2,
    "test_products_take_copies": 2,
    "test_both_passes_are_fused": 3,
    "test_each_form_fuses": 2,
    "test_no_pairs_are_stored": 2,
}
"""Of the cases of these tests one in so many runs on a CPU, and at least one; all with --every-case."""
NO_GPU = "needs a CUDA GPU: torch.cuda.is_available() is False"
LONG = "takes long on a CPU: with --every-case, or on a machine with a GPU"

# Shrinking compiles hundreds of programs: the failing specification is printed as it was found.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("dev", deadline=None, max_examples=40, print_blob=True, phases=PHASES)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, max_examples=5)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden instead of comparing with it")
    parser.addoption("--every-case", action="store_true", help="all cases where CI looks at a share, and long tests")


def pytest_configure() -> None:
    fl.config.tune = 0  # a test that tunes says so
    fl.config.cache = "off"
    fl.config.verify = True
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    gc.freeze()  # the modules of PyTorch and JAX: going over them again and again takes a tenth of the time
    gc.set_threshold(100_000, 20, 100_000)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    every_case = config.getoption("--every-case")
    if not every_case:
        cases: dict[str, list[pytest.Item]] = {}
        for i in items:
            cases.setdefault(i.nodeid.partition("[")[0], []).append(i)
        kept = {i for c in cases.values() for i in _share(c, THINNED.get(c[0].originalname, 1))}
        config.hook.pytest_deselected(items=[*{*items} - kept])
        items[:] = [i for i in items if i in kept]
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        if item.get_closest_marker("long") and not every_case:
            item.add_marker(pytest.mark.skip(reason=LONG))


def _share(cases: list[pytest.Item], one_in: int) -> list[pytest.Item]:
    """One in so many of a test's cases: each in its turn has the most arguments' values that none before it has."""
    drawn, kept, seen = sorted(cases, key=_drawn), [], set()
    if one_in == 1:
        return drawn
    left = [i for first in range(one_in) for i in drawn[first::one_in]]
    for _ in drawn[::one_in]:
        best = max(left, key=lambda i: len(_values(i) - seen))
        left.remove(best)
        kept.append(best)
        seen |= _values(best)
    return kept


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """Each argument of a case, and which of its values it has."""
    return {*item.callspec.indices.items()} if hasattr(item, "callspec") else set()


def _drawn(item: pytest.Item) -> int:
    """A number by which cases come in an order of no meaning, the same one each time."""
    return zlib.crc32(item.nodeid.encode())


@pytest.fixture
def unwarned() -> Iterator[None]:
    """Warnings given before count as not given."""
    kept = set(fallback._warned)
    fallback._warned.clear()
    yield
    fallback._warned.update(kept)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU (Pallas interpret mode)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The same random numbers for each test, and none of the last one's captured graphs, warnings or GPUs."""
    torch.manual_seed(0)
    fallback._warned.clear()
    if torch.cuda.is_initialized():
        torch.cuda.set_device(0)  # JAX leaves the one on which it last did something
    yield
    torch.compiler.reset()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch of a kernel on a GPU is made several times, and has to give the same bits each time."""
    once = DirectKernel.__call__

    def call(kernel: DirectKernel, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        first = once(kernel, operands)
        for _ in range(REPEATS):
            for a, b in zip(first, once(kernel, operands), strict=True):
                alike = torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
                assert alike, f"{kernel.plan.name} gave other bits"
        return first

    monkeypatch.setattr(DirectKernel, "__call__", call)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compares a text with tests/golden/<test file>/<test name>.txt; `--update-golden` writes that file."""
    test_file = Path(request.node.path)
    name = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
    path = Path(__file__).parent / "golden" / test_file.stem / f"{name}.txt"

    def compare(text: str) -> None:
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"{path} is missing; run pytest --update-golden and read what it wrote"
        assert text == path.read_text(), f"differs from {path}; --update-golden rewrites it"

    return compare
