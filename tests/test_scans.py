"""Running sums of scores in places of their own."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl

from .corpus.case import Case
from .corpus.scans import CASES
from .oracle import check_gradients, run_and_check
from .unrun import unrun


def _sums(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).cumsum(-1) * 0.1


def from_the_own_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sums from the row's own position on: those of the diagonal are taken off."""
    c = _sums(q, k)
    return (c - c.diagonal(dim1=-2, dim2=-1)[..., None]).sigmoid() @ v


def looked_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    c = _sums(q, k)
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    return (c - c.gather(-1, i.expand(*c.shape[:-1], 1))).sigmoid() @ v


def returned_diagonal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    c = _sums(q.flip(-2), k)
    return c.softmax(-1) @ v, c.diagonal(dim1=-2, dim2=-1)


def of_shifted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores with ALiBi, shifted by one key before they are summed up."""
    i, j = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
    s = q @ k.mT * 0.3 - (i[:, None] - j).abs().to(q.dtype) * 0.1
    return F.pad(s, (1, 0))[..., :-1].cumsum(-1).softmax(-1) @ v


def without_the_key_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a key of no weight (log 0) leaves is what was before it."""
    s = (q @ k.mT * 0.3).masked_fill(torch.ones_like(q @ k.mT, dtype=torch.bool).triu(3), -torch.inf)
    return F.pad(F.logsigmoid(s).cumsum(-1)[..., :-1], (1, 0)).exp() @ v


def of_what_few_keys_have(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Behind the first keys tiles have nothing to add."""
    s = F.softplus(q @ k.mT * 0.3) * (torch.arange(k.shape[-2], device=q.device) < 5)
    return s.softmax(-1).flip(-1).cumsum(-1).flip(-1) @ v


def of_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * 0.3
    half = s.shape[-1] // 2
    return torch.cat([s[..., :half], s[..., half:] * 0.5], -1).cumsum(-1).mul(0.1).softmax(-1) @ v


def decayed_by_what_is_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """AKT's distances (Ghosh et al., 2020): the root of what later keys weigh, by how far they are."""
    i = torch.arange(q.shape[-2], device=q.device)
    s, seen, apart = q @ k.mT * 0.3, i[:, None] > i, (i[:, None] - i).abs()
    with torch.no_grad():
        weights = s.masked_fill(~seen, -1e32).softmax(-1) * seen
        left = weights.sum(-1, keepdim=True) - weights.cumsum(-1)
        decay = -(left * apart).clamp(min=0).sqrt()
    return (s * decay.exp().clamp(1e-5, 1e5)).masked_fill(~seen, -1e32).softmax(-1)[..., 1:, :] @ v


def what_is_left_and_the_own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = (q @ k.mT * 0.3).sigmoid()
    return ((x + x.sum(-1, keepdim=True) - x.cumsum(-1)).sqrt() * -0.2).softmax(-1) @ v


def what_came_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the sums from the end leave of the first row's total."""
    x = (q @ k.mT * 0.3).sigmoid()
    from_the_end = x.flip(-1).cumsum(-1).flip(-1)
    return ((from_the_end[..., :1] - from_the_end) * -0.2).softmax(-1) @ v


def left_of_rows_that_see_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Their weights are NaN, and so is what is left, behind the last key too."""
    i = torch.arange(q.shape[-2], device=q.device)
    weights = (q @ k.mT * 0.3).masked_fill(i[:, None] <= i, -torch.inf).softmax(-1)
    return (weights.sum(-1, keepdim=True) - weights.cumsum(-1)) @ v


def root_of_what_came_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nothing comes before the first key, and its sign is 0."""
    s = q @ k.mT * 0.3
    i = torch.arange(q.shape[-2], device=q.device)
    x = (s * ((i[:, None] - i).abs() < 9)).sigmoid()
    before = x.cumsum(-1) - x
    return (s - (before.abs() + 1e-2).sqrt()).masked_fill(i[:, None] < i, -1e9).softmax(-1) @ v


def what_is_left_times_minus_1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    x = (q @ k.mT * 0.3).relu() * (i[:, None] > i)
    left = -(x.cumsum(-1) - x.sum(-1, keepdim=True))
    return (left.abs() * -0.2).exp().masked_fill(i[:, None] < i, -torch.inf).softmax(-1) @ v


def of_a_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sums from the end of all keys but the first, less the first of them."""
    x = (q @ k.mT * 0.3).sigmoid()
    from_the_end = x.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    return ((from_the_end[..., :1] - from_the_end) * -0.2).softmax(-1) @ v[..., 1:, :]


def behind_all_but_the_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * 0.3
    x = s.sigmoid()
    behind = x.flip(-1).cumsum(-1).flip(-1)[..., 1:] - x[..., 1:]
    return (s[..., 1:] - behind * 0.2).softmax(-1) @ v[..., 1:, :] + behind.mean(-1, keepdim=True)


def of_counts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """How many keys behind this one are like the query."""
    alike = (q @ k.mT > 0).long()
    left = alike.sum(-1, keepdim=True) - alike.cumsum(-1)
    return (q @ k.mT * 0.3 - left * 0.1).softmax(-1) @ v


PROGRAMS = (
    of_a_part,
    behind_all_but_the_first,
    of_counts,
    root_of_what_came_before,
    what_is_left_times_minus_1,
    decayed_by_what_is_left,
    what_is_left_and_the_own,
    what_came_before,
    left_of_rows_that_see_nothing,
    of_what_few_keys_have,
    of_halves,
    from_the_own_place,
    looked_up,
    returned_diagonal,
    of_shifted_scores,
    without_the_key_itself,
)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # sums looked up along rows are PyTorch's
@pytest.mark.parametrize("length", [24, 150])
@pytest.mark.parametrize("program", PROGRAMS)
def test_in_places(program: Callable[..., Tensor], length: int, device: torch.device) -> None:
    made = torch.Generator().manual_seed(length)
    inputs = tuple(torch.randn(2, 2, length, 16, generator=made).to(device) for _ in range(3))
    run_and_check(program, fl.compile(program, dynamic=False), inputs)
    check_gradients(program, fl.compile(program, dynamic=False), inputs)


@pytest.mark.parametrize(
    ("program", "sums"),
    [
        (decayed_by_what_is_left, "less_back"),
        (what_is_left_and_the_own, "running_back"),
        (what_came_before, "less"),
        (root_of_what_came_before, "less"),
        (what_is_left_times_minus_1, "less_back"),
        (left_of_rows_that_see_nothing, "less_back"),
    ],
)
def test_what_is_left_is_summed(program: Callable[..., Tensor], sums: str) -> None:
    """And not what remains of a total, where most cancels."""
    with unrun():
        explanation = fl.explain(program, *(torch.randn(2, 2, 150, 16) for _ in range(3)))
    (graph,) = explanation.graphs
    assert graph.kernels and not graph.fallbacks
    assert {*re.findall(r"\b(later|earlier|(?:running|less)(?:_back)?)\(", str(explanation))} == {sums}


@pytest.mark.parametrize("length", [150, 256])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_training_fuses(case: Case, length: int) -> None:
    """Blocks are a part of an index, and what is known of it in one is known of all that it sums up there."""
    inputs = (x.requires_grad_() for x in case.make_inputs(length, torch.float32, "cpu"))
    with unrun():
        explanation = fl.explain(case.fn, *inputs)
    for graph in explanation.graphs:
        assert graph.kernels and not graph.fallbacks, str(explanation)
