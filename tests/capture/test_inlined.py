"""PyTorch's own modules are captured where they would look at data for a hint."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fl_pallas as fl
from tests.unrun import explain

WIDTH, LENGTH = 32, 50


class Within(nn.Module):
    """An encoder of PyTorch's in a module of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = encoder(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.encoder(x, mask=mask))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 64, batch_first=True, dropout=0.0)
        self.decoder = nn.TransformerDecoder(layer, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.decoder(x, x, tgt_mask=mask)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 1)


def causal(dtype: torch.dtype) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return mask if dtype == torch.float32 else mask.isinf()


@pytest.mark.parametrize("made", [encoder, Within, Decoder])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_ends_no_graph(made: type[nn.Module], dtype: torch.dtype) -> None:
    module, x = made(), torch.randn(2, LENGTH, WIDTH)
    forward, backward = explain(module, x, causal(dtype)).graphs
    assert forward.kernels and backward.kernels and not (forward.fallbacks or backward.fallbacks)


@pytest.mark.parametrize("hidden", [causal(torch.bool), torch.rand(LENGTH, LENGTH) < torch.eye(LENGTH).neg() + 0.9])
def test_results(hidden: Tensor, device: torch.device) -> None:
    """Of a mask that is a causal one, and of one that is not."""
    module, x, mask = Within().to(device), torch.randn(2, LENGTH, WIDTH, device=device), hidden.to(device)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        out = fl.compile(module)(x, mask)
    torch.testing.assert_close(out, module(x, mask), rtol=1e-4, atol=1e-5)
