"""Compile a function with the kernels of one's choice, without the face of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fl_pallas.bridge.splice import RegionRunner, splice
from fl_pallas.capture import translate
from fl_pallas.capture.aten import to_aten
from fl_pallas.schedule.pipeline import schedule
from fl_pallas.schedule.plan import KernelPlan


def compile_with(kernel: Callable[[KernelPlan], Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, its fused regions run by what `kernel` makes of their plans. Specialises to the first arguments."""

    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        built: list[Callable[..., Any]] = []

        def run(*args: Any) -> Any:
            if not built:
                with torch.no_grad():
                    built.append(_build(gm, args, kernel))
            return built[0](*args)

        return run

    return torch.compile(fn, backend=backend, dynamic=False)


def _build(gm: torch.fx.GraphModule, args: Sequence[Any], kernel: Callable[[KernelPlan], Any]) -> Callable[..., Any]:
    aten = to_aten(gm, args)
    made = schedule(translate(aten), verify=True)
    assert made.kernels, "nothing to fuse"
    runners = []
    for region, plans in zip(made.regions, made.kernels, strict=True):
        kernels = [kernel(p) for p in plans]
        runners.append(RegionRunner(region.outputs, plans, kernels, [k.names for k in kernels]))
    return splice(aten, runners)
