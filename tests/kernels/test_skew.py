"""Tiles of which each row takes its own part: through shared memory, as they lie."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fl_pallas.kernels import skew
from fl_pallas.kernels.cubin import compile_ttir, simplified
from tests.kernels.test_cubins import kernels_of


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sides", [(64, 64), (16, 32), (32, 16), (4, 16)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axis", [0, 1])
def test_places(axis: int, sign: int, sides: tuple[int, int], dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the GPU is told to take them, of what is wider than the tile or, where they go round, narrower."""
    monkeypatch.setattr(skew, "gather", lambda row, at: row[0, at[0]])
    for gone, back in ((128, sides[1 - axis] - 1 if sign < 0 else 0), (16, -3)):
        shape = (gone, sides[1]) if axis == 0 else (sides[0], gone)
        x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
        on_gpu, plain = (skew.skewed(x, sides, axis, sign, back, interpret) for interpret in (False, True))
        assert (on_gpu == plain).all()


def banks(places: np.ndarray, size: int) -> int:
    """How many threads of a warp meet in a bank of shared memory, in which they have different words."""
    words = np.unique(places * size // 4)
    return int(np.bincount(words % 32).max())


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_no_two_threads_meet_in_a_bank(axis: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that put eight rows and every second column of a product, nor those that take theirs."""
    taken: list[np.ndarray] = []
    monkeypatch.setattr(skew, "gather", lambda row, at: taken.append(np.asarray(at[0])) or row[0, at[0]])
    sides = (64, 64)
    shape = (128, 64) if axis == 0 else (64, 128)
    dtype = jnp.float32 if size == 4 else jnp.bfloat16
    # As many numbers as bfloat16 tells apart: of each, the bits say where it was.
    x = jnp.arange(128 * 64).reshape(shape)
    skew.skewed(x.astype(dtype), sides, axis, -1, 63, False)
    places = np.empty(x.size, int)
    row, _ = skew._placed(x.astype(jnp.int32) if size == 4 else x.astype(jnp.int16), skew.FRAGMENT, [x, x])
    places[np.asarray(row[0])] = np.arange(x.size)
    row, column = np.arange(32) // 4, 2 * (np.arange(32) % 4)
    assert banks(places.reshape(shape)[row, column], size) == 1
    assert banks(taken[0].reshape(sides)[row, column], size) == 1


@pytest.mark.parametrize("name", ["xlnet", "transformer_xl"])
def test_products_are_gathered_as_they_lie(name: str) -> None:
    """What threads hold of a product goes to shared memory once, and comes back where the next one adds it."""
    ((plan, lower),) = kernels_of(name, torch.bfloat16)
    ttgir = compile_ttir(simplified(lower(plan), 90), 90).asm["ttgir"]
    made, gathered = dict[str, str](), 0
    for result, op, operand in re.findall(r"(%\w+)(?::\d+)? = ([\w.]+)(?: (%\w+))?", ttgir):
        made[result] = made[operand] if op == "tt.reshape" and made.get(operand) == "tt.gather" else op
        if op == "tt.gather":
            gathered += 1
            assert made[operand] == "tt.reshape"
        assert op != "ttg.convert_layout" or made.get(operand) != "tt.gather"
    assert gathered
