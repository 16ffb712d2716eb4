"""Running sums of scores in places of their own."""

from __future__ import annotations

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


PROGRAMS = (
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


@pytest.mark.parametrize("length", [150, 256])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_training_fuses(case: Case, length: int) -> None:
    """Blocks are a part of an index, and what is known of it in one is known of all that it sums up there."""
    inputs = (x.requires_grad_() for x in case.make_inputs(length, torch.float32, "cpu"))
    with unrun():
        explanation = fl.explain(case.fn, *inputs)
    for graph in explanation.graphs:
        assert graph.kernels and not graph.fallbacks, str(explanation)
