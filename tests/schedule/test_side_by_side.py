"""Pieces of a tensor side by side are a view of it; many tensors side by side are PyTorch's to put there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fl_pallas.capture import translate
from fl_pallas.capture.aten import to_aten
from fl_pallas.schedule.text import program_text


def text_of(fn: Callable[..., Tensor], *inputs: Tensor) -> str:
    """The last value of the program of a function."""
    return program_text(translate(to_aten(torch.fx.symbolic_trace(fn), inputs))).splitlines()[-2].partition("  #")[0]


def heads_in_turn(x: Tensor) -> Tensor:
    return torch.cat([x[:, h] for h in range(8)], -1)


def along_another(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(4, 2), 0)


def back_again(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(1), 1)


def of_slices(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for at in range(0, 12, 3):
        out[:, :, at : at + 3] = x[:, :, at : at + 3]
    return out


@pytest.mark.parametrize(
    "fn, element",
    [
        (heads_in_turn, "[a0:2, a1:12, a2:32]: f32 = x[a0, a2 // 4, a1, a2 % 4]"),
        (along_another, "[a0:8, a1:8, a2:3, a3:4]: f32 = x[a0 % 2, a1, a0 // 2 * 3 + a2, a3]"),
        (back_again, "[a0:2, a1:8, a2:12, a3:4]: f32 = x[a0, a1, a2, a3]"),
    ],
)
def test_pieces_of_one_tensor(fn: Callable[[Tensor], Tensor], element: str) -> None:
    x = torch.randn(2, 8, 12, 4)
    name, _, found = text_of(fn, x).partition("[")
    assert "[" + found.replace("x_1", "x").replace("arg0_1", "x") == element, (name, found)
