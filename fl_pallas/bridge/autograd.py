"""A forward and a backward pass as one function of PyTorch's autograd.

AOTAutograd's own function serves inputs that are written to, results that alias each other, tensor subclasses, random
states and more; where there is none of it, half of a short step's time on the host is spent on asking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..capture.joint import Boxed, Passes

Function = Callable[..., tuple[Tensor, ...]]


def differentiated(whole: Callable[..., Any], passes: Passes) -> Callable[..., Any]:
    """AOTAutograd's function of a graph, or one that asks less at each call where that will do."""
    short = _shortened(passes)
    if short is None:
        return whole

    def call(*inputs: Any) -> Any:
        # The graph has its casts in it: PyTorch is not to cast again what is left of it, and AOTAutograd sees to that.
        return whole(*inputs) if torch._C._is_any_autocast_enabled() else short(*inputs)

    return call


def _shortened(passes: Passes) -> Function | None:
    """Both passes as one differentiable function, or None if they need more care than it takes."""
    forward, backward = passes.forward, passes.backward
    if forward is None or backward is None:
        return None
    count = passes.results
    tangents = [fake for name, fake in backward.inputs if name.startswith("tangents")]
    saved = backward.inputs[: len(backward.inputs) - len(tangents)]
    results = [fake for _, fake in forward.results[:count]]
    plain = (
        len(forward.inputs) == len(backward.results) == passes.inputs
        and [name for name, _ in saved] == [name for name, _ in forward.results[count:]]
        and all(isinstance(fake, Tensor) for fake in (*results, *(fake for _, fake in saved)))
        # Each gets a tangent: of others it would have to be known which they are.
        and [fake.shape for fake in results] == [fake.shape for fake in tangents]
    )
    if not plain:
        return None
    memory = [fake.untyped_storage()._cdata for fake in results]
    given = {fake.untyped_storage()._cdata for _, fake in forward.inputs if isinstance(fake, Tensor)}
    if len({*memory}) < len(memory) or given & {*memory}:
        return None
    return _function(forward.call, backward.call, tuple(fake.stride() for fake in tangents))


def _function(forward_pass: Boxed, backward_pass: Boxed, strides: tuple[tuple[int, ...], ...]) -> Function:
    """Two passes as a function of PyTorch's autograd.

    Args:
      strides: of the tangents, as the backward pass wants them; one for each result.
    """
    count = len(strides)

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            made = forward_pass(list(inputs))
            ctx.save_for_backward(*made[count:])
            # A view could not be written to in place outside of here.
            return tuple(torch.ops.aten._unsafe_view(t, t.shape) if t._is_view() else t for t in made[:count])

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
            given = [*ctx.saved_tensors, *map(_laid, tangents, strides)]
            if torch.is_grad_enabled():
                return _Once.apply(backward_pass, *given)
            with torch._C._DisableAutocast():
                return tuple(backward_pass(given))

    return Step.apply


class _Once(torch.autograd.Function):
    """A backward pass whose own gradient is asked for, perhaps."""

    @staticmethod
    def forward(ctx: Any, run: Boxed, *given: Any) -> tuple[Any, ...]:
        with torch._C._DisableAutocast():
            return tuple(run(list(given)))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("fl_pallas does not support double backward: a compiled function is differentiable once")


def _laid(tangent: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tangent as the backward pass was traced with it: views of it are only right for these strides."""
    if tangent.stride() == strides:
        return tangent
    return torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device).copy_(tangent)
