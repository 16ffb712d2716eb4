"""A forward and a backward pass as one function of PyTorch's autograd.

AOTAutograd's own function serves inputs that are written to, results that alias each other, tensor subclasses, random
states and more; where there is none of it, half of a short step's time on the host is spent on asking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..capture.joint import Boxed, Passes

Function = Callable[..., tuple[Tensor, ...]]


def differentiated(whole: Callable[..., Any], passes: Passes) -> Callable[..., Any]:
    """AOTAutograd's function of a graph, or one that asks less at each call where that will do."""
    return _shortened(passes) or whole


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
    # Places of what is saved, and of the results that are the same memory; known from the first call on.
    shared: list[tuple[int, int]] | None = None

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            nonlocal shared
            # The graph has its casts in it: PyTorch is not to cast again what is left of it.
            with torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else nullcontext():
                made = forward_pass(list(inputs))
            # A view could not be written to in place outside of here.
            results = tuple(torch.ops.aten._unsafe_view(t, t.shape) if t._is_view() else t for t in made[:count])
            # What was made under inference_mode, autograd saves for nobody.
            saved = [t.clone() if t.is_inference() else t for t in made[count:]]
            if shared is None:
                shared = _shared(results, saved)
            for place, result in shared:
                # A view of what is returned, so that PyTorch sees where that was written to.
                t = saved[place]
                saved[place] = results[result].detach().as_strided(t.shape, t.stride(), t.storage_offset())
            ctx.save_for_backward(*saved)
            return results

        # TorchDynamo looks at what runs within a compiled function, as a call of torch.autograd.grad there does.
        @staticmethod
        @torch.compiler.disable
        def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
            given = [*ctx.saved_tensors, *map(_laid, tangents, strides)]
            if torch.is_grad_enabled():
                return _Once.apply(backward_pass, *given)
            with torch._C._DisableAutocast():
                return tuple(backward_pass(given))

    return Step.apply


def _shared(results: Sequence[Tensor], saved: Sequence[Tensor]) -> list[tuple[int, int]]:
    """(place of a saved tensor, place of a result) where both are the same memory."""
    places = {t.untyped_storage()._cdata: n for n, t in enumerate(results)}
    memory = (t.untyped_storage()._cdata for t in saved)
    return [(n, places[m]) for n, m in enumerate(memory) if m in places and saved[n] is not results[places[m]]]


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
