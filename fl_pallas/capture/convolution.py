"""Convolutions of extent 1: channels mixed (talking heads), all of them or in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..schedule import build
from ..schedule.expr import Expr, index
from .pointwise import Arith
from .reduction import accumulator, contraction
from .tensor import ZERO, At, Indices, Spec, Tensor, element, fresh_axis, integer

aten = torch.ops.aten


def _convolution(
    out: Spec,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> At:
    """A convolution of extent 1: x [b, c, ...] mixed along c by weight [o, c, 1, ...]."""
    group, origin = _groups(x, weight, stride, padding, transposed, groups)
    product = contraction(
        out.dtype,
        group.given,
        lambda idx, k: x.at((idx[0], group.read(idx[1], k), *idx[2:])),
        lambda idx, k: weight.at((idx[1], k, *origin)),
    )
    if bias is None:
        return product
    f = Arith(out.dtype)
    return lambda idx: f("add", product(idx), bias.at((idx[1],)))


@dataclass(frozen=True)
class _Groups:
    """Channels in groups, of which each is made of its own: so many that are given, and that are made."""

    given: int
    made: int

    def read(self, made: Expr, k: Expr) -> Expr:
        """The k-th of the channels that one is made of."""
        return _within(made, self.made, self.given, k)

    def makes(self, given: Expr, k: Expr) -> Expr:
        """The k-th of the channels that one goes to."""
        return _within(given, self.given, self.made, k)


def _within(channel: Expr, size: int, other: int, k: Expr) -> Expr:
    group = integer("floordiv", channel, size)
    return integer("add", integer("mul", group, other), k)


def _groups(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], transposed: bool, groups: int
) -> tuple[_Groups, Indices]:
    """The groups of a convolution that mixes channels alone, and the place of its weight.

    Raises: Unsupported for others.
    """
    if max(weight.shape[2:]) > 1 or max(stride) > 1 or any(padding) or transposed:
        raise Unsupported("aten.convolution", "a convolution that mixes neighbours")
    return _Groups(x.shape[1] // groups, weight.shape[0] // groups), (ZERO,) * (len(weight.shape) - 2)


def _convolution_backward(
    outs: tuple[Spec | None, ...],
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[At | None, ...]:
    """Gradients of a convolution of extent 1 for x, weight and bias; g [b, o, ...] is that of its result."""
    group, origin = _groups(x, weight, stride, padding, transposed, groups)
    places = [fresh_axis(n) for n in (g.shape[0], *g.shape[2:])]

    def summed(e: Expr) -> Expr:
        return build.reduce_over("sum", places, e, e.dtype)

    def at_channel(t: Tensor, channel: Expr, dtype: str) -> Expr:
        batch, *rest = map(index, places)
        return element(t, (batch, channel, *rest), dtype)

    of_x = contraction(
        g.dtype,
        group.made,
        lambda idx, k: g.at((idx[0], group.makes(idx[1], k), *idx[2:])),
        lambda idx, k: weight.at((group.makes(idx[1], k), integer("mod", idx[1], group.given), *origin)),
    )

    def of_weight(idx: Indices) -> Expr:
        factors = at_channel(g, idx[0], g.dtype), at_channel(x, group.read(idx[0], idx[1]), g.dtype)
        return summed(build.op("mul", *factors, dtype=g.dtype))

    def of_bias(idx: Indices) -> Expr:
        return build.cast(summed(at_channel(g, idx[0], accumulator(g.dtype))), g.dtype)

    made = zip(outs, wanted, (of_x, of_weight, of_bias), strict=True)
    return tuple(at if spec is not None and asked else None for spec, asked, at in made)


RULES: dict[Any, Callable[..., Any]] = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}
