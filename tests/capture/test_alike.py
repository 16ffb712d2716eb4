"""Regions that are alike are one, of a batch: heads and chunks in Python loops, both passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fl_pallas as fl
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

HEADS, BATCH, SEQ, DIM = 4, 2, 48, 16


class Head(nn.Module):
    """As lectures write it: a head is a module, with a mask of its own."""

    def __init__(self, dropout: float):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(HEADS * DIM, DIM, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(2 * SEQ, 2 * SEQ).tril())
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        scores = self.query(x) @ self.key(x).mT * DIM**-0.5
        weights = scores.masked_fill(self.tril[:n, :n] == 0, float("-inf")).softmax(-1)
        return self.dropout(weights) @ self.value(x)


class MultiHead(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.heads = nn.ModuleList(Head(dropout) for _ in range(HEADS))
        self.proj = nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([h(x) for h in self.heads], -1))


def slopes(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    i = torch.arange(SEQ, device=q.device)
    distance = (i[:, None] - i).abs()
    scores = [torch.einsum("bid,bjd->bij", q[:, h], k[:, h]) - distance * slope[h] for h in range(HEADS)]
    return torch.cat([s.softmax(-1) @ v[:, h] for h, s in enumerate(scores)], -1)


def chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written into a tensor, each with its part of a mask of all."""
    i = torch.arange(SEQ, device=q.device)
    hidden = i[:, None] < i
    out, n = torch.empty_like(q), SEQ // 4
    for at in range(0, SEQ, n):
        scores = (q[:, :, at : at + n] @ k.mT / 4).masked_fill(hidden[at : at + n], float("-inf"))
        out[:, :, at : at + n] = scores.softmax(-1) @ v
    return out


def several_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The first head's keys serve all; weights are kept for a loss."""
    outs, entropies = [], []
    for a, c in zip(q.unbind(1), v.unbind(1), strict=True):
        p = (a @ k[:, 0].mT).softmax(-1)
        outs.append(p @ c)
        entropies.append(torch.special.entr(p).sum(-1))
    return torch.stack(outs, 1), torch.stack(entropies).mean()


def added(x: Tensor, *weights: Tensor) -> Tensor:
    """Two layers, whose heads wait for those of the layer before."""
    for layer in (weights[:3], weights[3:]):
        x = x + sum(torch.tanh(((x @ w) @ x.mT / 8).softmax(-1) @ x) for w in layer)
    return x


def _draw(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


QKV = [_draw(BATCH, HEADS, SEQ, DIM)] * 3
X = _draw(BATCH, SEQ, HEADS * DIM)
# Name: what is compiled, its inputs, and the kernels of its forward pass.
PROGRAMS: dict[str, tuple[Callable[[], Any], list[Callable[[], Tensor]], int]] = {
    "modules": (MultiHead, [X], 1),
    "slopes": (lambda: slopes, [*QKV, lambda: torch.rand(HEADS)], 1),
    "chunks": (lambda: chunks, QKV, 1),
    "several_results": (lambda: several_results, QKV, 1),
    "added": (lambda: added, [X, *[lambda: torch.randn(HEADS * DIM, HEADS * DIM) / 8] * 6], 2),
}


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float32) for name in PROGRAMS), ("modules", torch.bfloat16)], ids=str
)
def test_one_kernel_for_all(name: str, dtype: torch.dtype, device: torch.device) -> None:
    make, draws, kernels = PROGRAMS[name]
    fn = make()
    fn = fn.to(device, dtype) if isinstance(fn, nn.Module) else fn
    inputs = [draw().to(device, dtype) for draw in draws]
    with torch.no_grad():
        told = explain(fn, *inputs)
        run_and_check(fn, fl.compile(fn, fallback="error"), inputs)
    assert [len(k) for g in told.graphs for k in g.schedule.kernels] == [1] * kernels
    check_gradients(fn, fl.compile(fn, fallback="error"), inputs)


