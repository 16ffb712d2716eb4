"""Scores that one kernel multiplies and another could not: stored once, read by both."""

from __future__ import annotations

import torch

import fl_pallas as fl
from fl_pallas.schedule.expr import loads
from fl_pallas.schedule.plan import KernelPlan
from fl_pallas.schedule.text import plan_text
from tests.corpus.science import ipa
from tests.oracle import check_gradients, run_and_check
from tests.plan_evaluate import captured
from tests.unrun import unrun


def residues(s: int, heads: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    q, k, v = (torch.randn(s, heads, 16, dtype=dtype) for _ in range(3))
    q_pts, k_pts = (torch.randn(s, heads, 4, 3, dtype=dtype) for _ in range(2))
    mask = (torch.rand(s) < 0.8).to(dtype)
    mask[0] = 1
    pairs = torch.randn(s, s, heads, dtype=dtype), torch.randn(s, s, width, dtype=dtype)
    return [q, k, v, q_pts, k_pts, torch.randn(s, heads, 8, 3, dtype=dtype), *pairs, torch.randn(heads, dtype=dtype), mask]  # fmt: skip  # noqa: E501


def plans(inputs) -> list[KernelPlan]:
    return [p for plans in captured(ipa, inputs).made.kernels for p in plans]


def test_stores_what_heads_as_rows_cannot_multiply() -> None:
    stored, queries, heads = plans(residues(64, 12, 128, torch.bfloat16))
    (store,) = stored.stores
    assert store.shape == (64, 12, 64) and store.dtype == "bf16" and not stored.loops
    assert all("sum[" not in plan_text(p).split("store")[0].replace("= sum(", "") for p in (queries, heads))
    assert all(store.name in plan_text(p) for p in (queries, heads))


def test_scores_beside_statistics_are_not_rounded() -> None:
    """The backward pass computes weights by the statistics, of scores that it does not round."""
    inputs = [t.requires_grad_() for t in residues(64, 12, 128, torch.bfloat16)]
    with unrun():
        stored, *_ = fl.explain(ipa, *inputs).graphs[0].kernels
    assert [s.dtype for s in stored.stores] == ["f32"] and not stored.loops


def test_points_are_one_row_of_coordinates() -> None:
    _, queries, _ = plans(residues(64, 12, 128, torch.bfloat16))
    assert 24 in [a.extent for a in queries.features]


def test_not_what_is_larger_than_every_operand() -> None:
    """Scores of 12 heads in float32 beside pairs of 4 channels in bfloat16."""
    assert all(p.loops for p in plans(residues(64, 12, 4, torch.bfloat16)))


def backward(inputs) -> list[KernelPlan]:
    with unrun():
        return list(fl.explain(ipa, *(t.requires_grad_() for t in inputs)).graphs[1].kernels)


def test_weights_are_lent() -> None:
    """The gradient of pairs multiplies the weights of all heads, which the bias's has as products of matrices."""
    found = backward(residues(300, 12, 128, torch.bfloat16))
    (pairs,) = (p for p in found if any(s.shape == (300, 300, 128) for s in p.stores))
    lent = {n.source for s in pairs.stores for n in loads(s.expr)} & {s.name for p in found for s in p.stores}
    (lender,) = (p for p in found if lent & {s.name for s in p.stores})
    assert found.index(lender) < found.index(pairs) and len(lender.stores) == 2
    assert "exp" not in plan_text(pairs)


def test_nothing_larger_than_what_is_written_is_lent() -> None:
    """Weights of 12 heads in float32 beside pairs of 4 channels in bfloat16."""
    found = backward(residues(300, 12, 4, torch.bfloat16))
    assert not any(len(s.shape) == 3 and s.dtype == "f32" for p in found for s in p.stores)


def test_gradients(device: torch.device) -> None:
    inputs = [t.to(device) for t in residues(37, 12, 128, torch.bfloat16)]
    check_gradients(ipa, fl.compile(ipa), inputs)


def test_computes_the_same(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.to(device) for t in residues(37, 12, 128, dtype)]
        assert len(plans(inputs)) == 3
        run_and_check(ipa, fl.compile(ipa), inputs)
