"""What is measured: attention on given inputs, as plain PyTorch and in the forms that the rivals want."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Slices = tuple[tuple[slice, ...], ...]


@dataclass(frozen=True)
class Problem:
    """One workload with its inputs; every rival gets these very tensors.

    Attributes:
      plain: the variant as a user writes it; for us, eager PyTorch and torch.compile.
      inputs: its arguments.
      axes: a letter for each dimension of each input. b (batches), h (heads) and g (key heads, each serving
        equally many of h) are independent of each other, so that the reference can be computed piece by piece.
      out_axes: the same of each output.
      flops: useful floating-point operations of the two matrix products: what a mask leaves out is not counted.
      bytes: what has to be read and written at least.
      scores: elements of one score matrix over all heads, which a rival that does not fuse stores several times.
      flex: (attend, block mask, *inputs) → output, attend being flex_attention, compiled or not; None where
        FlexAttention cannot express the variant.
      mask_mod: FlexAttention's mask; None for none.
      mask_shape: batches (None: all alike), queries and keys of that mask.
      sdpa: makes, outside of what is timed, a function of the inputs by scaled_dot_product_attention; None
        where that cannot express it.
    """

    plain: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    axes: tuple[str, ...]
    out_axes: tuple[str, ...]
    flops: float
    bytes: float
    scores: int
    flex: Callable[..., Tensor] | None = None
    mask_mod: Any = None
    mask_shape: tuple[int | None, int, int] = (None, 0, 0)
    sdpa: Callable[[], Callable[..., Tensor]] | None = None

    def extent(self, letter: str) -> int:
        """The size of an axis; 1 if no input has it."""
        found = (t.shape[a.index(letter)] for a, t in zip(self.axes, self.inputs, strict=True) if letter in a)
        return next(found, 1)

    def pieces(self, most: int = 8) -> Iterator[tuple[Slices, Slices]]:
        """Up to `most` evenly spread (batch, head) pieces: slices of the inputs, and of the outputs."""
        heads = "g" if any("g" in a for a in self.axes) else "h"
        group = self.extent("h") // self.extent(heads)
        every = list(itertools.product(range(self.extent("b")), range(self.extent(heads))))
        step = max(1, -(-len(every) // most)) | 1  # odd, or it would be the same head of each batch element
        for b, n in every[::step]:
            cut = {"b": slice(b, b + 1), "h": slice(n * group, (n + 1) * group), heads: slice(n, n + 1)}
            if heads == "h":
                cut["h"] = slice(n, n + 1)

            def slices(axes: tuple[str, ...], cut: dict[str, slice] = cut) -> Slices:
                return tuple(tuple(cut.get(letter, slice(None)) for letter in a) for a in axes)

            yield slices(self.axes), slices(self.out_axes)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of these tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)