def test_heads_of_one_tensor_are_read_where_they_lie(device: torch.device) -> None:
    """Neither they nor their gradients, nor the results, are copied."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_heads = (F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h]) for h in range(HEADS))
        return torch.stack([*of_heads], 1)

    told = explain(fn, *(torch.randn(BATCH, HEADS, SEQ, DIM, device=device, requires_grad=True) for _ in range(3)))
    assert [g.left for g in told.graphs] == [(), ()]


def test_each_head_drops_weights_of_its_own(device: torch.device) -> None:
    attend = MultiHead(0.5).to(device)
    attend.proj = nn.Identity()
    for h in attend.heads[1:]:
        h.load_state_dict(attend.heads[0].state_dict())
    x = X().to(device).requires_grad_()
    compiled = fl.compile(attend, fallback="error")
    heads = compiled(x).unflatten(-1, (HEADS, DIM))
    assert not any(torch.allclose(heads[..., 0, :], heads[..., h, :]) for h in range(1, HEADS))
    assert sum(len(k) for g in explain(attend, x).graphs[:1] for k in g.schedule.kernels) == 1


def test_what_autograd_is_not_to_see_stays_unseen(device: torch.device) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for a, b, c in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
            with torch.no_grad():
                p = (a @ b.mT).softmax(-1)
            outs.append(p @ c)
        return torch.stack(outs, 1)

    check_gradients(fn, fl.compile(fn), [draw().to(device) for draw in QKV])


def test_data_of_a_tensor_has_no_gradient(device: torch.device) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([(q[:, h] @ k.data[:, h].mT).softmax(-1) @ v[:, h] for h in range(HEADS)], 1)

    check_gradients(fn, fl.compile(fn), [draw().to(device) for draw in QKV])


def test_writes_beside_autograd(device: torch.device) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for h in range(HEADS):
            scores = q[:, h] @ k[:, h].mT
            scores.detach().mul_(2)
            outs.append(scores.softmax(-1) @ v[:, h])
        return torch.stack(outs, 1)

    check_gradients(fn, fl.compile(fn), [draw().to(device) for draw in QKV])


def test_results_are_tensors_of_their_own(device: torch.device) -> None:
    """Single heads beside all of them: a graph may be retained, and each may be written to."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(q)
        for h in range(HEADS):
            out[:, h] = (q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h]
        outs = [(q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(HEADS)]
        return out[:, 0], out, torch.cat(outs, -1), outs[0], torch.stack(outs)[0]

    inputs = [draw().to(device).requires_grad_() for draw in QKV]
    results = fl.compile(fn)(*inputs)
    twice = [torch.autograd.grad(results[3].sum(), inputs, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
    with torch.no_grad():
        results = fl.compile(fn)(*inputs)
        results[3].zero_()
    assert results[2].any() and results[4].any()
    results = fl.compile(fn)(*inputs)
    results[1].mul_(2)
    want = fn(*inputs)
    torch.testing.assert_close(results[0], 2 * want[0], rtol=1e-4, atol=1e-4)


def test_memories_are_not_copied_for_a_query() -> None:
    """Long ones, of which one query asks; those that lie in one tensor are read there."""

    def fn(q: Tensor, *memories: Tensor) -> Tensor:
        return torch.cat([(q @ m.mT / 4).softmax(-1) @ m for m in memories], -1)

    def of_one(q: Tensor, memories: Tensor) -> Tensor:
        return fn(q, *memories.unbind(0))

    q, memories = torch.randn(2, 1, 16), torch.randn(4, 2, 512, 16)
    with torch.no_grad():
        apart, together = explain(fn, q, *memories), explain(of_one, q, memories)
    assert not any("stack" in name for g in apart.graphs for name, _ in g.left)
    assert sum(len(g.schedule.regions) for g in together.graphs if g.schedule) == 1


def test_what_some_heads_return_besides(device: torch.device) -> None:
    """Weights of one head, scores that are written to, and a later layer whose heads read others' results."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outs, kept = [], []
        for h in range(HEADS):
            scores = q[:, h] @ k[:, h].mT
            scores[..., 0] = 0.0
            kept.append(scores.softmax(-1))
            outs.append(kept[-1] @ v[:, h])
        mixed = [(outs[h] @ outs[h - 1].mT).softmax(-1) @ outs[h - 2] for h in range(HEADS)]
        return torch.cat(mixed, -1), kept[2]

    inputs = [draw().to(device) for draw in QKV]
    with torch.no_grad():
        run_and_check(fn, fl.compile(fn), inputs)
    check_gradients(fn, fl.compile(fn), inputs)


@pytest.mark.parametrize(
    "other", [lambda s, h: s * h, lambda s, h: s.relu() if h == 2 else s, lambda s, h: s[:, : SEQ - 2 * h]]
)
def test_others_stay_by_themselves(other: Callable[[Tensor, int], Tensor], device: torch.device) -> None:
    """What a head does with numbers of its own, or does alone."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = [(other(q[:, h], h) @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(1, HEADS)]
        return torch.cat(outs, 1)

    inputs = [draw().to(device) for draw in QKV]
    with torch.no_grad():
        run_and_check(fn, fl.compile(fn, fallback="error"), inputs)
