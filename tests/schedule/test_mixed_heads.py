"""Heads that are mixed before and after the softmax, and back: how the work is shared out, and that it is right so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import Expr, Load, Op, Reduce, children, walk
from fl_pallas.schedule.passes import choose, hold, lay_out, roles, weigh
from fl_pallas.schedule.plan import Accumulator, KernelPlan
from tests.corpus.research import mixed_heads
from tests.corpus.scores import talking_heads
from tests.oracle import check_gradients, run_and_check
from tests.unrun import unrun

HEADS, DIM = 8, 64


def inputs(batch: int, length: int, mixes: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(length)
    qkv = [torch.randn(batch, HEADS, length, DIM, dtype=dtype) for _ in range(3)]
    mixing = [torch.randn(HEADS, HEADS, dtype=dtype) / math.sqrt(HEADS) for _ in range(mixes)]
    return [t.to(device).requires_grad_() for t in (*qkv, *mixing)]


def planned(fn: object, given: list[Tensor]) -> list[KernelPlan]:
    with unrun():
        return [plan for graph in fl.explain(fn, *given).graphs for plan in graph.kernels]


@pytest.fixture(scope="module")
def kernels() -> list[KernelPlan]:
    return planned(mixed_heads, inputs(8, 2048, 2, torch.bfloat16))


def expressions(kernels: list[KernelPlan]) -> list[Expr]:
    updates = [s.update for plan in kernels for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    return [*updates, *(s.expr for plan in kernels for s in plan.stores)]


@pytest.mark.long
def test_scores_are_made_before_heads_are_mixed(kernels: list[KernelPlan]) -> None:
    """No program makes the scores of all heads anew: heads are mixed of what is stored."""
    sums = [n for e in expressions(kernels) for n in walk(e) if isinstance(n, Reduce)]
    mixing = [r for r in sums if r.axis.extent == HEADS]
    assert mixing and not any(n.axis.extent == DIM for r in mixing for n in walk(r.body) if isinstance(n, Reduce))


@pytest.mark.long
def test_matrices_of_heads_lie_one_after_another(kernels: list[KernelPlan]) -> None:
    large = [s.shape for plan in kernels for s in plan.stores if math.prod(s.shape) == 8 * HEADS * 2048 * 2048]
    assert large and all(shape[-1] == 2048 for shape in large)


@pytest.mark.long
def test_few_rows_of_mixed_heads_are_no_tile(kernels: list[KernelPlan]) -> None:
    """A row of keys for all heads is too little for a program, where there are many."""
    for plan in kernels:
        tiles = dict(plan.choices.tiles)
        programs = math.prod(-(-a.extent // (tiles.get(a) or 1)) for a in plan.grid)
        mixing = any("bf16" == s.dtype and math.prod(s.shape) == 8 * HEADS * 2048 * 2048 for s in plan.stores)
        if mixing and any(a.extent == HEADS and tiles[a] > 1 for a in plan.grid):
            assert math.prod(tiles[a] for a in plan.grid) >= 2048 and programs < 100_000, (plan.name, tiles)


@pytest.mark.long
def test_scores_are_stored_as_their_normaliser_is(kernels: list[KernelPlan]) -> None:
    """Mixed scores of 16 bits, about a logarithm of 32 bits, gave weights that do not add up to 1: twice the error."""

    def exponents(e: Expr) -> list[Load]:
        if isinstance(e, Load):
            return [e]
        return [] if isinstance(e, Reduce) else [n for c in children(e) for n in exponents(c)]

    nodes = [n for e in expressions(kernels) for n in walk(e)]
    powers = [n for n in nodes if isinstance(n, Op) and n.name in ("exp", "exp2")]
    found = [n for p in powers for n in exponents(p)]
    assert found and {n.dtype for n in found} == {"f32"}


def talking(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor) -> Tensor:
    scores = torch.einsum("gh,bhij->bgij", before, q @ k.mT * q.shape[-1] ** -0.5)
    i = torch.arange(q.shape[-2], device=q.device)
    weights = scores.masked_fill(i > i[:, None], -math.inf).softmax(-1)
    return torch.einsum("gh,bhij->bgij", after, weights) @ v


@pytest.fixture(scope="module")
def sixteen_heads() -> list[KernelPlan]:
    """Of the backward pass: mixing is a sum of so many products that no kernel takes it twice."""
    qkv = [torch.randn(2, 16, 2048, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    mixing = [torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    with unrun():
        return list(fl.explain(talking, *qkv, *mixing).graphs[-1].kernels)


PAIRS = 2 * 16 * 2048 * 2048


@pytest.mark.long
def test_each_matrix_of_pairs_is_stored_once(sixteen_heads: list[KernelPlan]) -> None:
    """Scores, weights and mixed weights, and the gradient of each, in PyTorch's own 16 bits; none of them is copied."""
    found = [(s.dtype, s.expr) for p in sixteen_heads for s in p.stores if math.prod(s.shape) == PAIRS]
    assert len(found) == 6 and {dtype for dtype, _ in found} == {"bf16"}
    assert not any(isinstance(e, Load) for _, e in found)


