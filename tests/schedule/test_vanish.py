"""Gradients through a maximum: none where the result does not depend on it, and by position where it does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.passes import vanish
from tests.oracle import check_gradients
from tests.test_gradients import explained
from tests.unrun import explain


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def guarded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of which nothing is left are spared a NaN."""
    s = _scores(q, k).masked_fill(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(2), -math.inf)
    m = s.max(-1, keepdim=True)[0]
    e = (s - torch.where(m.isinf(), 0.0, m)).exp()
    return e @ v / e.sum(-1, keepdim=True)


def masked_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask multiplies the weights, and a gate the result."""
    s = _scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp() * torch.ones(q.shape[-2], k.shape[-2]).tril()
    return (e / e.sum(-1, keepdim=True)) @ v * q.sigmoid()


def with_a_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.cat([_scores(q, k), q.mean(-1, keepdim=True)], -1)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True))[..., :-1] @ v


def guarded_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows that see nothing are 0: neither their maximum nor what they are divided by counts."""
    s = _scores(q, k).masked_fill(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(-3), -math.inf)
    m = s.amax(-1, keepdim=True)
    e = (s - m.masked_fill(m == -math.inf, 0)).exp()
    total = e.sum(-1, keepdim=True)
    return e @ v / torch.where(total == 0, 1.0, total)


def of_all_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    e = (s - s.max()).exp()
    return e @ v / e.sum(-1, keepdim=True)


def mean_beside(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, of which one is a logarithm."""
    s = _scores(q, k)
    m = s.amax(-1, keepdim=True)
    total = (s - m).exp().sum(-1, keepdim=True)
    return (s - m).exp() / total @ v, m + total.log()


def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Online softmax, written as a loop."""
    m = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(m), torch.zeros_like(q)
    for keys, values in zip(k.split(10, -2), v.split(10, -2), strict=True):
        s = _scores(q, keys)
        last, m = m, torch.maximum(m, s.amax(-1, keepdim=True))
        e, moved = (s - m).exp(), (last - m).exp()
        total, out = total * moved + e.sum(-1, keepdim=True), out * moved + e @ values
    return out / total


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two halves of the keys apart, joined by their logarithms."""

    def part(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        s = _scores(q, keys)
        log = s.logsumexp(-1, keepdim=True)
        return (s - log).exp() @ values, log

    (a, log_a), (b, log_b) = part(k[:, :8], v[:, :8]), part(k[:, 8:], v[:, 8:])
    log = torch.logaddexp(log_a, log_b)
    return a * (log_a - log).exp() + b * (log_b - log).exp()


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FIRE: a bias by position, with a maximum of its own whose gradient counts."""
    i = torch.arange(q.shape[-2], device=q.device).to(q.dtype)
    scale, threshold = q[0, 0, 0].abs(), k[0, 0, 0].abs()
    reach = torch.log(scale * torch.maximum(i, 4 * threshold)[:, None] + 1)
    near = torch.log(scale * (i[:, None] - i).clamp(min=0) + 1) / reach
    return (_scores(q, k) - near).softmax(-1) @ v


def guarded_by_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is divided by is 1 where another sum is 0."""
    s = _scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e @ v / e.sum(-1, keepdim=True).masked_fill((e - 1).sum(-1, keepdim=True) == 0, 1)


def one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A constant beside the exponentials: the result does depend on the maximum."""
    s = _scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e @ v / (1 + e.sum(-1, keepdim=True))


def as_a_temperature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    return (s / s.amax(-1, keepdim=True).exp()).softmax(-1) @ v


def larger_of_two(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Extrema of rows compared with each other, and with what is none."""
    s = _scores(q, k)
    top = torch.maximum(s[..., :9].amax(-1), s[..., 9:].amin(-1) + 1)
    return s.softmax(-1) @ v, torch.maximum(top, q.mean(-1))


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 19, 16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    "fn", [guarded, guarded_twice, masked_after, with_a_sink, of_all_rows, mean_beside, in_blocks, merged, distances]
)
def test_needs_no_gradient(fn: Callable[..., Tensor]) -> None:
    compiled, explanation = explained(fn, fallback="error")
    check_gradients(fn, compiled, inputs())
    assert [g.name for g in explanation.graphs] == ["forward", "backward"]
    assert not any(g.fallbacks for g in explanation.graphs), explanation


@pytest.mark.parametrize("fn", [guarded_by_another, one_more, as_a_temperature, larger_of_two])
def test_needs_one(fn: Callable[..., Tensor]) -> None:
    """The forward pass keeps where the maxima are."""
    compiled, explanation = explained(fn, fallback="error")
    check_gradients(fn, compiled, inputs())
    forward, _ = explanation.graphs
    assert any(s.dtype == "i64" for p in forward.kernels for s in p.stores), explanation


@pytest.mark.long
def test_a_mask_that_is_given_is_no_maximum(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Layers of which each masks what the one before it makes would be written out whole."""

    def layers(x: Tensor, seen: Tensor) -> Tensor:
        for _ in range(3):
            x = x + _scores(x, x).masked_fill((seen == 0)[:, None], -math.inf).softmax(-1) @ x
        return x

    def polynomial(*_: object) -> None:
        raise AssertionError("nothing here is a maximum")

    monkeypatch.setattr(vanish._Algebra, "polynomial", polynomial)
    seen = torch.ones(2, 40, dtype=torch.long, device=device)
    seen[1, 30:] = 0
    check_gradients(layers, fl.compile(layers), (torch.randn(2, 40, 16, device=device), seen))


class Experts(torch.nn.Module):
    """Layers of attention, each with a mixture of experts behind it, whose router takes the largest of a softmax."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.qkv, self.out, self.router = (
            torch.nn.ModuleList(torch.nn.Linear(width, n, bias=False) for _ in range(layers))
            for n in (3 * width, width, 4)
        )
        self.up, self.down = (
            torch.nn.ParameterList(torch.randn(4, *sides) / 8 for _ in range(layers))
            for sides in ((width, inner), (inner, width))
        )
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        for n, (qkv, out, router) in enumerate(zip(self.qkv, self.out, self.router)):
            q, k, v = (t.reshape(b, s, 4, c // 4).transpose(1, 2) for t in qkv(self.norms[2 * n](x)).chunk(3, 2))
            x = x + out((_scores(q, k).softmax(-1) @ v).transpose(1, 2).reshape(b, s, c))
            h = self.norms[2 * n + 1](x).reshape(-1, c)
            weights, at = router(h).softmax(-1).topk(2, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            t = h.repeat_interleave(2, 0)[:, None] @ self.up[n][at.flatten()]
            t = (F.silu(t) @ self.down[n][at.flatten()])[:, 0] * weights.flatten()[:, None]
            x = x + t.view(-1, 2, c).sum(1).view(b, s, c)
        return x


@pytest.mark.long
def test_the_search_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of sums are found by trying the orders of their axes, which takes steps as all else does."""
    renamed, calls = vanish._renamed, 0

    def counted(*given: object) -> object:
        nonlocal calls
        calls += 1
        return renamed(*given)

    monkeypatch.setattr(vanish, "_renamed", counted)
    explain(Experts(2, 64, 32), torch.randn(2, 27, 64))
    assert calls < 3 * vanish.MAX_STEPS
