"""What is reduced again and again, or by few programs, has a kernel of its own."""

from __future__ import annotations

import torch

import fl_pallas as fl
from fl_pallas.schedule.expr import reductions
from tests.programs import BY_NAME
from tests.unrun import unrun


def test_a_mean_over_rows_is_of_what_a_kernel_of_rows_stores() -> None:
    """The products of a row are made where rows are a grid, and not by the one program of the mean."""
    case = BY_NAME["mean_cross_entropy"]
    with unrun():
        (graph,) = fl.explain(case.target(torch.bfloat16, "cpu"), *case.make_inputs(1024, torch.bfloat16, "cpu")).graphs
    assert graph.schedule is not None
    (rows, *others) = (p for kernels in graph.schedule.kernels for p in kernels)
    assert len(rows.stores) == 1 and rows.stores[0].shape == (1024,)
    assert others and not any(reductions(s.expr) for p in others for s in p.stores)
