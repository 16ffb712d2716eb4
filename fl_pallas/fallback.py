"""The fallback policy: what is left to PyTorch, why, and how the user hears of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .config import Config
from .errors import FallbackWarning, Unsupported
from .explain import Fallback
from .schedule.dtype import itemsize
from .schedule.passes.region import Region
from .schedule.program import Program, Value

_warned: set[tuple] = set()


class NoRoad(Unsupported):
    """The user chose a road that does not lead to the tensors' device: nothing else will do."""


def report(f: Fallback, settings: Config) -> None:
    """One warning per cause, at the user's line, or an exception where the user asked for one."""
    if settings.fallback == "error":
        raise Unsupported(f.what, f.why, f.where)
    cause = f.what, f.why, f.where
    if cause in _warned:
        return
    _warned.add(cause)
    if f.where is None:
        warnings.warn(str(f), FallbackWarning, stacklevel=2)
    else:
        warnings.warn_explicit(str(f), FallbackWarning, f.where.file, f.where.line)


def refused(refusal: Unsupported) -> Fallback:
    """What a refusal leaves to PyTorch."""
    return Fallback(refusal.what, refusal.why, refusal.where, 0)


def refused_in(refusal: Unsupported, program: Program, regions: Sequence[Region]) -> Fallback:
    """What a refusal of regions leaves to PyTorch, by their largest value, which kernels would keep to themselves."""
    largest = max((program.by_name[m] for region in regions for m in region.members), key=lambda v: v.numel)
    return Fallback(refusal.what, refusal.why, largest.where, nbytes(largest))


def nbytes(v: Value) -> int:
    """Bytes of a value as PyTorch stores it."""
    return v.numel * itemsize(v.dtype)


def unfit(args: Sequence[Any]) -> str | None:
    """Why a graph called with these arguments must run in PyTorch whole; None if it need not."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    devices = {t.device for t in tensors if t.dim() and t.device.type != "cpu"}
    if len(devices) > 1:
        return f"tensors on {', '.join(sorted(map(str, devices)))}"
    if any(d.type != "cuda" for d in devices):
        return f"device {', '.join(sorted(map(str, devices)))}"
    if any(t.layout is not torch.strided or type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return "a tensor that is sparse, nested or of a subclass"
    return None


def enabled(gm: torch.fx.GraphModule, args: Sequence[Any]) -> str | None:
    """Why PyTorch must run a graph that turns gradients on by itself where they are off; None if it does not."""
    if torch.is_grad_enabled() or not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return None
    found = any(n.target is torch._C._set_grad_enabled and n.args[0] is True for n in gm.graph.nodes)
    return "torch.enable_grad inside of what is called under torch.no_grad" if found else None


def moved(gm: torch.fx.GraphModule) -> str | None:
    """Why PyTorch must run a graph in which an input gets other memory; None if none does.

    Nothing is written there, so that it cannot be done apart, as writes are; and what reads the input comes after.
    """
    named = (n for n in gm.graph.nodes if n.target in ("set_", torch.Tensor.set_))
    found = any(n.args[0].op in ("placeholder", "get_attr") for n in named)
    return "an input that gets other memory (`x.data = y`; `x.copy_(y)` is a write, done apart)" if found else None
