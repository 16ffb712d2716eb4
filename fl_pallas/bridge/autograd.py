"""A forward and a backward pass as one function of PyTorch's autograd.

AOTAutograd's own function serves inputs that are written to, results that alias each other, tensor subclasses, random
states and more; where there is none of it, half of a short step's time on the host is spent on asking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture.joint import Boxed, Pass, Passes

Function = Callable[..., tuple[Tensor, ...]]


class Differentiable:
    """AOTAutograd's function of a graph; after a call, and where that will do, a shorter one."""

    def __init__(self, whole: Callable[..., Any], passes: Passes):
        self.whole, self.passes = whole, passes
        self.short: Function | None = None
        self.tried = False

    def __call__(self, *inputs: Any) -> Any:
        # The graph has its casts in it: PyTorch is not to cast again what is left of it, and AOTAutograd sees to that.
        if self.short is not None and not torch._C._is_any_autocast_enabled():
            return self.short(*inputs)
        results = self.whole(*inputs)
        if not self.tried and self.passes.forward and self.passes.backward:
            self.tried, self.short = True, _shortened(self.passes.forward, self.passes.backward, inputs, results)
            self.passes = Passes()  # the graphs are not needed any longer
        return results


def _shortened(forward: Pass, backward: Pass, inputs: Sequence[Any], results: Any) -> Function | None:
    """Both passes as one differentiable function, or None if they need more care than it takes.

    Args:
      inputs, results: of a call, by AOTAutograd.
    """
    if not isinstance(results, (tuple, list)) or not all(type(t) is Tensor for t in results):
        return None
    needs = tuple(t.requires_grad for t in results)
    if not any(needs):
        return None
    saved, tangents = backward.inputs[: -sum(needs)], backward.inputs[-sum(needs) :]
    plain = (
        len(forward.inputs) == len(backward.results) == len(inputs)
        and tuple(name for name, _ in saved) == forward.results[len(results) :]
        and all(isinstance(fake, Tensor) for _, fake in saved)
        and all(name.startswith("tangents") for name, _ in tangents)
    )
    memory = [t.untyped_storage()._cdata for t in results]
    given = {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor)}
    if not plain or len({*memory}) < len(memory) or given & {*memory}:
        return None
    return _function(forward.call, backward.call, needs, tuple(fake.stride() for _, fake in tangents))


def _function(
    forward_pass: Boxed, backward_pass: Boxed, needs: tuple[bool, ...], strides: tuple[tuple[int, ...], ...]
) -> Function:
    """Two passes as a function of PyTorch's autograd.

    Args:
      needs: which results need a gradient.
      strides: of the tangents of these, as the backward pass wants them.
    """
    count = len(needs)
    differentiable = [k for k, need in enumerate(needs) if need]
    others = [k for k, need in enumerate(needs) if not need]

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            made = forward_pass(list(inputs))
            # A view could not be written to in place outside of here.
            results = tuple(torch.ops.aten._unsafe_view(t, t.shape) if t._is_view() else t for t in made[:count])
            ctx.save_for_backward(*made[count:])
            if others:
                ctx.mark_non_differentiable(*[results[k] for k in others])
            return results

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
            laid = [_laid(tangents[k], wanted) for k, wanted in zip(differentiable, strides)]
            given = [*ctx.saved_tensors, *laid]
            if torch.is_grad_enabled():
                return _Once.apply(backward_pass, *given)
            if torch._C._is_any_autocast_enabled():
                with torch._C._DisableAutocast():
                    return tuple(backward_pass(given))
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
