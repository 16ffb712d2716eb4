"""The TorchDynamo backend: captured graphs, their specialisations, both passes, and what is left to PyTorch of each."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from .bridge.ahead import Together, prepare
from .bridge.autograd import differentiated
from .bridge.dlpack import float32_products
from .bridge.launch import Family
from .bridge.rest import Whole
from .capture.control import has_control, with_calls
from .capture.in_place import out_of_place
from .capture.joint import NOTHING, Compiler, Known, differentiable
from .capture.laid import lay_as_pytorch
from .capture.nested import inline
from .capture.numbers import Numbers, has_numbers, numbers_of
from .capture.one_place import at_lists
from .capture.order import with_reshapes
from .capture.writes import parts_between_writes, run_parts
from .config import Config, config
from .errors import NoGradient, Unsupported, failing
from .explain import Explanation, Fallback, Graph, Stage
from .fallback import NoRoad, enabled, moved, nbytes, refused, report, unfit
from .realise import batched, copied, device_of, functional, has_inductor, large, realised, scheduled
from .schedule.computed_again import computed_again
from .schedule.passes.blow_ups import given_or_returned
from .schedule.passes.hand_on import handed_on
from .schedule.passes.keep import inner, keep
from .schedule.passes.vanish import vanishing
from .schedule.pipeline import Schedule
from .schedule.program import Value

# How often both passes of a graph are planned.
MAX_ATTEMPTS = 3
# Specialisations of one graph (shapes, strides, types) kept at a time.
MAX_SPECIALISATIONS = 256
# Python's limit of recursion while expressions are planned.
DEPTH = 10_000


class Backend:
    """A TorchDynamo backend; keeps its settings, its kernels and, for fl.explain, what it saw."""

    def __init__(self, given: dict[str, Any], explanation: Explanation | None = None):
        self.given, self.explanation = given, explanation
        self.family = Family()

    def __deepcopy__(self, _: dict[int, Any]) -> Backend:
        """Itself: kernels serve the copy of a module (an average of its weights, say) as they serve the module."""
        return self

    def __reduce__(self) -> Any:
        """What is pickled of a compiled module is its settings: kernels are made anew."""
        return Backend, (self.given,)

    def skip(self, refusals: Sequence[Unsupported]) -> None:
        """Tell of what TorchDynamo never hands on, and PyTorch runs."""
        for fallback in map(refused, refusals):
            if self.explanation is not None:
                self.explanation.skipped.append(fallback)
            report(fallback, config.merged(**self.given))

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        settings, end = config.merged(**self.given), _early_end(gm)
        if settings.road != "dlpack" and not settings.interpret:
            prepare(device_of(example_inputs))
        inline(gm)
        lay_as_pytorch(gm)
        at_lists(gm)
        # TorchDynamo's guards hold everything fixed unless some size is symbolic.
        fixed = not any(map(_is_symbolic, example_inputs))

        def made(gm: torch.fx.GraphModule) -> _Specialised:
            return _Specialised(gm, fixed, settings, self.family, self.explanation, end)

        return _Numbered(gm, made) if has_numbers(gm) else made(gm)


def _early_end(gm: torch.fx.GraphModule) -> str | None:
    """Why TorchDynamo ends a captured graph before the function does, and at which line; None if it does not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    line = f"at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}: " if reason.user_stack else ""
    return line + reason.reason.splitlines()[0]


class _Numbered:
    """A captured graph that computes with numbers, made anew for those that are no tensors to its operations."""

    def __init__(self, gm: torch.fx.GraphModule, made: Callable[[torch.fx.GraphModule], _Specialised]):
        self.gm, self.made = gm, made
        self.numbers: Numbers | None = None
        self.versions: OrderedDict[tuple[str, ...], _Specialised] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        if self.numbers is None:
            with compile_lock:
                self.numbers = numbers_of(self.gm, args)
        values = self.numbers.of(*args)
        key = self.numbers.known(values)
        run = self.versions.get(key)
        if run is None:
            with compile_lock:
                run = self.versions.setdefault(key, self.made(self.numbers.without(values)))
                if len(self.versions) > MAX_SPECIALISATIONS:
                    self.versions.popitem(last=False)
        return run(*args, *self.numbers.tensors(values))


