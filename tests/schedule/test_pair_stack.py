"""A model of tokens and pairs (AlphaFold's): pairs are made of tokens, several layers change them, and no gradient of
theirs is asked for: parameters' alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import explain

pytestmark = pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
HEADS = 2


class Multiplication(nn.Module):
    """Of pairs, along the third edge of a triangle."""

    def __init__(self, c: int):
        super().__init__()
        self.norm, self.after = nn.LayerNorm(c), nn.LayerNorm(c)
        self.edges, self.out = nn.Linear(c, 2 * c, bias=False), nn.Linear(c, c, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        a, b = self.edges(self.norm(z)).chunk(2, -1)
        return self.out(self.after(torch.einsum("bikc,bjkc->bijc", a, b)))


class Triangle(nn.Module):
    """Attention along the rows of pairs, with a bias of the third edge."""

    def __init__(self, c: int):
        super().__init__()
        self.norm, self.bias = nn.LayerNorm(c), nn.Linear(c, HEADS, bias=False)
        self.qkv, self.gate = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        q, k, v = self.qkv(z).unflatten(-1, (3, HEADS, -1)).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias(z).permute(0, 3, 1, 2)[:, None]
        return self.gate(z).sigmoid() * (scores.softmax(-1) @ v).transpose(2, 3).flatten(-2)


class OfTokens(nn.Module):
    """Attention of tokens, with a bias of pairs."""

    def __init__(self, c: int):
        super().__init__()
        self.norm, self.bias = nn.LayerNorm(c), nn.Linear(c, HEADS, bias=False)
        self.qkv, self.out = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c, bias=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias(self.norm(z)).permute(0, 3, 1, 2)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Stack(nn.Module):
    """x [b,n,c] and, unless they are made of these, z [b,n,n,c] → of the same shapes."""

    def __init__(self, c: int):
        super().__init__()
        self.left, self.right, self.apart = nn.Linear(c, c), nn.Linear(c, c), nn.Embedding(17, c)
        self.multiplication, self.triangle, self.tokens = Multiplication(c), Triangle(c), OfTokens(c)

    def forward(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if z is None:
            i = torch.arange(x.shape[1], device=x.device)
            apart = self.apart((i[:, None] - i).clamp(-8, 8) + 8)
            z = self.left(x)[:, :, None] + self.right(x)[:, None] + apart
        z = z + self.multiplication(z)
        z = z + self.triangle(z)
        return x + self.tokens(x, z), z


def inputs(n: int, c: int, made: bool, device: torch.device | str = "cpu") -> list[Tensor]:
    x, z = torch.randn(1, n, c, device=device), torch.randn(1, n, n, c, device=device)
    return [x] if made else [x, z]


@pytest.mark.long
@pytest.mark.parametrize("made", [False, True])
def test_both_attentions_are_fused(made: bool) -> None:
    """The gradient of a bias is stored, and what layers make of it is PyTorch's, whether it goes on to a result or
    not: by the region of the last attention, which grew back through all layers, both were PyTorch's; and where pairs
    are made of tokens, compiling did not end."""
    found = explain(Stack(64).bfloat16(), *(t.bfloat16() for t in inputs(256, 64, made)))
    forward, backward = found.graphs
    assert forward.schedule is not None and len(forward.schedule.regions) == 2, str(found)
    assert backward.schedule is not None and len(backward.schedule.regions) == 2, str(found)
    assert not backward.fallbacks and len(forward.fallbacks) == int(made), str(found)


@pytest.mark.parametrize("made", [False, True])
def test_gradients(made: bool, device: torch.device) -> None:
    model = Stack(8).to(device)
    check_gradients(model, fl.compile(model), inputs(18, 8, made, device))
