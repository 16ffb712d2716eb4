"""The public face: fl.compile and fl.explain, through TorchDynamo, with errors that are ours."""

from __future__ import annotations

import functools
import os
import re
import types
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch._C._functorch import maybe_current_level as functorch_level
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from .backend import Backend
from .capture import skipped
from .capture.inlined import substitute
from .classes import compiled_class
from .config import config
from .errors import FallbackWarning, InputError, Unsupported
from .explain import Explanation, Fallback
from .fallback import report

# TorchDynamo stops compiling, silently, past this many versions of one function; its own default is 8.
RECOMPILE_LIMIT = 1024

PYTORCH = os.path.dirname(torch.__file__)
TRANSFORMED = "kernels have no rules for torch.func's transforms and for forward-mode derivatives"

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
    substitute()
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

    before = skipped.known(plain)

    def known(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        explaining = _explaining.get()
        if explaining is not None and backend is not explaining:
            return _compiled(plain, explaining)(*args, **kwargs)
        frames = skipped.frames()
        out = call(*args, **kwargs)
        if (new := skipped.frames() - frames) or before:
            backend.skip(before + skipped.skipped(new))
            before = []
        return out

    apart = torch.compiler.disable(known)

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # A torch.compile around us would take our function into its own graph, and our kernels would go.
            return apart(*args, **kwargs)
        if functorch_level() is not None or forward_ad._current_level >= 0:
            # TorchDynamo would leave the function out here, and ever after; tangents would be lost.
            report(Fallback(_name_of(plain), TRANSFORMED, None, 0), config.merged(**backend.given))
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
            reason = _reason(str(error))
            refused = InputError(f"PyTorch refuses these arguments: {reason}")
            # A number that changes from call to call is a symbol to TorchDynamo, which asks more of it than PyTorch.
            if not any(isinstance(a, (int, float)) for a in tree_leaves((args, kwargs))):
                raise refused from error
            try:
                out = plain(*args, **kwargs)
            except Exception:
                raise refused from error
            why = f"TorchDynamo cannot trace it for these arguments ({reason})"
            report(Fallback(_name_of(plain), why, None, 0), config.merged(**backend.given))
            return out
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
