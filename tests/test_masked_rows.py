"""Rows of which a mask leaves nothing, and what is made of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fl_pallas as fl

from .oracle import check_gradients, run_and_check
from .unrun import explain

Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


def _renormalised(s: Tensor, keep: Tensor, v: Tensor) -> Tensor:
    w = s.softmax(-1).masked_fill(~keep, 0)
    return (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v


def _entropy(s: Tensor, keep: Tensor, v: Tensor) -> Tensor:
    w = s.softmax(-1)
    return -(w * (w + 1e-6).log()).sum(-1)


FORMS: dict[str, Weights] = {
    "filled with 0": lambda s, keep, v: s.softmax(-1).masked_fill(~keep, 0) @ v,
    "chosen": lambda s, keep, v: torch.where(keep, s.softmax(-1), 0.0) @ v,
    "multiplied": lambda s, keep, v: (s.softmax(-1) * keep) @ v,
    "moved first": lambda s, keep, v: (s - 200).softmax(-1).masked_fill(~keep, 0) @ v,
    "scaled": lambda s, keep, v: (s * 0.5 + 1).softmax(-1).masked_fill(~keep, 0) @ v,
    "other keys chosen": lambda s, keep, v: s.softmax(-1).masked_fill(keep.flip(-1), 0) @ v,
    "no NaN": lambda s, keep, v: s.softmax(-1).nan_to_num(0) @ v,
    "by logarithms": lambda s, keep, v: s.log_softmax(-1).exp() @ v,
    "by logsumexp": lambda s, keep, v: (s - s.logsumexp(-1, keepdim=True)).exp().masked_fill(~keep, 0) @ v,
    "by logsumexp, others": lambda s, keep, v: torch.where(keep.flip(-1), (s - s.logsumexp(-1, True)).exp(), 0.1) @ v,
    "by logsumexp, lower half": lambda s, keep, v: (s - s.logsumexp(-1, keepdim=True)).exp().tril() @ v,
    "above a threshold": lambda s, keep, v: torch.where(s.softmax(-1) > 0.01, s.softmax(-1), 0.0) @ v,
    "squared": lambda s, keep, v: s.softmax(-1).square() @ v,
    "rooted": lambda s, keep, v: (s.softmax(-1) + 1e-3).sqrt() @ v,
    "clamped": lambda s, keep, v: s.softmax(-1).clamp(0.001, 0.2) @ v,
    "renormalised": _renormalised,
    "twice": lambda s, keep, v: s.softmax(-1).softmax(-1) @ v,
    "entropy": _entropy,
    "variance": lambda s, keep, v: s.softmax(-1).var(-1),
    "ratio": lambda s, keep, v: (s.softmax(-1) / (1 + s.softmax(-1))) @ v,
    "sum of logarithms": lambda s, keep, v: s.log_softmax(-1).masked_fill(~keep, 0).sum(-1),
    "sum of columns": lambda s, keep, v: s.softmax(-1).masked_fill(~keep, 0).sum(-2),
}
LOW = {"-inf": -torch.inf, "-1e4": -1e4, "-1e9": -1e9, "least": torch.finfo(torch.float32).min}


def _program(form: str, low: str) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return FORMS[form]((q @ k.mT).masked_fill(~keep, LOW[low]), keep, v)

    return attention


def _inputs(device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v [2,2,50,16] and what is seen of keys: nothing by seven rows."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(2, 1, 50, 50, generator=generator) > 0.3
    keep[0, :, :7] = False
    return *(x.to(device) for x in torch.randn(3, 2, 2, 50, 16, generator=generator)), keep.to(device)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("form", FORMS)
def test_results_of_rows_that_see_nothing(form: str, low: str, device: torch.device) -> None:
    fn = _program(form, low)
    run_and_check(fn, fl.compile(fn, dynamic=False), _inputs(device), name=f"{form}, {low}")


@pytest.mark.parametrize("low", ["-inf", "-1e9"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_rows_that_see_nothing(form: str, low: str, device: torch.device) -> None:
    fn = _program(form, low)
    check_gradients(fn, fl.compile(fn, dynamic=False), _inputs(device), name=f"{form}, {low}")


def test_gradients_of_what_scales_rows_that_see_nothing(device: torch.device) -> None:
    """A sum over all rows is not asked for the exact sums of those that are chosen away."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, t: Tensor) -> Tensor:
        out = (q @ k.mT * t).masked_fill(~keep, -torch.inf).softmax(-1) @ v
        return torch.where(keep.any(-1, keepdim=True), out, 0)

    *qkv, keep = _inputs(device)
    t = torch.tensor([0.5, 0.25], device=device)[:, None, None].requires_grad_()
    x = [y.requires_grad_() for y in qkv]
    (found,) = torch.autograd.grad(fl.compile(attention, dynamic=False)(*x, keep, t).sum(), [t])
    (wanted,) = torch.autograd.grad(attention(*(y.double() for y in x), keep, t).sum(), [t])
    assert torch.allclose(found, wanted, rtol=1e-4)


