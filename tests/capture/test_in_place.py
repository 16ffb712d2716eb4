"""What a graph writes to a product of its own, in another order of dimensions: PyTorch cannot trace its gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.capture.in_place import out_of_place
from tests.oracle import check_gradients


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("nlhd,nshd->nlsh", q, k)


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """LoFTR's attention."""
    scores = scores_of(q, k)
    scores.masked_fill_(~keep[:, None, :, None], -math.inf)
    return torch.einsum("nlsh,nshd->nlhd", torch.softmax(scores / 4, dim=2), v)


def one_after_another(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = scores_of(q, k)
    before = scores.sum(2)
    scores *= 0.25
    scores += keep[:, None, :, None]
    scores.masked_fill_(~keep[:, None, :, None], -math.inf)
    return torch.einsum("nlsh,nshd->nlhd", scores.softmax(2), v) + before[..., None]


def seen_through_a_view(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = scores_of(q, k)
    first = scores[:, :, :3]
    scores *= 0.25
    return torch.einsum("nlsh,nshd->nlhd", scores.softmax(2), v) + first.sum(2)[..., None]


def needed_by_a_gradient(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    before = scores.exp_().square()
    scores *= 0.25
    return before @ v.transpose(1, 2)


def made(device: torch.device) -> list[Tensor]:
    keep = torch.arange(40, device=device) < torch.tensor([[40], [31]], device=device)
    return [*(torch.randn(2, 40, 2, 16, device=device) for _ in range(3)), keep]


@pytest.mark.parametrize("fn", [masked, one_after_another])
def test_fuses(fn: Callable, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn, fallback="error"), made(device))


def test_a_view_that_is_read_later(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        check_gradients(seen_through_a_view, fl.compile(seen_through_a_view), made(device))


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning", "ignore:Error detected in:UserWarning")
def test_what_autograd_refuses_stays_refused(device: torch.device) -> None:
    *floats, keep = made(device)
    for fn in (needed_by_a_gradient, fl.compile(needed_by_a_gradient)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fn(*(x.requires_grad_() for x in floats), keep).sum().backward()


def captured(fn: Callable) -> torch.fx.GraphModule:
    graphs = []

    def keep(gm: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(gm)
        return gm.forward

    torch.compile(fn, backend=keep)(*made(torch.device("cpu")))
    return graphs[0]


def test_what_is_written_is_new() -> None:
    plain = out_of_place(captured(one_after_another))
    assert plain is not None
    names = [str(n.target) for n in plain.graph.nodes if n.op.startswith("call")]
    assert not any(n.endswith("_") or "iadd" in n or "imul" in n for n in names)


def test_views_and_inputs_stay() -> None:
    def to_an_input(q: Tensor, *_: Tensor) -> Tensor:
        q *= 2
        return q + 1

    assert out_of_place(captured(seen_through_a_view)) is None
    assert out_of_place(captured(to_an_input)) is None
