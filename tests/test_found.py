"""What random programs found: each of these was an error of the compiler once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl

from .kernels.test_cubins import kernels_made
from .oracle import check_gradients, run_and_check

pytestmark = pytest.mark.usefixtures("repeated")


def positions_of_features(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Features of keys are computed, and a window of them is a side of a product by distance."""
    q = F.elu(q) + 1
    k, v = (F.elu(k) + 1).repeat_interleave(4, 1), v.repeat_interleave(4, 1)
    scores = torch.tanh(0.1 * (q @ k.mT) * torch.sigmoid(0.1 * (q.flip(-1) @ k.mT)))
    distance = torch.arange(q.shape[-2], device=q.device)[:, None] - torch.arange(k.shape[-2], device=q.device)
    return (scores + table[distance.clamp(-16, 16) + 16].permute(2, 0, 1)).softmax(-1) @ v


def heads_mixed(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """A side of a product has a head, of which a sum over heads takes one at a time."""
    distance = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    weights = torch.exp(-distance.clamp(max=10))
    weights = torch.einsum("bhij,hg->bgij", weights / (1 + weights.sum(-1, keepdim=True)), mix)
    entropy = (weights.abs() * torch.log(weights.abs() + 1e-6)).sum(-1)
    return F.rms_norm(weights @ v, (v.shape[-1],)), entropy


def two_of_which_one_forgets(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, share: Tensor) -> Tensor:
    """A row's sum stands in several kernels, and is corrected once."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    kept = gates.cumsum(-1)
    scores = q @ k.mT + (kept[..., : q.shape[-2], None] - kept[..., None, : k.shape[-2]])
    other = (q.roll(1, -1) @ k.mT).softmax(-1)
    return ((scores.softmax(-1) - other * share) @ v).transpose(1, 2)


def shifted_rows(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The copy engine would bring what rows have from the one before on, at an address that it does not take."""
    batch, heads, length, _ = q.shape
    by_place = F.pad(q @ positions.mT, (1, 0)).view(batch, heads, length + 1, length)[:, :, 1:]
    i = torch.arange(length, device=q.device)
    scores = (q @ k.mT + by_place.view_as(q @ k.mT)) * q.shape[-1] ** -0.5
    return scores.masked_fill((i[:, None] - i).abs() >= 20, -torch.inf).softmax(-1) @ v


def keys_of_a_group(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, weights: Tensor, marks: Tensor) -> Tensor:
    """Gradients of keys, and of pairs through a layer, have axes of one kernel."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.mT * 0.125 - 0.0625 * (k * k).sum(-1)[..., None, :] + torch.einsum("ijc,ch->hij", pairs, weights)
    i = torch.arange(q.shape[-2], device=q.device)
    seen = (marks[:, None] > 0) == (marks > 0)
    return scores.masked_fill(~(seen | (i[:, None] == i)), -torch.inf).softmax(-1) @ v


SHAPES: dict[Callable, Sequence[tuple[int, ...]]] = {
    positions_of_features: ((2, 8, 128, 128), (2, 2, 257, 128), (2, 2, 257, 128), (33, 8)),
    heads_mixed: ((1, 2, 64, 32), (1, 1, 64, 32), (1, 1, 64, 16), (2, 2)),
    keys_of_a_group: ((1, 2, 128, 64), (1, 1, 128, 64), (1, 1, 128, 64), (128, 128, 4), (4, 2), (128,)),
    shifted_rows: ((1, 2, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16), (2, 64, 16)),
    two_of_which_one_forgets: ((2, 300, 2, 40), (2, 257, 2, 40), (2, 257, 2, 40), (2, 2, 300), (2, 1, 1)),
}
each = pytest.mark.parametrize("fn", SHAPES, ids=lambda fn: fn.__name__)


def inputs_of(fn: Callable, device: str | torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES[fn]]
    return [x.to(device, torch.bfloat16) for x in drawn]


@each
def test_is_written_for_a_gpu(fn: Callable) -> None:
    made = kernels_made(fn, [x.requires_grad_() for x in inputs_of(fn, "cpu")])
    assert made
    assert all(lower(plan).ttir for plan, lower in made)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # what is fused in parts
@each
def test_gradients(fn: Callable, device: torch.device) -> None:
    inputs = inputs_of(fn, device)
    run_and_check(fn, fl.compile(fn), inputs)
    check_gradients(fn, fl.compile(fn), inputs)
