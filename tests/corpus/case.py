"""What a corpus entry is, and how its inputs are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Draw:
    """Draws the inputs of one run: seq is the key length, floats have `dtype`, ids and masks keep their own.

    Values are drawn in float64 on the CPU and then rounded, so that every dtype and device sees the same numbers.
    """

    seq: int
    dtype: torch.dtype
    device: torch.device
    gen: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal floats of standard deviation `scale`."""
        x = torch.randn(shape, dtype=torch.float64, generator=self.gen) * scale
        return x.to(self.dtype).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Floats uniform in [low, high)."""
        x = torch.rand(shape, dtype=torch.float64, generator=self.gen) * (high - low) + low
        return x.to(self.dtype).to(self.device)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self.gen).to(self.device)

    def lengths(self, b: int) -> Tensor:
        """b lengths in 1..seq."""
        return self.ints(1, self.seq + 1, b)

    def bools(self, *shape: int, p: float = 0.7) -> Tensor:
        """True with probability p."""
        return (torch.rand(shape, generator=self.gen) < p).to(self.device)

    def values(self, *numbers: float) -> Tensor:
        """These numbers, as a 1-D float tensor."""
        return torch.tensor(numbers, dtype=torch.float64).to(self.dtype).to(self.device)


Inputs = Callable[[Draw], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A program of the corpus.

    Attributes:
      name: unique; the family's file defines a function of (nearly) this name.
      fn: the program, on tensors; with `module`, a function of no arguments that makes the nn.Module.
      inputs: draws its arguments.
      kernels: the number of fused kernels expected; None where no number is promised.
      falls_back: a regular expression found in the FallbackWarning of a program that cannot fuse whole; else empty.
      module: whether `fn` makes a module.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Inputs
    kernels: int | None = 1
    falls_back: str = ""
    module: bool = False

    def make_inputs(
        self, seq: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> tuple[Tensor, ...]:
        """The arguments for key length `seq`; the same seed gives the same values on every device."""
        gen = torch.Generator().manual_seed(seed)
        return self.inputs(Draw(seq, dtype, torch.device(device), gen))

    def target(self, dtype: torch.dtype, device: torch.device | str) -> Callable[..., Any]:
        """What to compile: the function itself, or the module in this dtype, with fixed weights."""
        if not self.module:
            return self.fn
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module: nn.Module = self.fn()
        return module.to(device=device, dtype=dtype).requires_grad_(False).eval()


def qkv(b: int = 1, h: int = 2, d: int = 16, dv: int | None = None, kv_heads: int | None = None) -> Inputs:
    """q[b,h,s,d], k[b,kv_heads,s,d], v[b,kv_heads,s,dv]."""

    def inputs(g: Draw) -> tuple[Tensor, ...]:
        kh = kv_heads or h
        return g.normal(b, h, g.seq, d), g.normal(b, kh, g.seq, d), g.normal(b, kh, g.seq, dv or d)

    return inputs


def qkv_and(*more: Callable[[Draw], Tensor], b: int = 1, h: int = 2, d: int = 16) -> Inputs:
    """q, k, v [b,h,s,d], then one tensor from each of `more`."""
    base = qkv(b, h, d)

    def inputs(g: Draw) -> tuple[Tensor, ...]:
        return *base(g), *(make(g) for make in more)

    return inputs