@pytest.mark.long
def test_tiles_of_pairs_are_long_in_memory(sixteen_heads: list[KernelPlan]) -> None:
    for plan in sixteen_heads:
        for s in plan.stores:
            wide = plan.choices.tile(s.axes[-1]) if math.prod(s.shape) == PAIRS else 64
            assert wide == 64, plan.name


@pytest.mark.long
def test_mixing_gradients_take_one_pass(sixteen_heads: list[KernelPlan]) -> None:
    """The row's sum in the gradient of scores is loaded."""
    pairs = [p for p in sixteen_heads if any(s.shape[-1] == 2048 and s.shape.count(16) == 2 for s in p.stores)]
    assert [len(p.loops) for p in pairs] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [talking_heads, mixed_heads, talking])
@pytest.mark.filterwarnings("ignore::fl_pallas.errors.FallbackWarning")
def test_right(fn: object, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of long sequences, for a short one."""
    monkeypatch.setattr(hold, "SAVED", -1e12)
    monkeypatch.setattr(hold, "TIMES", 0)
    monkeypatch.setattr(weigh, "LAUNCH", 0)
    monkeypatch.setattr(choose, "FEW", 0.01)
    monkeypatch.setattr(roles, "MANY_ROWS", 1)
    given = inputs(2, 70, 1 if fn is talking_heads else 2, dtype, str(device))
    rows = [a for plan in planned(fn, given) for a, n in plan.choices.tiles if a.extent == 70 and n in (2, 4, 8)]
    assert rows or dtype == torch.float32, "no tile has several rows"
    torch._dynamo.reset()
    check_gradients(fn, fl.compile(fn), given)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::fl_pallas.errors.FallbackWarning")
def test_sixteen_heads_are_right(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are stored between kernels, in 16 bits if they are of that."""
    monkeypatch.setattr(hold, "SAVED", -1e12)
    monkeypatch.setattr(hold, "TIMES", 0)
    monkeypatch.setattr(weigh, "LAUNCH", 0)
    monkeypatch.setattr(lay_out, "LAUNCH", 0)
    torch.manual_seed(0)
    qkv = [torch.randn(1, 16, 48, 16, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    mixing = [(0.3 * torch.randn(16, 16, dtype=dtype, device=device)).requires_grad_() for _ in range(2)]
    with unrun():
        plans = fl.explain(talking, *qkv, *mixing).graphs[-1].kernels
    stored = [s for p in plans for s in p.stores if math.prod(s.shape) == 16 * 48 * 48]
    powers = [s.dtype for s in stored if any(isinstance(n, Op) and n.name == "exp" for n in walk(s.expr))]
    assert "bf16" in powers or dtype == torch.float32
    torch._dynamo.reset()
    check_gradients(talking, fl.compile(talking), [*qkv, *mixing])


def mixed_channels(q: Tensor, k: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """The scores of heads become channels, which a gate sums: q, k [h,s,d], w [c,h], u [c]."""
    channels = torch.einsum("hij,ch->ijc", torch.exp(q @ k.mT / q.shape[-1]), w)
    return (torch.tanh(channels) @ u).sum(1)


def test_channels_and_features_are_as_many(device: torch.device) -> None:
    """A sum of channels, one at a time, has a product inside whose axis goes by the same name."""
    shapes = (2, 33, 8), (2, 33, 8), (8, 2), (8,)
    given = tuple(torch.randn(shape, device=device) for shape in shapes)
    run_and_check(mixed_channels, fl.compile(mixed_channels, fallback="error"), given)


def with_averaged_weights(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bhij,hg->bgij", q @ k.mT / 4, mixing).softmax(-1)
    return weights @ v, weights.mean(1)


def test_weights_of_mixed_heads_read_the_row_sums_that_are_stored_before(device: torch.device) -> None:
    """A kernel that borrows scores from another stays behind a third that stores what it loads."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, 37, 16), (1, 2, 41, 16), (1, 2, 41, 16), (2, 2)
    given = [torch.randn(s, generator=generator).to(device) for s in shapes]
    check_gradients(with_averaged_weights, fl.compile(with_averaged_weights), given)
