"""What is stored because computing it again takes too long: seldom, and rightly."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import reductions
from fl_pallas.schedule.passes import hold
from fl_pallas.schedule.plan import is_by_thread, operand_names
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check, check_gradients
from tests.programs import BY_NAME
from tests.schedule.test_split_sums import radial
from tests.unrun import explain, unrun

MIXING = ["talking_heads", "mixed_heads", "bahdanau"]


@pytest.mark.parametrize("name", MIXING)
def test_short_sequences_store_nothing(name: str) -> None:
    case = BY_NAME[name]
    inputs = [t.requires_grad_() for t in case.make_inputs(64, torch.float32, "cpu")]
    found = explain(case.target(torch.float32, "cpu"), *inputs)
    assert not any(s.name.startswith("r0_h") for g in found.graphs for k in g.kernels for s in k.stores)


@pytest.mark.filterwarnings("ignore::fl_pallas.errors.FallbackWarning")
@pytest.mark.parametrize(
    "name, dtype, held",
    [
        ("mixed_heads", torch.bfloat16, 1),
        ("talking_heads", torch.float32, 2),
        ("talking_heads", torch.bfloat16, 2),
        ("bahdanau", torch.float16, 1),
    ],
)
def test_what_is_stored_serves_all_gradients(
    name: str, dtype: torch.dtype, held: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "SAVED", -1e12)
    monkeypatch.setattr(hold, "TIMES", 0)
    monkeypatch.setattr(hold, "AGAIN", 0)
    monkeypatch.setattr(hold, "CLEARLY", 100)
    monkeypatch.setattr(hold, "MAX_HELD", held)
    case = BY_NAME[name]
    inputs = case.make_inputs(33, dtype, device)
    fn = case.target(dtype, device)
    explained = explain(fn, *[t.clone().requires_grad_() for t in inputs])
    assert any(f"_h{held - 1}" in s.name for g in explained.graphs for k in g.kernels for s in k.stores)
    torch._dynamo.reset()
    compiled = fl.compile(fn)
    with torch.no_grad():
        check(fn, inputs, compiled(*inputs))
    check_gradients(fn, compiled, inputs)


@pytest.mark.filterwarnings("ignore::fl_pallas.errors.FallbackWarning")
def test_what_reads_what_is_held_is_held_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores before heads are mixed, and the gradient of those after it: as large as each other."""
    monkeypatch.setattr(hold, "SAVED", 0)
    shapes = [(1, 8, 1024, 64)] * 3 + [(8, 8)]
    inputs = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    with unrun():
        found = fl.explain(BY_NAME["talking_heads"].fn, *inputs)
    assert {"r0_h0", "r0_h1"} <= {s.name for g in found.graphs for k in g.kernels for s in k.stores}


def test_gradients_of_distances_load_those_of_scores() -> None:
    """What a loop sums of three axes is taken by thread then, and not in tiles of three dimensions."""
    case = BY_NAME["l1_distance"]
    inputs = [torch.randn(1, 1, 2048, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    kernels = [plan for plan, _ in kernels_made(case.fn, inputs)]
    held = next(s.name for plan in kernels for s in plan.stores if s.name.startswith("r0_h"))
    readers = [plan for plan in kernels if held in operand_names(plan)]
    assert len(readers) > 1
    assert any(is_by_thread(plan, loop) for plan in readers for loop in plan.loops)


@pytest.mark.long
def test_sums_that_lie_in_other_tiles_are_stored() -> None:
    """A bias that a layer makes of distances has heads for rows, scores have queries: tiles of one have no product of
    the other (1.28 ms for both passes on an H200, where PyTorch takes 0.25)."""
    q, k, v = (torch.randn(8, 8, 256, 32).bfloat16() for _ in range(3))
    points = [torch.randn(8, 256, 3), torch.linspace(0, 3, 64), torch.randn(64, 8)]
    backward = explain(radial, *(t.bfloat16().requires_grad_() for t in (q, k, v, *points))).graphs[1].kernels
    stored = [s for p in backward for s in p.stores if s.name.startswith("r0_h")]
    bias, grads = sorted(stored, key=lambda s: len(reductions(s.expr)))
    assert bias.shape == grads.shape == (8, 8, 256, 256)
    assert not reductions(bias.expr) and all(r.axis.extent == 32 for r in reductions(grads.expr))


@pytest.mark.parametrize("mask", [torch.bool, torch.int64, torch.bfloat16])
def test_a_mask_is_no_reason_to_compute_again(mask: torch.dtype) -> None:
    """GATv2 with a given adjacency: what is stored is no larger than that, and than nothing else."""

    def additive(a: Tensor, b: Tensor, v: Tensor, w: Tensor, adjacency: Tensor) -> Tensor:
        scores = F.leaky_relu(a[:, :, None] + b[:, None], 0.2) @ w
        hidden = adjacency == 0
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    a, b, v = (torch.randn(1, 2048, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    w = torch.randn(64, dtype=torch.bfloat16, requires_grad=True)
    told = explain(additive, a, b, v, w, torch.randint(0, 2, (1, 2048, 2048)).to(mask))
    forward, backward = told.graphs
    assert forward.kernels and backward.kernels
    stored = [s for k in backward.kernels for s in k.stores if math.prod(s.shape) >= 2048 * 2048]
    assert len(stored) == 1
