"""Sums over both sides of the same pairs in one kernel, where a tile has all of one side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels.fit import SPILL
from fl_pallas.kernels.sizes import Laid, generalise, laid, programs_of
from fl_pallas.kernels.tile import seen
from fl_pallas.kernels.triton import TensorSpec, contiguous, grid_size
from fl_pallas.schedule.plan import KernelPlan, held_whole, operand_names
from tests.kernels import test_sizes
from tests.kernels.test_cubins import compiled, kernels_made
from tests.oracle import check_gradients
from tests.unrun import explain


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.2).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(t.shape[-2], device=t.device) for t in (q, k))
    return (q @ k.mT * 0.2).masked_fill(i[:, None] < j, -torch.inf).softmax(-1) @ v


def squares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores divided by the sum of each row, and by that of each column before."""
    s = torch.relu(q @ k.mT) ** 2
    s = s / (1 + s.sum(-2, keepdim=True))
    return s / (1 + s.sum(-1, keepdim=True)) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.2 + bias).softmax(-1) @ v


def made(queries: int, keys: int, features: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(2, 2, n, features) for n in (queries, keys, keys)]
    return [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]


def joined(plans: tuple[KernelPlan, ...]) -> list[KernelPlan]:
    return [p for p in plans if held_whole(p)]


@pytest.mark.parametrize(
    ("fn", "queries", "keys", "kernels"),
    [
        (plain, 50, 50, 1),
        (plain, 300, 77, 1),  # several tiles of queries
        (plain, 77, 300, 1),  # of keys
        (plain, 2100, 40, 2),  # shared out to several programs, and merged
        (causal, 60, 60, 1),
        (squares, 60, 50, None),
    ],
)
def test_gradients_of_all_operands_are_one_kernels(
    fn: Callable[..., Tensor], queries: int, keys: int, kernels: int | None, device: torch.device
) -> None:
    inputs = made(queries, keys, 32, device, torch.bfloat16)
    _, backward = explain(fn, *inputs).graphs
    assert joined(backward.kernels) and kernels in (None, len(backward.kernels))
    check_gradients(fn, fl.compile(fn), inputs)


def test_a_shared_bias_has_a_kernel_of_its_own(device: torch.device) -> None:
    """Its gradient is a sum over heads' batches; the other gradients stay together."""
    bias = torch.randn(2, 49, 49, device=device, dtype=torch.bfloat16, requires_grad=True)
    inputs = [*made(49, 49, 32, device, torch.bfloat16), bias]
    _, backward = explain(biased, *inputs).graphs
    assert len(joined(backward.kernels)) == 1
    check_gradients(biased, fl.compile(biased), inputs)


def by_height_and_width(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Keys of an image, 12 wide; scores with a term for each of its rows, and one for each of its columns."""
    scores = (q @ k.mT * 0.2).unflatten(-1, (-1, 12)) + rows[..., None] + columns[..., None, :]
    return scores.flatten(-2).softmax(-1) @ v


def test_sums_by_height_by_width_and_over_all_are_one_kernels(device: torch.device) -> None:
    """A loop over rows of keys adds up what goes to each column, and to queries, and has what goes to its row."""
    extra = [torch.randn(2, 2, 200, n, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (16, 12)]
    inputs = [*made(200, 16 * 12, 32, device, torch.bfloat16), *extra]
    _, backward = explain(by_height_and_width, *inputs).graphs
    (found,) = joined(backward.kernels)
    large = [s for s in found.stores if s.dtype == "bf16"]
    assert len(large) == 3 and len(backward.kernels) <= 3
    check_gradients(by_height_and_width, fl.compile(by_height_and_width), inputs)


@pytest.mark.parametrize(
    ("keys", "dtype"), [(300, torch.bfloat16), (50, torch.float32)], ids=["too many keys", "32 bits"]
)
def test_what_takes_too_many_registers_stays_apart(keys: int, dtype: torch.dtype) -> None:
    _, backward = explain(plain, *made(300, keys, 32, torch.device("cpu"), dtype)).graphs
    assert len(backward.kernels) > 1 and not joined(backward.kernels)


def test_mixed_heads_stay_apart() -> None:
    """All heads' scores are made one after another; for both sides at once Triton has no end of them to compile."""

    def talking(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
        return torch.einsum("bhij,hg->bgij", q @ k.mT * 0.2, mix).softmax(-1) @ v

    inputs = [torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in (*[(2, 4, 96, 32)] * 3, (4, 4))]
    _, backward = explain(talking, *inputs).graphs
    assert not joined(backward.kernels)


@pytest.mark.parametrize("shape", [(50, 50, 64), (300, 128, 64), (128, 128, 128)])
def test_compiles_without_spills(shape: tuple[int, int, int]) -> None:
    kernels = kernels_made(plain, made(*shape, torch.device("cpu"), torch.bfloat16))
    (found,) = [(plan, lower) for plan, lower in kernels if held_whole(plan)]
    cubin = compiled(*found, 90)
    assert cubin.stack <= SPILL and "wgmma" in cubin.asm["ptx"]


def backward(queries: int, keys: int) -> Laid:
    """The kernel of the gradients of so many queries and keys."""
    torch.compiler.reset()  # or a graph of several lengths is captured
    inputs = made(queries, keys, 32, torch.device("cpu"), torch.bfloat16)
    explanation = explain(plain, *inputs)
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    for graph in explanation.graphs:
        assert graph.schedule is not None
        known |= {v.name: (v.shape, v.dtype) for v in (*graph.schedule.program.values, *graph.schedule.program.facts)}
        known |= {s.name: (s.shape, s.dtype) for p in graph.kernels for s in p.stores}
    (plan,) = joined(explanation.graphs[-1].kernels)
    return laid(plan, tuple(contiguous(*known[n]) for n in operand_names(plan)))


@pytest.mark.parametrize(
    ("first", "second", "others"),
    [((200, 70), (200, 110), ((200, 40), (200, 90))), ((50, 50), (110, 110), ((60, 60), (100, 100)))],
    ids=["keys", "tokens"],
)
def test_one_kernel_for_all_sizes_that_a_tile_holds(
    first: tuple[int, int],
    second: tuple[int, int],
    others: Sequence[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def positive(specs: Sequence[TensorSpec]) -> list[jax.Array]:
        """Numbers that may be sums of exponentials."""
        random = np.random.default_rng(0)
        return [jnp.asarray(random.uniform(0.5, 1.5, math.prod(map(seen, s.shape))), s.stored) for s in specs]

    monkeypatch.setattr(test_sizes, "data", positive)
    many = generalise(backward(*first), backward(*second))
    for sizes in others:
        own = backward(*sizes)
        assert programs_of(many, own) == grid_size(own.plan)
        for got, want in zip(test_sizes.by(many, own), test_sizes.alone(own), strict=True):
            assert np.isfinite(want.astype(np.float32)).all()
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2**-7)
