"""What kernels hand on to each other is given back as soon as nothing reads it any more."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fl_pallas.bridge.splice import RegionRunner
from fl_pallas.schedule.expr import Axis, const
from fl_pallas.schedule.plan import Choices, KernelPlan, Store

ROWS = Axis("x0", 4)


def plan(*names: str) -> KernelPlan:
    stores = tuple(Store(n, (ROWS,), "f32", const(0.0, "f32")) for n in names)
    return KernelPlan(names[0], (ROWS,), (), (), stores, "f32", Choices(((ROWS, 4),)))


def test_intermediates_are_given_back() -> None:
    """a -> b, c; b -> d; c, d -> e: b is gone when e is made; so is what none reads."""
    made: dict[str, weakref.ref[Tensor]] = {}
    alive: list[set[str]] = []

    def kernel(*names: str):
        def run(given: Sequence[Tensor]) -> list[Tensor]:
            alive.append({n for n, r in made.items() if r() is not None})
            results = [sum(given, torch.zeros(4)) for _ in names]
            made.update({n: weakref.ref(t) for n, t in zip(names, results, strict=True)})
            return results

        return run

    stored = [("b", "c", "unread"), ("d",), ("e",)]
    runner = RegionRunner(["e"], [plan(*n) for n in stored], [kernel(*n) for n in stored], [["a"], ["b"], ["c", "d"]])
    for _ in range(2):
        alive.clear()
        (result,) = runner(torch.ones(4))
        assert result.tolist() == [2.0] * 4
        assert [names - {"e"} for names in alive] == [set(), {"b", "c"}, {"c", "d"}]
    assert {n for n, r in made.items() if r() is not None} == {"e"}


def test_results_and_operands_are_kept() -> None:
    runner = RegionRunner(
        ["b", "c"], [plan("b"), plan("c")], [lambda t: [t[0] + 1], lambda t: [t[0] + t[1]]], [["a"], ["a", "b"]]
    )
    given = torch.zeros(4)
    b, c = runner(given)
    assert b.tolist() == c.tolist() == [1.0] * 4 and given.tolist() == [0.0] * 4
