"""Regions back into the graph: their nodes give way to one call of their kernels; the rest stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from ..capture.order import sort, with_reshapes
from ..errors import Unsupported
from ..schedule.plan import KernelPlan, made_once
from .ahead import Calls, Together
from .launch import DirectKernel, current_stream
from .progress import progress

Kernel = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
# Stands where a tensor was that nothing reads any more.
_GONE = torch.empty(0)


@dataclass(frozen=True)
class _Kept:
    """What kernels that read nothing have stored, by their number, for work on a stream."""

    stream: int
    tables: dict[int, list[torch.Tensor]]


# What CUDA graphs read, which may outlive who made it.
_recorded: dict[int, _Kept] = {}


class RegionRunner:
    """Runs the kernels of a region in order; intermediates live until the last kernel that reads them has begun.

    Small tables that are made of positions alone (which tiles a mask leaves) are made by the first call, and kept.

    Attributes:
      operands: names of the tensors it takes, in order.
      outputs: names of the tensors it returns, in order.
    """

    def __init__(
        self,
        outputs: Sequence[str],
        plans: Sequence[KernelPlan],
        kernels: Sequence[Kernel],
        names: Sequence[Sequence[str]],
        together: Together | None = None,
    ):
        self.outputs = tuple(outputs)
        self.together = together or Together()
        made = {s.name for p in plans for s in p.stores}
        self.operands = tuple(dict.fromkeys(n for group in names for n in group if n not in made))
        # Tensors by position: the operands, then what each kernel stores.
        place = {n: k for k, n in enumerate((*self.operands, *(s.name for p in plans for s in p.stores)))}
        self._results = [place[n] for n in self.outputs]
        reads = [[place[n] for n in group] for group in names]
        self._steps = list(zip(kernels, reads, self._read_last(reads, plans), strict=True))
        once = made_once(plans, self.outputs)
        self._constant = frozenset(n for n, plan in enumerate(plans) if plan.name in once)
        self._read_on = {k for n, places in enumerate(reads) if n not in self._constant for k in places}
        self._kept: _Kept | None = None
        self._is_new = any(isinstance(kernel, DirectKernel) for kernel in kernels)

    def _read_last(self, reads: Sequence[Sequence[int]], plans: Sequence[KernelPlan]) -> list[list[int]]:
        """What each kernel hands on to none behind it: large matrices of one step give their memory to the next."""
        kept = {*range(len(self.operands)), *self._results}
        dead: list[list[int]] = []
        last = {k: n for n, places in enumerate(reads) for k in places}
        made = len(self.operands)
        for n, plan in enumerate(plans):
            own = range(made, made := made + len(plan.stores))
            unread = [k for k in own if k not in last and k not in kept]
            dead.append([*(k for k in dict.fromkeys(reads[n]) if last[k] == n and k not in kept), *unread])
        return dead

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._is_new:
            self._is_new = False
            return self._first(tensors)
        if self._constant:
            return self._with_kept(tensors)
        known = [*tensors]
        for kernel, places, dead in self._steps:
            known += kernel([known[k] for k in places])
            for k in dead:
                known[k] = _GONE
        return tuple([known[k] for k in self._results])

    def _with_kept(
        self, tensors: Sequence[torch.Tensor], count: Callable[[], None] = lambda: None
    ) -> tuple[torch.Tensor, ...]:
        """A call that takes what was kept; that keeps what it makes, if nothing was. Another stream makes its own, for
        it would not wait. A CUDA graph takes what was kept of whatever stream, which has been waited for by then.

        Args:
          count: called as each kernel has begun.
        """
        on = current_stream()
        kept = {}
        if self._kept is not None and on in (None, self._kept.stream):
            kept = self._kept.tables
            if on is None:
                _recorded[id(self._kept)] = self._kept
        known, made = [*tensors], dict[int, list[torch.Tensor]]()
        for n, (kernel, places, dead) in enumerate(self._steps):
            results = kept.get(n)
            if results is None:
                results = kernel([known[k] for k in places])
                if n in self._constant:
                    read = any(k in self._read_on for k in range(len(known), len(known) + len(results)))
                    made[n] = results if read else [_GONE] * len(results)
            known += results
            for k in dead:
                known[k] = _GONE
            count()
        if on is not None and self._kept is None:
            self._kept = _Kept(on, made)
        return tuple([known[k] for k in self._results])

    def _first(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The first call, which compiles the kernels and times their choices."""
        with progress(len(self._steps)) as count:
            calls, _ = self._calls(tensors)
            self.together.compile(calls)
            return self._with_kept(tensors, count)

    def expect(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tell what the first call will be given, on PyTorch's "meta" device; returns what it will make of it, so too.

        Raises: Unsupported for kernels that are not compiled ahead.
        """
        calls, results = self._calls(tensors)
        if len(calls) < len(self._steps):
            raise Unsupported("the region", "its kernels are JAX's to compile")
        self.together.expect(calls)
        return results

    def _calls(self, tensors: Sequence[torch.Tensor]) -> tuple[Calls, list[torch.Tensor]]:
        """The kernels of the direct road with what each is given, and the results; none for another road."""
        known, calls = [*tensors], []
        for kernel, places, _ in self._steps:
            if not isinstance(kernel, DirectKernel):
                return [], []
            calls.append((kernel, [known[k] for k in places]))
            known += kernel.like_results()
        return calls, [known[k] for k in self._results]


def expect(gm: GraphModule) -> None:
    """Tell the runners in a graph what they will be given, as far as the graph knows."""
    known: dict[Node, torch.Tensor] = {}
    made: dict[Node, list[torch.Tensor]] = {}
    with unset_fake_temporarily():  # AOTAutograd may be at work
        for n in gm.graph.nodes:
            val = n.meta.get("val")
            if isinstance(n.target, RegionRunner):
                with contextlib.suppress(KeyError, Unsupported):
                    made[n] = n.target.expect([known[a] for a in n.args])
            elif n.target is item:
                results, place = n.args
                if results in made:
                    known[n] = made[results][place]
            elif isinstance(val, torch.Tensor) and all(isinstance(k, int) for k in (*val.shape, *val.stride())):
                known[n] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")


def one_by_one(
    outputs: Sequence[str],
    plans: Sequence[KernelPlan],
    kernels: Sequence[Kernel],
    names: Sequence[Sequence[str]],
    together: Together,
) -> list[RegionRunner]:
    """A runner for each kernel of a region: where regions read each other's results, kernels seldom do."""
    wanted = {*outputs, *(n for group in names for n in group)}
    return [
        RegionRunner([s.name for s in plan.stores if s.name in wanted], [plan], [kernel], [group], together)
        for plan, kernel, group in zip(plans, kernels, names, strict=True)
    ]


def splice(gm: GraphModule, runners: Sequence[RegionRunner]) -> GraphModule:
    """`gm` with the outputs of each region computed by its runner; nodes nobody needs any more are gone.

    Call its `forward`: what a Module does around it takes longer than to launch a kernel.

    Raises: Unsupported if regions read each other's results.
    """
    graph = gm.graph
    nodes = {n.name: n for n in graph.nodes}
    last = next(n for n in graph.nodes if n.op == "output")
    for k, runner in enumerate(runners):
        runner.__name__ = f"region_{k}"  # type: ignore[attr-defined]  (FX names the callee by it)
        with graph.inserting_before(last):
            call = graph.call_function(runner, tuple(nodes[n] for n in runner.operands))
            for n, name in enumerate(runner.outputs):
                result = graph.call_function(item, (call, n))
                if name in nodes:  # and not what one kernel of a region hands on to another
                    nodes[name].replace_all_uses_with(result)
                nodes[name] = result
    with_reshapes(graph)
    sort(graph)
    graph.eliminate_dead_code()
    gm.recompile()
    return gm


def item(values: Sequence[torch.Tensor], n: int) -> torch.Tensor:
    """A result of a call."""
    return values[n]
