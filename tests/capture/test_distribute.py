"""A bias that layers share: each layer's kernels take it by themselves, and its gradient is summed layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fl_pallas as fl
from fl_pallas.capture.distribute import distribute
from tests.oracle import check, check_gradients
from tests.unrun import explain, unrun

SEQ, HEADS, WIDTH = 48, 2, 16


def draw(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Positions, projections, a table of relative positions, a mask of padding."""
    generator = torch.Generator().manual_seed(0)
    x, w, table = (
        torch.randn(s, generator=generator) for s in ((2, SEQ, 2 * WIDTH), (3, 2 * WIDTH, 2 * WIDTH), (15, HEADS))
    )
    mask = torch.zeros(2, 1, 1, SEQ)
    mask[1, ..., -5:] = -1e9
    return [t.to(dtype).to(device) for t in (x, w / 8, table, mask)]


def encoder(layers: int, bias_of: Callable[[Tensor, Tensor], Tensor], in_place: bool = False) -> Callable[..., Tensor]:
    """Layers of attention that all add one bias, as T5's do; in place, as transformers writes it."""

    def run(x: Tensor, w: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        bias = bias_of(table, mask)
        for _ in range(layers):
            h = F.layer_norm(x, [x.shape[-1]])
            q, k, v = ((h @ p).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for p in w)
            scores = q @ k.mT / 4
            if in_place:
                scores += bias
            else:
                scores = scores + bias
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x

    return run


def relative(table: Tensor, _: Tensor) -> Tensor:
    i = torch.arange(SEQ, device=table.device)
    d = (i - i[:, None]).clamp(-7, 7) + 7
    return table[d].permute(2, 0, 1)[None]


def padded(table: Tensor, mask: Tensor) -> Tensor:
    return relative(table, mask) + mask


def masked(table: Tensor, mask: Tensor) -> Tensor:
    i = torch.arange(SEQ, device=mask.device)
    return relative(table, mask).masked_fill(i > i[:, None], float("-inf"))


def causal(_: Tensor, mask: Tensor) -> Tensor:
    i = torch.arange(SEQ, device=mask.device)
    return torch.zeros(SEQ, SEQ, device=mask.device).masked_fill(i > i[:, None], -1e9) + mask


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("bias", [relative, padded, causal])
def test_each_layer_is_a_kernel(bias: Callable, layers: int, device: torch.device) -> None:
    with unrun(), torch.no_grad():
        assert fl.explain(encoder(layers, bias), *draw(device)).kernel_count == layers


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("bias", [relative, padded, masked])
def test_nothing_is_stored_for_each_pair(bias: Callable, layers: int, in_place: bool, device: torch.device) -> None:
    inputs = [t.requires_grad_(n < 3) for n, t in enumerate(draw(device))]
    with unrun():
        made = fl.explain(encoder(layers, bias, in_place), *inputs)
    assert not made.fallbacks
    stored = [s for graph in made.graphs for plan in graph.kernels for s in plan.stores]
    assert stored and not [s for s in stored if s.shape.count(SEQ) > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [relative, padded])
def test_gradients(bias: Callable, dtype: torch.dtype, device: torch.device) -> None:
    fn = encoder(2, bias)
    inputs = draw(device, dtype)
    compiled = fl.compile(fn)
    check(fn, inputs, compiled(*inputs))
    check_gradients(fn, compiled, inputs)


@pytest.mark.long
def test_what_is_read_otherwise_stays(device: torch.device) -> None:
    """The sum of two layers' gradients is wanted itself: of a bias with a batch of its own."""

    def run(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return encoder(2, lambda b, _: b)(x, w, bias, bias)

    x, w, *_ = draw(device)
    bias = torch.randn(2, HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(1)).to(device)
    check_gradients(run, fl.compile(run), [x, w, bias])


def test_what_layers_hand_on_stays_whole(device: torch.device) -> None:
    """The gradient of embeddings is put into their table once, and not for each layer."""

    def run(table: Tensor, w: Tensor, tokens: Tensor) -> Tensor:
        return encoder(3, causal)(table[tokens], w, table, torch.zeros(2, 1, 1, SEQ, device=table.device))

    _, w, *_ = draw(device)
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(50, 2 * WIDTH, generator=generator).to(device).requires_grad_()
    tokens = torch.randint(50, (2, SEQ), generator=generator).to(device)
    with unrun():
        made = fl.explain(run, table, w.requires_grad_(), tokens)
    puts = [n for graph in made.graphs for name, n in graph.left if name.startswith("aten.index_put")]
    assert puts == [1]


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_what_takes_the_shape_alone(value: float) -> None:
    """The graph computes what it did before, also where something is made of the sum's shape."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = x @ x.mT
        second = (first.sum(0) @ w).expand_as(first) * first
        total = first + second
        return total.sum(0), torch.full_like(total, value)

    x, w = torch.randn(2, 5, 5), torch.randn(5, 5)
    gm = make_fx(run, tracing_mode="fake")(x, w)
    before = str(gm.graph)
    distribute(gm)
    gm.recompile()
    assert (str(gm.graph) == before) == (value != 0)
    torch.testing.assert_close(gm(x, w), run(x, w))


def rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As many features are turned as there are; the rest, put behind them, is empty."""

    def turned(x: Tensor) -> Tensor:
        n = cos.shape[-1]
        some, rest = x[..., :n], x[..., n:]
        swapped = torch.cat([-some[..., n // 2 :], some[..., : n // 2]], -1)
        return torch.cat([some * cos + swapped * sin, rest], -1)

    return (turned(q) @ turned(k).mT / 4).softmax(-1) @ v


def test_an_empty_part_keeps_no_gradient_alive(device: torch.device) -> None:
    """PyTorch computed all gradients of scores again, for none of their elements."""
    q, k, v = (torch.randn(2, 2, 27, 16, device=device, requires_grad=True) for _ in range(3))
    angles = [torch.randn(27, 16, device=device) for _ in range(2)]
    forward, backward = explain(rotated, q, k, v, *angles).graphs
    assert (len(forward.kernels), len(backward.kernels)) == (1, 2)
    assert not {"aten.bmm.default", "aten.exp.default"} & {name for name, _ in backward.left}
    check_gradients(rotated, fl.compile(rotated), [*(t.detach() for t in (q, k, v)), *angles])
