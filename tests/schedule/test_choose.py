"""The order in which choices are tried."""

from __future__ import annotations

import math

import torch

from fl_pallas.schedule.plan import Choices
from tests.corpus.basic import vanilla
from tests.plan_evaluate import captured


def row_tiles(heads: int, length: int) -> list[int]:
    """Sides of the tiles of queries, best first."""
    shape = 1, heads, length, 64
    ((plan,),) = captured(vanilla, [torch.randn(shape, dtype=torch.bfloat16) for _ in range(3)]).made.kernels
    (row,) = [a for a in plan.grid if a.extent == length]

    def side(c: Choices) -> int:
        return math.prod(n for a, n in c.tiles if a == row)

    return [side(c) for c in (plan.choices, *plan.others)]


def test_idle_processors_want_narrow_tiles() -> None:
    few, many = row_tiles(8, 256), row_tiles(64, 256)
    assert few[0] == many[0] == 64  # the model's pick is the same
    assert max(few[1:5]) == 32 and min(many[1:5]) == 64