def _additive(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores + torch.zeros_like(hidden, dtype=scores.dtype).masked_fill(hidden, -torch.inf)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled": lambda scores, hidden: scores.masked_fill(hidden, -torch.inf),
    "chosen": lambda scores, hidden: torch.where(hidden, -torch.inf, scores),
    "added": _additive,
}


@pytest.mark.parametrize("unseen", ["none", "some", "all"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_nan_where_pytorchs_are(mask: str, unseen: str, device: torch.device) -> None:
    """Of keys in tiles too that no row sees: a row of nothing but NaN weighs them."""

    def attention(q: Tensor, k: Tensor, v: Tensor, length: Tensor, first: Tensor) -> Tensor:
        i, j = (torch.arange(x.shape[-2], device=x.device) for x in (q, k))
        hidden = (j >= length[:, None, None, None]) | (i[:, None] < first) | (j > i[:, None])
        return MASKS[mask](q @ k.mT / 4, hidden).softmax(-1) @ v

    given = [torch.randn(2, 1, 300, 16, device=device) for _ in range(3)]
    length, first = torch.tensor([300, 0 if unseen == "all" else 40]), torch.tensor(7 if unseen == "some" else 0)
    check_gradients(attention, fl.compile(attention), [*given, length.to(device), first.to(device)], name=unseen)


def test_gradients_are_nan_with_biases(device: torch.device) -> None:
    """Exponents are scaled by one of two numbers, whichever is in range, where a bias may be of any size."""

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        i, j = (torch.arange(x.shape[-2], device=x.device) for x in (q, k))
        weights = (q @ k.mT / 4 + bias).masked_fill(j <= i[:, None], -torch.inf).softmax(-1)
        return weights**1.5 @ v

    given = [torch.randn(2, 1, 300, 16, device=device, dtype=torch.bfloat16) for _ in range(3)]
    bias = torch.randn(1, 300, 300, device=device, dtype=torch.bfloat16)
    check_gradients(attention, fl.compile(attention), [*given, bias])


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda i, j: j > i,
    "window": lambda i, j: (j > i) | (i - j > 30),
    "both sides": lambda i, j: (i - j).abs() > 30,
    "dilated": lambda i, j: (j > i) | ((i - j) % 3 != 0),
    "blocks": lambda i, j: i // 16 != j // 16,
    "prefix": lambda i, j: (j > i) & (j >= 20),
}


@pytest.mark.parametrize("name", MASKED)
def test_rows_that_see_themselves_are_not_asked(name: str) -> None:
    """Where a mask lets something through for each row, whatever it is, no kernel looks whether there was something."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
        return (q @ k.mT).masked_fill(MASKED[name](i[:, None], j), -torch.inf).softmax(-1) @ v

    given = [torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3)]
    loops = [loop for k in explain(attention, *given).graphs[-1].kernels for loop in k.loops]
    assert loops and not any(loop.above for loop in loops)
    assert all(loop.lower is not None or loop.upper is not None for loop in loops)


@pytest.mark.parametrize("low", [-1e4, -1e30, -torch.inf])
def test_a_maximum_that_is_clamped_from_below(low: float, device: torch.device) -> None:
    """The weights of rows that see nothing are 0 about a finite number, however large, and NaN about -inf."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        i = torch.arange(q.shape[-2], device=q.device)
        scores = (q @ k.mT / 4).masked_fill(i[:, None] - i < 20, -torch.inf)
        largest = scores.amax(-1, keepdim=True).clamp(min=low).detach()
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return weights @ v / total, largest + total.log()

    given = [torch.randn(1, 2, 90, 16, device=device) for _ in range(3)]
    run_and_check(attention, fl.compile(attention), given)
    if low > -torch.inf:
        check_gradients(attention, fl.compile(attention), given)


def weights(q: Tensor, k: Tensor) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return (q @ k.mT / 4).masked_fill(~seen, -math.inf).softmax(-1)


def entropy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = weights(q, k)
    return -(p * p.log()).sum(-1)


def roots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k).sqrt() @ v


@pytest.mark.parametrize("fn", [entropy, roots])
def test_weights_of_0_whose_logarithm_or_root_is_taken(fn: Callable[..., Tensor], device: torch.device) -> None:
    """NaN in every row but the last, also where all that a row does not see lies in tiles of its own."""
    inputs = [torch.randn(133, 8, device=device, requires_grad=True) for _ in range(3)]
    found, wanted = (
        [out, *torch.autograd.grad(out.sum(), inputs, allow_unused=True)]
        for out in (fl.compile(fn)(*inputs), fn(*inputs))
    )
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_entropies_without_nan_still_skip_tiles() -> None:
    """Where an eps, a clamp or a selection keeps the logarithm of 0 out."""
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda p: p * (p + 1e-9).log(), lambda p: p * p.clamp_min(1e-9).log(), torch.special.entr,
        lambda p: p * torch.where(p > 0, p.log(), 0),
    ]  # fmt: skip
    for way in ways:
        torch.compiler.reset()
        (kernel,) = explain(lambda q, k, way=way: way(weights(q, k)).sum(-1), *(torch.randn(300, 8),) * 2).kernels
        assert all(loop.upper is not None for loop in kernel.loops)
