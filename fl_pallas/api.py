"""fl.compile and fl.explain: capture, schedule, realise, launch; and the fallback policy, in one place."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal

import torch
from torch._C._functorch import maybe_current_level as functorch_level
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from .bridge.autograd import differentiated
from .bridge.dlpack import DlpackKernel, float32_products
from .bridge.launch import DirectKernel, Family, unavailable
from .bridge.rest import Whole, compile_rest
from .bridge.splice import RegionRunner, one_by_one, splice, with_reshapes
from .capture import kernels_device, translate
from .capture.aten import mutates_inputs, to_aten
from .capture.drawn import give_back
from .capture.joint import NOTHING, Compiler, Known, are_parameters, differentiable, parameters_of
from .capture.laid import lay_as_pytorch
from .capture.narrow import narrow
from .capture.numbers import Numbers, has_numbers, numbers_of
from .capture.shapes import by_shape
from .capture.writes import parts_between_writes, run_parts
from .classes import compiled_class
from .config import Config, config
from .errors import FallbackWarning, InputError, Unsupported
from .explain import Explanation, Fallback, Graph, Stage
from .kernels.triton import check_supported
from .schedule.dtype import itemsize
from .schedule.passes.grow_regions import Region
from .schedule.passes.hand_on import handed_on
from .schedule.passes.joins import given_or_returned
from .schedule.passes.keep import inner, keep
from .schedule.passes.vanish import vanishing
from .schedule.pipeline import Schedule, computed_again, schedule
from .schedule.plan import KernelPlan
from .schedule.program import Program, Value, left_to_pytorch, with_parameters
from .schedule.target import HOPPER, Target, target_of

# How often both passes of a graph are planned.
MAX_ATTEMPTS = 3
# Specialisations of one graph (shapes, strides, types) kept at a time.
MAX_SPECIALISATIONS = 256
# TorchDynamo stops compiling, silently, past this many versions of one function; its own default is 8.
RECOMPILE_LIMIT = 1024
# Python's limit of recursion while expressions are planned.
DEPTH = 10_000

PYTORCH = os.path.dirname(torch.__file__)
TRANSFORMED = "kernels have no rules for torch.func's transforms and for forward-mode derivatives"

_warned: set[tuple] = set()
# The backend of an `explain` that is running: what is compiled inside of what it explains is explained too.
_explaining: ContextVar[Backend | None] = ContextVar("explaining", default=None)


def compile(
    fn: Any = None,
    *,
    fallback: str | None = None,
    road: str | None = None,
    interpret: bool | None = None,
    tune: int | Literal["off"] | None = None,
    rest: str | None = None,
    dynamic: bool | None = None,
) -> Any:
    """Compile a function, method or nn.Module: fused kernels where its algebra allows, PyTorch elsewhere.

    Use as `fl.compile(fn)`, `@fl.compile` or `@fl.compile(...)`.

    Args:
      fn: what to compile. A module comes back as a module that shares its parameters and buffers; a class of modules
        as one whose instances are compiled.
      fallback: "torch" runs what cannot be fused in PyTorch, with one warning; "error" raises Unsupported.
      road: "auto", "dlpack" (through JAX's runtime) or "direct" (launched on PyTorch's stream).
      interpret: run kernels in Pallas's interpreter; by default only for CPU tensors.
      tune: how many choices of tiles, warps and stages are compiled and timed by the first call; "off"
        or 0 takes the model's pick.
      rest: who computes what no kernel does: "inductor" (PyTorch's compiler, for fixed shapes), "eager", or "auto":
        Inductor on GPUs.
      dynamic: as torch.compile's: whether TorchDynamo takes sizes for variables from the first call on; False: never,
        None: those that change.
      The first five, where None, follow `fl.config` when a graph is compiled.

    Returns: a callable with the same arguments and results as `fn`.

    Raises: ConfigError for a setting that is not allowed; TypeError for what is no function, module or class of
      modules. Calls of the result raise InputError for arguments that PyTorch would refuse.
    """
    given = {"fallback": fallback, "road": road, "interpret": interpret, "tune": tune, "rest": rest}
    config.merged(**given)
    if fn is None:
        return lambda f: compile(f, dynamic=dynamic, **given)
    if isinstance(fn, OptimizedModule):
        fn = fn._orig_mod  # of torch.compile, or of ours with other settings
    if isinstance(fn, type) and issubclass(fn, torch.nn.Module):
        return compiled_class(fn, lambda call: _compiled(call, Backend(given), dynamic))
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(f"fl.compile takes a function, a module or a class of modules, and no {fn!r}")
    return _compiled(fn, Backend(given), dynamic)


def torch_backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The TorchDynamo backend: `torch.compile(f, backend="fl_pallas", options={...})`."""
    return Backend(options.get("options") or {})(gm, example_inputs)


def explain(fn: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn` on these arguments and tell what became of it.

    Args:
      fn: what one would give to `fl.compile`, or what that returned.
    """
    explanation = Explanation()
    original = getattr(fn, "_orig_mod", None) or _original(fn)
    backend = Backend({"fallback": "torch"}, explanation)
    before = _explaining.set(backend)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            out = _compiled(original, backend)(*args, **kwargs)
            _differentiate(out)
    finally:
        _explaining.reset(before)
    return explanation


def _original(fn: Any) -> Any:
    """What `compile` was given to make `fn`, bound as that is; `fn` itself where it was not."""
    if isinstance(fn, types.MethodType) and hasattr(fn.__func__, "__fl_original__"):
        return types.MethodType(fn.__func__.__fl_original__, fn.__self__)
    return getattr(fn, "__fl_original__", fn)


def _differentiate(out: Any) -> None:
    """Run the backward pass of a result, for what it compiles; no gradient is kept."""
    outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    nodes = [o.grad_fn for o in outs if o.grad_fn is not None]
    before = [GradientEdge(n, k) for node in nodes for n, k in node.next_functions if n is not None]
    if before:
        torch.autograd.grad(outs, before, [torch.ones_like(o) for o in outs], allow_unused=True)


def _compiled(fn: Any, backend: Backend, dynamic: bool | None = None) -> Any:
    """`fn` through TorchDynamo with our backend, its errors made ours."""
    options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT} if _has_recompile_limit() else {}
    inner = torch.compile(fn, backend=backend, dynamic=dynamic, **options)
    if isinstance(fn, torch.nn.Module):
        return _Compiled(inner._orig_mod, inner.dynamo_ctx, backend)
    call = functools.wraps(fn)(_guarded(inner, fn, backend))
    call.__fl_original__ = fn  # type: ignore[attr-defined]
    return call


@functools.cache
def _has_recompile_limit() -> bool:
    import inspect

    known = "recompile_limit" in inspect.signature(torch.compile).parameters
    if not known:
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)  # type: ignore[assignment]
    return known


def _guarded(call: Callable[..., Any], plain: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """`call` with errors of ours; where a transform of PyTorch would see through, `plain`, of which it is made."""

    def known(*args: Any, **kwargs: Any) -> Any:
        explaining = _explaining.get()
        if explaining is None or backend is explaining:
            return call(*args, **kwargs)
        return _compiled(plain, explaining)(*args, **kwargs)

    apart = torch.compiler.disable(known)

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # A torch.compile around us would take our function into its own graph, and our kernels would go.
            return apart(*args, **kwargs)
        if functorch_level() is not None or forward_ad._current_level >= 0:
            # TorchDynamo would leave the function out here, and ever after; tangents would be lost.
            _report(Fallback(_name_of(plain), TRANSFORMED, None, 0), config.merged(**backend.given))
            return plain(*args, **kwargs)
        try:
            try:
                return known(*args, **kwargs)
            except RuntimeError as error:
                if "FX to symbolically trace" not in str(error):
                    raise
                # Another thread is tracing, and TorchDynamo mistakes its flag for ours.
                with compile_lock:
                    return call(*args, **kwargs)
        except TorchRuntimeError as error:
            raise InputError(f"PyTorch refuses these arguments: {_reason(str(error))}") from error
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, Unsupported):
                raise inner from None
            raise

    return run


class _Compiled(OptimizedModule):
    """A compiled module whose errors, and whose copies' errors, are ours."""

    def __init__(self, module: torch.nn.Module, context: Any, backend: Backend):
        self.__dict__["backend"] = backend  # set as attributes are, it would be the module's
        super().__init__(module, context)

    def __reduce__(self) -> Any:
        return type(self), (self._orig_mod, self.dynamo_ctx, self.__dict__["backend"])

    def __bool__(self) -> bool:
        # TorchDynamo asks this of a module inside of another; PyTorch 2.11's answer is len(), an error without one.
        return bool(self._orig_mod)

    def _initialize(self) -> None:
        super()._initialize()
        self.forward = _guarded(self.forward, self._orig_mod, self.__dict__["backend"])


def _name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


def _reason(text: str) -> str:
    """PyTorch's own words, the operation with the sizes it was given, and the user's line, of what TorchDynamo says."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [text]
    told = next((line for line in lines if line.startswith("Explanation: ") or " got " in line), lines[0])
    raised = re.search(r"got \w+\((['\"])(.*)\1\)", told)
    said = [raised[2] if raised else told.removeprefix("Explanation: ")]
    if raised and (call := re.search(r"call_\w+ (?:<(?:built-in )?(?:function|method) )?(\w+)", told)):
        sizes = re.findall(r"size=(\(.*?\))", told)
        said.append(f"{call[1]} of {' and '.join(sizes)}")
    places = re.findall(r'File "(.+?)", line (\d+), in .*\n\s*(.*)', text.partition("from user code:")[2])
    # PyTorch's own modules are called by a line of the user's.
    places = [p for p in places if not p[0].startswith(PYTORCH)] or places
    said += [f"at {file}:{line} `{code.strip()}`" for file, line, code in places[-1:]]
    return "; ".join(said)


class _NoRoad(Unsupported):
    """The user chose a road that does not lead to the tensors' device: nothing else will do."""


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

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        settings, end = config.merged(**self.given), _early_end(gm)
        lay_as_pytorch(gm)
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
    """A captured graph, compiled anew for each combination of shapes, strides and types it meets."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        fixed: bool,
        settings: Config,
        family: Family,
        explanation: Explanation | None,
        end: str | None,
    ):
        self.gm, self.settings, self.family, self.explanation = gm, settings, family, explanation
        self.end = end
        self.fixed = fixed
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
                _report(_refused(refusal), self.settings)
                run, out = self.gm, self.gm(*args)
            self.versions[key] = run
            self.only = run if self.fixed else None
            if len(self.versions) > MAX_SPECIALISATIONS:
                self.versions.popitem(last=False)
        return out

    def _build(self, args: Sequence[Any]) -> Callable[..., Any]:
        """What computes the graph for such arguments: kernels and what is left, or PyTorch alone."""
        try:
            with _deep():
                return self._planned(args)
        except _NoRoad:
            raise
        except RecursionError:
            refusal = Unsupported("a chain of operations", "it is too long to be written in terms of its operands")
        except Unsupported as error:
            refusal = error.with_traceback(None)  # whose frames hold the arguments, and this one it
        self._tell(Graph(None, (_refused(refusal),), ()))
        return self._whole(args)

    def _whole(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The graph by PyTorch alone."""
        rest = self.fixed and all(isinstance(a, torch.Tensor) for a in args)
        return Whole(self.gm) if rest and _has_inductor(_device(args), self.settings) else self.gm

    def _planned(self, args: Sequence[Any]) -> Callable[..., Any]:
        reason = _unfit(args) or _enabled(self.gm, args)
        if reason is not None:
            # Say so only where something would have been fused.
            history: list[Stage] = []
            aten = _functional(self.gm, args)
            would = None if aten is None else _scheduled(aten, args, self.settings, history)
            asked = would is not None and (would.regions or would.rejected)
            found = [Fallback("the whole graph", reason, None, 0)] if asked else []
            self._tell(Graph(None, tuple(found), tuple(history)))
            return self.gm
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self._differentiable(args)
        aten = _functional(self.gm, args)
        return self._between_writes(args) if aten is None else self._compiled(aten, args, self.gm)[0]

    def _between_writes(self, args: Sequence[Any]) -> Callable[..., Any]:
        """What writes to inputs by PyTorch, and the rest in parts that do not."""
        parts = parts_between_writes(self.gm, args)
        if parts is None:
            self._tell(Graph(None, (Fallback("an input is written to", "it cannot be done apart", None, 0),), ()))
            return self.gm
        return run_parts(parts, [p.gm if p.writes else self._part(p.gm) for p in parts], self.gm)

    def _part(self, gm: torch.fx.GraphModule) -> _Specialised:
        return _Specialised(gm, self.fixed, self.settings, self.family, self.explanation, self.end)

    def _differentiable(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Both passes; PyTorch's own where it would compute for the backward pass what only kernels know."""
        known = 0 if self.explanation is None else len(self.explanation.graphs)
        left, attempts = frozenset[str](), 0
        while True:
            attempts += 1
            made: dict[str, Schedule] = {}
            forward, backward = self._pass("forward", made), self._pass("backward", made)
            try:
                run = differentiated(*differentiable(self.gm, args, vanishing, keep, inner, forward, backward, left))
            except Unsupported as refusal:
                self._tell(Graph(None, (replace(_refused(refusal), bytes=self._unfused(args)),), ()))
                return self._whole(args)
            if "forward" not in made:
                return run
            if "backward" not in made:
                return self._whole(args) if made["forward"].regions else run
            again = computed_again(made["forward"], made["backward"])
            if not again:
                return run
            program = made["forward"].program
            limit = given_or_returned(program, program.saved)
            # What PyTorch makes in the forward pass is there in any case.
            inside = {m for region in made["forward"].regions for m in region.members}
            if attempts == MAX_ATTEMPTS or any(v.numel > limit and v.name in inside for v in again):
                return self._given_back(args, made["forward"], again[0], known)
            # No larger than what is there in any case: it is computed once, and kept.
            left |= {v.name for v in again}
            if self.explanation is not None:
                del self.explanation.graphs[known:]

    def _unfused(self, args: Sequence[Any]) -> int:
        """Bytes of the largest value that kernels would have kept to themselves, of the forward pass; 0 if none."""
        aten = _functional(self.gm, args)
        if aten is None:
            return 0
        return max(map(_nbytes, _large(_scheduled(aten, args, self.settings, []))), default=0)

    def _given_back(self, args: Sequence[Any], forward: Schedule, again: Value, known: int) -> Callable[..., Any]:
        """PyTorch's own of both passes: it would compute `again` for the backward pass.

        Args:
          args: of the graph.
          known: how many graphs were explained before these.
        """
        told: list[Graph] = []
        if self.explanation is not None:
            told = self.explanation.graphs[known:]
            del self.explanation.graphs[known:]
        # So is the largest of what kernels would have kept to themselves.
        around = [v for v in forward.program.values if v.op == "input" or v.name in forward.program.outputs]
        size, given = (max(map(_nbytes, some)) for some in ((again, *_large(forward)), around))
        found = tuple(f for graph in told for f in graph.fallbacks)
        if not found and (size > given or self.explanation is not None):
            why = "the backward pass needs it, and fuses nothing that is so short"
            found = (Fallback(again.op, why, again.where, size),)
        self._tell(Graph(None, found, tuple(stage for graph in told for stage in graph.history)))
        return self._whole(args)

    def _pass(self, name: str, schedules: dict[str, Schedule]) -> Compiler:
        """The compiler of the forward or the backward pass of the graph, which adds its schedule to `schedules`."""

        def compiler(aten: torch.fx.GraphModule, args: Sequence[Any], known: Known) -> Callable[..., Any]:
            plain = torch.fx.GraphModule(aten, _copied(aten.graph))
            with_reshapes(plain.graph)
            plain.recompile()
            try:
                with compile_lock:
                    run, schedules[name] = self._compiled(aten, args, plain, name, known)
            except Unsupported as refusal:
                self._tell(Graph(None, (_refused(refusal),), (), name=name))
                return plain.forward
            return self._or(run, plain.forward)

        return compiler

    def _or(self, run: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, or what PyTorch does `otherwise` where kernels turn out not to fit when they are first called."""
        chosen = [run]

        def call(*args: Any) -> Any:
            try:
                return chosen[0](*args)
            except Unsupported as refusal:
                _report(_refused(refusal), self.settings)
                chosen[0] = otherwise
                return otherwise(*args)

        return call

    def _compiled(
        self,
        aten: torch.fx.GraphModule,
        args: Sequence[Any],
        otherwise: torch.fx.GraphModule,
        name: str = "",
        known: Known = NOTHING,
    ) -> tuple[Callable[..., Any], Schedule]:
        history: list[Stage] = []
        found: list[Fallback] = []
        made = _scheduled(aten, args, self.settings, history, known)
        rest = self.fixed and _has_inductor(_device(args), self.settings)
        run, made, left = _realised(aten, made, args, self.settings, self.family, found, rest)
        if self.end is not None and not found and name != "backward" and (v := handed_on(made.program)) is not None:
            why = f"TorchDynamo ends the graph before what reads it ({self.end})"
            found.append(Fallback(v.op, why, v.where, _nbytes(v), fused=bool(made.regions)))
        self._tell(Graph(made, tuple(found), tuple(history), tuple(sorted(left.items())), name))
        return run or otherwise.forward, made

    def _tell(self, graph: Graph) -> None:
        """Into the explanation, if one was asked for; else as warnings."""
        if self.explanation is not None:
            self.explanation.graphs.append(graph)
        else:
            for f in graph.fallbacks:
                _report(f, self.settings)


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


def _refused(refusal: Unsupported) -> Fallback:
    """What a refusal leaves to PyTorch."""
    return Fallback(refusal.what, refusal.why, refusal.where, 0)


def _refused_in(refusal: Unsupported, program: Program, regions: Sequence[Region]) -> Fallback:
    """What a refusal of regions leaves to PyTorch, by their largest value, which kernels would keep to themselves."""
    largest = max((program.by_name[m] for region in regions for m in region.members), key=lambda v: v.numel)
    return Fallback(refusal.what, refusal.why, largest.where, _nbytes(largest))


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph of the same nodes."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _functional(gm: torch.fx.GraphModule, args: Sequence[Any]) -> torch.fx.GraphModule | None:
    """The graph in ATen operations; None if it writes to an input."""
    aten = to_aten(gm, args)
    if mutates_inputs(aten):
        return None
    with torch.no_grad():
        by_shape(aten)
        narrow(aten)
        give_back(aten, inner)
    return aten


def _scheduled(
    aten: torch.fx.GraphModule,
    args: Sequence[Any],
    settings: Config,
    history: list[Stage],
    known: Known = NOTHING,
) -> Schedule:
    """What becomes of a functional graph."""
    with torch.no_grad():
        program = with_parameters(translate(aten), known.parameters | parameters_of(aten, are_parameters(args)))
        program = replace(left_to_pytorch(program, known.left), facts=known.facts, saved=known.saved)
    return schedule(program, _target(args), lambda *entry: history.append(entry), verify=settings.verify)


def _realised(
    aten: torch.fx.GraphModule,
    made: Schedule,
    args: Sequence[Any],
    settings: Config,
    family: Family,
    found: list[Fallback],
    rest: bool,
) -> tuple[Callable[..., Any] | None, Schedule, Counter[str]]:
    """The graph with kernels in it (None if it stays as it is), what was scheduled, and what PyTorch still does: by
    functions of Inductor's, with `rest`.
    """
    device = _device(args)
    interpret = settings.interpret if settings.interpret is not None else device.type != "cuda"
    parts, regions, kernels = [], [], []
    for region, plans in zip(made.regions, made.kernels, strict=True):
        try:
            for plan in plans:
                check_supported(plan, interpret)
        except Unsupported as refusal:
            found.append(_refused_in(refusal, made.program, [region]))
            continue
        launchers = [_launcher(plan, device, interpret, settings, family) for plan in plans]
        parts.append((region.outputs, plans, launchers, [k.names for k in launchers]))
        regions.append(region)
        kernels.append(plans)
    found += [Fallback(r.blocker.op, r.why, r.blocker.where or r.value.where, r.nbytes, r.fused) for r in made.rejected]
    made = replace(made, regions=tuple(regions), kernels=tuple(kernels))
    if not parts:
        return compile_rest(aten).forward if rest else None, made, Counter(_left(aten))
    copy = torch.fx.GraphModule(aten, _copied(aten.graph))
    try:
        try:
            spliced = splice(aten, [RegionRunner(*part) for part in parts])
        except Unsupported:
            spliced = splice(copy, [runner for part in parts for runner in one_by_one(*part)])
    except Unsupported as refusal:
        found.append(_refused_in(refusal, made.program, regions))
        return None, replace(made, regions=(), kernels=()), Counter()
    found += _again(spliced, made)
    left = Counter(_left(spliced))
    return (compile_rest(spliced) if rest else spliced).forward, made, left


def _has_inductor(device: torch.device, settings: Config) -> bool:
    """Whether Inductor, and not eager PyTorch, runs what is no kernel."""
    return settings.rest == "inductor" or settings.rest == "auto" and device.type == "cuda"


def _again(spliced: torch.fx.GraphModule, made: Schedule) -> list[Fallback]:
    """What PyTorch computes although a kernel has it inside, where it is larger than all that is given and returned."""
    names = {n.name for n in spliced.graph.nodes}
    limit = given_or_returned(made.program)
    largest = max((v for v in _large(made) if v.name in names and v.numel > limit), key=lambda v: v.numel, default=None)
    if largest is None:
        return []
    why = "PyTorch computes it again, beside the kernels"
    return [Fallback(largest.op, why, largest.where, _nbytes(largest), fused=True)]


def _large(made: Schedule) -> list[Value]:
    """The values that kernels keep to themselves for their size."""
    return [made.program.by_name[m] for region in made.regions for m in region.large]


def _nbytes(v: Value) -> int:
    return v.numel * itemsize(v.dtype)


def _launcher(
    plan: KernelPlan, device: torch.device, interpret: bool, settings: Config, family: Family
) -> DlpackKernel | DirectKernel:
    """The road a kernel takes: direct wherever it can, unless the user chose.

    Raises: Unsupported if the user chose a road that does not lead to the device.
    """
    reason = unavailable(device)
    if settings.road == "direct" and reason is not None:
        raise _NoRoad('road="direct"', reason)
    if interpret or settings.road == "dlpack" or reason is not None:
        return DlpackKernel(plan, interpret)
    return DirectKernel(plan, device, settings.tune, family)


def _target(args: Sequence[Any]) -> Target:
    """What kernels are planned for: the GPU that the tensors are on, or a Hopper where there is none."""
    device = _device(args)
    if device.type != "cuda" or torch.version.hip is not None:
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    found = torch.cuda.get_device_properties(device)
    return replace(target_of(10 * major + minor), processors=found.multi_processor_count, memory=found.total_memory)


def _left(gm: torch.fx.GraphModule) -> list[str]:
    return [
        str(n.target)
        for n in gm.graph.nodes
        if n.op == "call_function" and str(n.target).startswith(("aten", "fl_pallas"))
    ]


def _unfit(args: Sequence[Any]) -> str | None:
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


def _enabled(gm: torch.fx.GraphModule, args: Sequence[Any]) -> str | None:
    """Why PyTorch must run a graph that turns gradients on by itself where they are off; None if it does not."""
    if torch.is_grad_enabled() or not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return None
    found = any(n.target is torch._C._set_grad_enabled and n.args[0] is True for n in gm.graph.nodes)
    return "torch.enable_grad inside of what is called under torch.no_grad" if found else None


def _device(args: Sequence[Any]) -> torch.device:
    """What kernels run on: what is on a CPU beside a GPU's tensors is PyTorch's to move."""
    return kernels_device(a for a in args if isinstance(a, torch.Tensor))


def _is_symbolic(a: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*a.shape, *a.stride(), a.storage_offset()))
    return not isinstance(a, (bool, str, type(None)))


def _signature(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.shape, a.stride(), a.dtype, a.device, a.requires_grad
    return type(a), repr(a)


def _report(f: Fallback, settings: Config) -> None:
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
