"""Random numbers that kernels draw by themselves: functions of a seed and an index, as operations of PyTorch.

A seed is two numbers from PyTorch's generator, drawn by each call. Whoever is given it, forward or backward, kernel
or PyTorch, finds the same bits again, and no mask is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..schedule import build
from ..schedule.expr import Expr, const
from ..schedule.philox import BITS, MASK, MULTIPLIER, ROUNDS, WEYL, philox
from .pointwise import Arith
from .tensor import At, Indices, Spec, Tensor, element
from .view import regroup

F = torch.nn.functional


@torch.library.custom_op("fl_pallas::uniform", mutates_args=(), schema="(Tensor seed, SymInt[] shape) -> Tensor")
def uniform(seed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """float32 numbers in [0, 1). The seed is a key and a row to begin at; a number's counter, its column and its row.

    In 64 bits PyTorch computes what kernels compute in 32.
    """
    column = torch.arange(shape[-1] if shape else 1, device=seed.device)
    row = torch.arange(math.prod(shape[:-1]), device=seed.device)[:, None]
    bits = philox(column, (row + seed[1]) & MASK, [(seed[0] + n * WEYL) & MASK for n in range(ROUNDS)], _multiplied)
    return ((bits >> (32 - BITS)).float() * 2.0**-BITS).view(tuple(shape))


def _multiplied(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = x * MULTIPLIER
    return (product >> 32) & MASK, product & MASK


@uniform.register_fake
def _(seed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return seed.new_empty(tuple(shape), dtype=torch.float32)


@uniform.register_vmap
def _(_: Any, dims: tuple[int | None, None], seed: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, int]:
    # One of the seeds is enough: each row has numbers of its own.
    return uniform(seed.select(dims[0] or 0, 0), (seed.shape[dims[0] or 0], *shape)), 0


@torch.library.custom_op("fl_pallas::dropout", mutates_args=(), schema="(Tensor x, Tensor seed, Scalar p) -> Tensor")
def dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """`x` with each element kept, and scaled, where its `uniform` is at least `p`; 0 elsewhere."""
    return x * (uniform(seed, x.shape) >= p).to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)


@dropout.register_fake
def _(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    # A product with a mask is its own adjoint.
    return dropout(gradient, *ctx.saved_tensors, ctx.p), None, None


dropout.register_autograd(_backward, setup_context=_remember)


@dropout.register_vmap
def _(
    info: Any, dims: tuple[int | None, int | None, None], x: torch.Tensor, seed: torch.Tensor, p: float
) -> tuple[torch.Tensor, int]:
    x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
    if dims[1] is not None:
        return dropout(x, seed.select(dims[1], 0), p), 0
    return x * dropout(torch.ones_like(x[0]), seed, p), 0


# --- what stands for PyTorch's own ----------------------------------------------------------------


def seeded(device: torch.device) -> torch.Tensor:
    """A new seed from PyTorch's generator."""
    return torch.randint(0, MASK + 1, (2,), device=device)


def dropped(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """`F.dropout`; where nothing is dropped, PyTorch's own."""
    # A probability that TorchDynamo passes as a tensor is not known here.
    random = isinstance(p, torch.SymFloat) or 0 < p < 1
    if training and input.is_floating_point() and (random or p == 1):
        made = dropout(input, seeded(input.device), p) if random else input * 0.0
        return input.copy_(made) if inplace else made
    return F.dropout(input, p, training, inplace)


def _rand_like(input: torch.Tensor, *, dtype: torch.dtype | None = None, **others: Any) -> torch.Tensor:
    if others or (dtype or input.dtype) != torch.float32:
        # In another type a number is rounded, and no longer below 1.
        return torch.rand_like(input, dtype=dtype, **others)
    return uniform(seeded(input.device), input.shape)


def _bernoulli(input: torch.Tensor, p: float | None = None, **others: Any) -> torch.Tensor:
    if others or not input.is_floating_point():
        return torch.bernoulli(input, **others) if p is None else torch.bernoulli(input, p, **others)
    return (uniform(seeded(input.device), input.shape) < (input if p is None else p)).to(input.dtype)


OPENED: dict[Any, Callable[..., torch.Tensor]] = {
    F.dropout: dropped,
    torch.dropout: lambda input, p, train: dropped(input, p, train),
    torch.rand_like: _rand_like,
    **dict.fromkeys((torch.bernoulli, torch.Tensor.bernoulli), _bernoulli),
}


# --- as expressions -------------------------------------------------------------------------------


def _number(shape: tuple[int, ...], seed: Tensor, idx: Indices) -> Expr:
    """The element of `uniform` at `idx`."""
    (row,) = regroup(shape[:-1], idx[:-1], (math.prod(shape[:-1]),))
    column = idx[-1] if idx else const(0, "i64")
    words = (seed.at((const(n, "i64"),)) for n in (0, 1))
    return build.op("uniform", *words, row, column, dtype="f32")


def _uniform(out: Spec, seed: Tensor, shape: Sequence[int]) -> At:
    return lambda idx: _number(out.shape, seed, idx)


def _dropout(out: Spec, x: Tensor, seed: Tensor, p: Tensor | float) -> At:
    f = Arith(out.dtype)
    threshold = element(p, (), out.dtype)
    scale = f("div", 1, f("sub", 1, threshold))

    def at(idx: Indices) -> Expr:
        # A factor of its own: what it scales keeps its form, for the algebra of sums.
        return f("mul", x.at(idx), f.where(f("ge", _number(out.shape, seed, idx), threshold), scale, 0))

    return at


RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.fl_pallas.uniform.default: _uniform,
    torch.ops.fl_pallas.dropout.default: _dropout,
}
