"""Functions of PyTorch's own that look at data for what is only a hint: TorchDynamo would end a graph there, and behind
that PyTorch runs its own modules as they are, without a word.

`nn.TransformerEncoder(x, mask=m)` asks whether each number of the mask is a causal one's.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor
from torch.nn.modules import transformer


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the caller says so: a mask that is one and is not said to be one hides the same."""
    return is_causal is True


@functools.cache
def substitute() -> None:
    """Have TorchDynamo trace what does not look at data in their place, whoever compiles."""
    with contextlib.suppress(AttributeError, ValueError):  # it has another name, or the user did so
        torch.compiler.substitute_in_graph(transformer._detect_is_causal_mask)(_is_causal)
