"""Sums over relative positions and over keys take the same scores, in one loop."""

from __future__ import annotations

import pytest
import torch

import fl_pallas as fl
from fl_pallas.schedule.expr import Expr, reductions
from fl_pallas.schedule.plan import Accumulator, KernelPlan
from tests.programs import BY_NAME
from tests.unrun import unrun


def of_queries(name: str, length: int) -> KernelPlan:
    """The kernel of the gradient of queries."""
    case = BY_NAME[name]
    inputs = (x.requires_grad_() for x in case.make_inputs(length, torch.bfloat16, "cpu"))
    with unrun():
        _, backward = fl.explain(case.target(torch.bfloat16, "cpu"), *inputs).graphs
    (plan,) = (p for p in backward.kernels if any(s.name == "add_3" for s in p.stores))
    return plan


@pytest.mark.parametrize("name, length", [("transformer_xl", 64), ("xlnet", 64), ("xlnet", 257)])
def test_one_loop_over_keys(name: str, length: int) -> None:
    """Scores are taken once: products of keys, of positions, and of values. Those of positions have as many, or twice
    as many, as there are keys."""
    (loop,) = of_queries(name, length).loops
    assert loop.axis.extent == length
    products: set[Expr] = {r for s in loop.steps if isinstance(s, Accumulator) for r in reductions(s.update)}
    assert len([r for r in products if loop.axis.name in str(r)]) == 3


def test_only_keys_that_a_mask_lets_through() -> None:
    """Positions that the mask asks for are the last ones, and keys the first: in one loop, both would run over all."""
    (loop,) = of_queries("transformer_xl", 257).loops
    assert loop.upper is not None