class _Specialised:
    """A captured graph, compiled anew for each combination of shapes, strides and types it meets.

    Args:
      fixed: whether no size of it varies.
      end: why TorchDynamo ends it early.
      varied: whether tensors may be of another kind than the first time, which TorchDynamo's guards do not see.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        fixed: bool,
        settings: Config,
        family: Family,
        explanation: Explanation | None,
        end: str | None,
        varied: bool = False,
    ):
        self.gm, self.settings, self.family, self.explanation = gm, settings, family, explanation
        self.end = end
        self.fixed, self.varied = fixed, varied
        self.only: Callable[..., Any] | None = None
        self.versions: OrderedDict[tuple, Callable[..., Any]] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        if self.only is not None:
            return self.only(*args)
        key = (*map(_signature, args), torch.is_grad_enabled(), float32_products())
        run = self.versions.get(key)
        if run is not None:
            return run(*args)
        # Tracing patches PyTorch for the whole process. TorchDynamo takes the patches it finds away while it captures
        # and puts them back after: neither may run beside the other, in whatever thread.
        with compile_lock:
            run = self.versions.get(key) or self._build(args)
            try:
                # Kernels are compiled by their first call; inputs are never written, so PyTorch can still do it.
                out = run(*args)
            except Unsupported as refusal:
                report(refused(refusal), self.settings)
                run, out = self.gm, self.gm(*args)
            self.versions[key] = run
            self.only = run if self.fixed and not self.varied else None
            if len(self.versions) > MAX_SPECIALISATIONS:
                self.versions.popitem(last=False)
        return out

    def _build(self, args: Sequence[Any]) -> Callable[..., Any]:
        """What computes the graph for such arguments: kernels and what is left, or PyTorch alone."""
        try:
            with _deep(), failing("the graph", self.settings.verify):
                return self._planned(args)
        except NoRoad:
            raise
        except RecursionError:
            refusal = Unsupported("a chain of operations", "it is too long to be written in terms of its operands")
        except Unsupported as error:
            refusal = error.with_traceback(None)  # whose frames hold the arguments, and this one it
        self._tell(Graph(None, (refused(refusal),), ()))
        return self._whole(args)

    def _whole(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The graph by PyTorch alone."""
        rest = self.fixed and all(isinstance(a, torch.Tensor) for a in args)
        return Whole(self.gm) if rest and has_inductor(device_of(args), self.settings) else self.gm

    def _planned(self, args: Sequence[Any]) -> Callable[..., Any]:
        reason = unfit(args) or enabled(self.gm, args)
        if reason is not None:
            # Say so only where something would have been fused.
            history: list[Stage] = []
            aten = functional(self.gm, args)
            would = None if aten is None else scheduled(aten, args, self.settings, history)
            asked = would is not None and (would.regions or would.rejected)
            found = [Fallback("the whole graph", reason, None, 0)] if asked else []
            self._tell(Graph(None, tuple(found), tuple(history)))
            return self.gm
        if (reason := moved(self.gm)) is not None:
            self._tell(Graph(None, (Fallback("the whole graph", reason, None, 0),), ()))
            return self.gm
        if has_control(self.gm):
            return self._between_writes(args)
        whole = copy.copy(self)
        differentiable = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        whole.gm = batched(self.gm, args, differentiable) or self.gm
        return whole._differentiable(args) if differentiable else whole._inference(args)

    def _inference(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The forward pass alone."""
        aten = functional(self.gm, args)
        if aten is None:
            return self._between_writes(args)
        together = Together()
        run, _, told = self._compiled(aten, args, self.gm, together)
        self._tell(told)
        together.begin()
        return run

    def _between_writes(self, args: Sequence[Any]) -> Callable[..., Any]:
        """What writes to inputs by PyTorch, control flow that data decides by Python, and the rest in parts."""
        parts = parts_between_writes(self.gm, args)
        if parts is None:
            what = "control flow" if has_control(self.gm) else "an input is written to"
            self._tell(Graph(None, (Fallback(what, "it cannot be done apart", None, 0),), ()))
            return self.gm
        # What a loop or a branch hands on may lie otherwise, or need a gradient, where the first time it did not.
        varied = has_control(self.gm)

        def part(gm: torch.fx.GraphModule) -> _Specialised:
            return _Specialised(gm, self.fixed, self.settings, self.family, self.explanation, self.end, varied)

        return run_parts(parts, [with_calls(p.gm, part) if p.writes else part(p.gm) for p in parts], self.gm)

    def _differentiable(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Both passes; PyTorch's own where it would compute for the backward pass what only kernels know."""
        gm, left, attempts = self.gm, frozenset[str](), 0
        while True:
            attempts += 1
            made: dict[str, Schedule] = {}
            # Of attempts only the last is told of.
            told: list[Graph] = []
            together = Together()
            forward, backward = (self._pass(name, made, told, together) for name in ("forward", "backward"))
            try:
                run = differentiated(*differentiable(gm, args, vanishing, keep, inner, forward, backward, left))
            except Unsupported as refusal:
                retry = gm is self.gm and not isinstance(refusal, NoGradient)
                if retry and (plain := out_of_place(gm)) is not None:
                    gm = plain
                    continue
                self._tell(*told, Graph(None, (replace(refused(refusal), bytes=self._unfused(args)),), ()))
                return self._whole(args)
            fused = {name: bool(schedule.regions) for name, schedule in made.items()}
            again = computed_again(made["forward"], made["backward"]) if len(made) == 2 and any(fused.values()) else []
            if not again:
                self._tell(*told)
                if fused in ({"forward": True}, {"forward": False, "backward": False}):
                    return self._whole(args)  # Inductor does better by a graph that nobody has taken apart
                together.begin()
                return run
            program = made["forward"].program
            limit = given_or_returned(program, program.saved)
            # What PyTorch makes in the forward pass is there in any case.
            large = {v.name for v in again if v.numel > limit}
            short = [r for r in made["forward"].regions if not large.isdisjoint(r.members)]
            if attempts == MAX_ATTEMPTS or short and len(short) == len(made["forward"].regions):
                return self._given_back(args, made["forward"], again[0], told)
            # No larger than what is there in any case, or of a region that is PyTorch's by itself: it is computed
            # once, and kept.
            left |= {v.name for v in again}.union(*(r.large for r in short))

    def _unfused(self, args: Sequence[Any]) -> int:
        """Bytes of the largest value that kernels would have kept to themselves, of the forward pass; 0 if none."""
        aten = functional(self.gm, args)
        if aten is None:
            return 0
        return max(map(nbytes, large(scheduled(aten, args, self.settings, []))), default=0)

    def _given_back(
        self, args: Sequence[Any], forward: Schedule, again: Value, told: Sequence[Graph]
    ) -> Callable[..., Any]:
        """PyTorch's own of both passes: it would compute `again` for the backward pass.

        Args:
          args: of the graph.
          told: what there was to tell of both passes.
        """
        # So is the largest of what kernels would have kept to themselves.
        around = [v for v in forward.program.values if v.op == "input" or v.name in forward.program.outputs]
        size, given = (max(map(nbytes, some)) for some in ((again, *large(forward)), around))
        found = tuple(f for graph in told for f in graph.fallbacks)
        if not found and (size > given or self.explanation is not None):
            why = "the backward pass needs it, and fuses nothing"
            found = (Fallback(again.op, why, again.where, size),)
        self._tell(Graph(None, found, tuple(stage for graph in told for stage in graph.history)))
        return self._whole(args)

    def _pass(self, name: str, schedules: dict[str, Schedule], told: list[Graph], together: Together) -> Compiler:
        """The compiler of the forward or the backward pass of the graph, which adds its schedule to `schedules`, and
        what there is to tell to `told`; the kernels of both are compiled `together`."""

        def compiler(aten: torch.fx.GraphModule, args: Sequence[Any], known: Known) -> Callable[..., Any]:
            plain = torch.fx.GraphModule(aten, copied(aten.graph))
            with_reshapes(plain.graph)
            plain.recompile()
            try:
                with compile_lock, failing(f"the {name} pass", self.settings.verify):
                    run, schedules[name], graph = self._compiled(aten, args, plain, together, name, known)
            except Unsupported as refusal:
                told.append(Graph(None, (refused(refusal),), (), name=name))
                return plain.forward
            told.append(graph)
            return self._or(run, plain.forward)

        return compiler

    def _or(self, run: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, or what PyTorch does `otherwise` where kernels turn out not to fit when they are first called."""
        chosen = [run]

        def call(*args: Any) -> Any:
            try:
                return chosen[0](*args)
            except Unsupported as refusal:
                report(refused(refusal), self.settings)
                chosen[0] = otherwise
                return otherwise(*args)

        return call

    def _compiled(
        self,
        aten: torch.fx.GraphModule,
        args: Sequence[Any],
        otherwise: torch.fx.GraphModule,
        together: Together,
        name: str = "",
        known: Known = NOTHING,
    ) -> tuple[Callable[..., Any], Schedule, Graph]:
        history: list[Stage] = []
        found: list[Fallback] = []
        made = scheduled(aten, args, self.settings, history, known)
        rest = self.fixed and has_inductor(device_of(args), self.settings)
        run, made, left = realised(aten, made, args, self.settings, self.family, found, rest, together)
        if self.end is not None and not found and name != "backward" and (v := handed_on(made.program)) is not None:
            why = f"TorchDynamo ends the graph before what reads it ({self.end})"
            found.append(Fallback(v.op, why, v.where, nbytes(v), fused=bool(made.regions)))
        graph = Graph(made, tuple(dict.fromkeys(found)), tuple(history), tuple(sorted(left.items())), name)
        return run or otherwise.forward, made, graph

    def _tell(self, *graphs: Graph) -> None:
        """Into the explanation, if one was asked for; else as warnings."""
        if self.explanation is not None:
            self.explanation.graphs += graphs
        else:
            for f in (f for graph in graphs for f in graph.fallbacks):
                report(f, self.settings)


@contextlib.contextmanager
def _deep() -> Iterator[None]:
    """Lets expressions nest as deep as DEPTH: fifty steps of a bisection, each of which sums a row, are beyond what
    Python allows."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _is_symbolic(a: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*a.shape, *a.stride(), a.storage_offset()))
    return not isinstance(a, (bool, str, type(None)))


def _signature(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.shape, a.stride(), a.dtype, a.device, a.requires_grad
    return type(a), repr(a)
