"""Regions that a user marks as compiled once are part of the graph they are in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fl_pallas as fl


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) * rate).softmax(-1)
        return x + weights @ v, weights.amax(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = []
        for layer in self.layers:
            x, most = layer(x, 0.25)
            largest.append(most)
        return x, torch.stack(largest)


def test_layers_that_are_compiled_once(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    ours, theirs = (torch.randn(2, 160, 16, device=device).requires_grad_() for _ in range(2))
    theirs.data.copy_(ours.data)
    compiled = fl.compile(model, fallback="error")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ours), model(ours), atol=1e-5, rtol=1e-5)
        told = fl.explain(model, ours)
    assert [len(g.schedule.regions) for g in told.graphs if g.schedule is not None] == [3]
    asked = [*model.parameters()]
    found, expected = (
        torch.autograd.grad(sum(t.sin().sum() for t in out), [x, *asked])
        for out, x in ((compiled(ours), ours), (model(theirs), theirs))
    )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
