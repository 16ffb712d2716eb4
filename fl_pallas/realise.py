"""One functional graph: translated, scheduled, and realised as kernels in what PyTorch still does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .bridge.ahead import Together
from .bridge.dlpack import DlpackKernel
from .bridge.launch import DirectKernel, Family, unavailable
from .bridge.rest import compile_rest
from .bridge.splice import RegionRunner, expect, one_by_one, splice
from .capture import kernels_device, translate
from .capture.alike import in_batches, keeps_gradients, repeats, without_repeats
from .capture.aten import mutates_inputs, to_aten
from .capture.drawn import give_back
from .capture.joint import NOTHING, Known, are_parameters, parameters_of
from .capture.narrow import narrow
from .capture.shapes import by_shape
from .config import Config
from .errors import Unsupported
from .explain import Fallback, Stage
from .fallback import NoRoad, nbytes, refused_in
from .kernels.triton import check_supported
from .schedule.passes.blow_ups import given_or_returned
from .schedule.passes.keep import inner
from .schedule.passes.scans import grow_scanned
from .schedule.pipeline import Schedule, schedule
from .schedule.plan import KernelPlan
from .schedule.program import KEPT, Value, left_to_pytorch, with_parameters
from .schedule.target import HOPPER, Target, target_of


def functional(gm: torch.fx.GraphModule, args: Sequence[Any]) -> torch.fx.GraphModule | None:
    """The graph in ATen operations; None if it writes to an input."""
    aten = to_aten(gm, args)
    if mutates_inputs(aten):
        return None
    with torch.no_grad():
        by_shape(aten)
        narrow(aten)
        give_back(aten, inner)
    aten.recompile()
    return aten


def batched(gm: torch.fx.GraphModule, args: Sequence[Any], differentiable: bool) -> torch.fx.GraphModule | None:
    """A graph of torch functions in ATen operations, its regions that are alike put together; None if none are.

    Args:
      differentiable: whether autograd is to see what the graph does.
    """
    if not repeats(gm) or differentiable and not keeps_gradients(gm):
        return None
    try:
        aten = to_aten(gm, args)
    except Unsupported:
        return None  # as whoever asks next will find
    if mutates_inputs(aten):
        return None
    with torch.no_grad():
        aten = without_repeats(aten)
        program = with_parameters(translate(aten), parameters_of(aten, are_parameters(args)))
        _, _, growth, _ = grow_scanned(program)
        return aten if in_batches(aten, growth.regions) else None


def scheduled(
    aten: torch.fx.GraphModule,
    args: Sequence[Any],
    settings: Config,
    history: list[Stage],
    known: Known = NOTHING,
) -> Schedule:
    """What becomes of a functional graph."""
    with torch.no_grad():
        program = with_parameters(translate(aten), known.parameters | parameters_of(aten, are_parameters(args)))
        program = left_to_pytorch(program, known.left, KEPT)
        program = replace(program, facts=known.facts, saved=known.saved, tokens=known.tokens)
    return schedule(program, _target(args), lambda *entry: history.append(entry), verify=settings.verify)


def realised(
    aten: torch.fx.GraphModule,
    made: Schedule,
    args: Sequence[Any],
    settings: Config,
    family: Family,
    found: list[Fallback],
    rest: bool,
    together: Together,
) -> tuple[Callable[..., Any] | None, Schedule, Counter[str]]:
    """The graph with kernels in it (None if it stays as it is), what was scheduled, and what PyTorch still does: by
    functions of Inductor's, with `rest`. Its kernels are compiled `together` with those of other graphs.
    """
    device = device_of(args)
    interpret = settings.interpret if settings.interpret is not None else device.type != "cuda"
    parts, regions, kernels = [], [], []
    for region, plans in zip(made.regions, made.kernels, strict=True):
        try:
            for plan in plans:
                check_supported(plan, interpret)
        except Unsupported as refusal:
            found.append(refused_in(refusal, made.program, [region]))
            continue
        launchers = [_launcher(plan, device, interpret, settings, family) for plan in plans]
        parts.append((region.outputs, plans, launchers, [k.names for k in launchers], together))
        regions.append(region)
        kernels.append(plans)
    found += [Fallback(r.blocker.op, r.why, r.blocker.where or r.value.where, r.nbytes, r.fused) for r in made.rejected]
    made = replace(made, regions=tuple(regions), kernels=tuple(kernels))
    if not parts:
        return compile_rest(aten).forward if rest else None, made, Counter(_left(aten))
    copy = torch.fx.GraphModule(aten, copied(aten.graph))
    try:
        try:
            spliced = splice(aten, [RegionRunner(*part) for part in parts])
        except Unsupported:
            spliced = splice(copy, [runner for part in parts for runner in one_by_one(*part)])
    except Unsupported as refusal:
        found.append(refused_in(refusal, made.program, regions))
        return None, replace(made, regions=(), kernels=()), Counter()
    found += _again(spliced, made)
    left = Counter(_left(spliced))
    expect(spliced)
    return (compile_rest(spliced) if rest else spliced).forward, made, left


def _launcher(
    plan: KernelPlan, device: torch.device, interpret: bool, settings: Config, family: Family
) -> DlpackKernel | DirectKernel:
    """The road a kernel takes: direct wherever it can, unless the user chose.

    Raises: Unsupported if the user chose a road that does not lead to the device.
    """
    reason = unavailable(device)
    if settings.road == "direct" and reason is not None:
        raise NoRoad('road="direct"', reason)
    if interpret or settings.road == "dlpack" or reason is not None:
        return DlpackKernel(plan, interpret)
    return DirectKernel(plan, device, settings.tune, family)


def _again(spliced: torch.fx.GraphModule, made: Schedule) -> list[Fallback]:
    """What PyTorch computes although a kernel has it inside, where it is larger than all that is given and returned."""
    names = {n.name for n in spliced.graph.nodes}
    limit = given_or_returned(made.program)
    computed = (v for v in large(made) if v.name in names and not v.is_view)
    largest = max((v for v in computed if v.numel > limit), key=lambda v: v.numel, default=None)
    if largest is None:
        return []
    why = "PyTorch computes it again, beside the kernels"
    return [Fallback(largest.op, why, largest.where, nbytes(largest), fused=True)]


def large(made: Schedule) -> list[Value]:
    """The values that kernels keep to themselves for their size."""
    return [made.program.by_name[m] for region in made.regions for m in region.large]


def has_inductor(device: torch.device, settings: Config) -> bool:
    """Whether Inductor, and not eager PyTorch, runs what is no kernel."""
    return settings.rest == "inductor" or settings.rest == "auto" and device.type == "cuda"


def _left(gm: torch.fx.GraphModule) -> list[str]:
    return [
        str(n.target)
        for n in gm.graph.nodes
        if n.op == "call_function" and str(n.target).startswith(("aten", "fl_pallas"))
    ]


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph of the same nodes."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _target(args: Sequence[Any]) -> Target:
    """What kernels are planned for: the GPU that the tensors are on, or a Hopper where there is none."""
    device = device_of(args)
    if device.type != "cuda" or torch.version.hip is not None:
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    found = torch.cuda.get_device_properties(device)
    return replace(target_of(10 * major + minor), processors=found.multi_processor_count, memory=found.total_memory)


def device_of(args: Sequence[Any]) -> torch.device:
    """What kernels run on: what is on a CPU beside a GPU's tensors is PyTorch's to move."""
    return kernels_device(a for a in args if isinstance(a, torch.Tensor))
