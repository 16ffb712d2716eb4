"""The meaning of a KernelPlan, in numpy float64: tile after tile of its loops, for all of the grid at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fl_pallas.capture import translate
from fl_pallas.capture.aten import to_aten
from fl_pallas.schedule.expr import Axis, Expr, Index, Ref, index
from fl_pallas.schedule.interior import interior_steps
from fl_pallas.schedule.pipeline import Schedule, schedule
from fl_pallas.schedule.plan import PLACE, Accumulator, KernelPlan, Loop, Step, bounds_of
from fl_pallas.schedule.program import Program

from .evaluate import _REDUCTIONS, Scope, _Evaluator, evaluate, storage

COMBINE: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "any": np.logical_or,
    "all": np.logical_and,
}  # fmt: skip
IDENTITY = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf, "any": False, "all": True}

Held = dict[str, np.ndarray]
"""Values of references; each has one dimension per parallel axis, of extent 1 where it does not vary."""


class TileEvaluator(_Evaluator):
    """Evaluates over the parallel axes and one tile of a loop axis; references come from `held`."""

    def __init__(self, known: Mapping[str, np.ndarray], held: Held, ends: Mapping[Axis, tuple[int, int]] | None = None):
        super().__init__(known)
        self.held, self.ends = held, dict(ends or {})

    def _compute(self, e: Expr, scope: Scope) -> np.ndarray:
        if isinstance(e, Ref):
            array = self.held[e.name]
            return array.reshape(array.shape + (1,) * (len(scope) - array.ndim))
        if isinstance(e, Index) and e.axis in self.ends:
            first, last = self.ends[e.axis]
            shape = [1] * len(scope)
            shape[scope.index(e.axis)] = last - first
            return np.arange(first, last).reshape(shape)
        return super()._compute(e, scope)


@dataclass
class PlanRun:
    """A plan on arrays.

    Args:
      plan: what to run.
      known: its operands.
      side: side of the tiles of every loop; None: as the plan chose.
      bounded: whether the loops honour their bounds and interiors, by the plan's own grid tiles.
    """

    plan: KernelPlan
    known: Mapping[str, np.ndarray]
    side: int | None = None
    bounded: bool = False

    @property
    def scope(self) -> Scope:
        known = {*self.plan.grid, *(loop.axis for loop in self.plan.loops)}
        extra = {a: None for s in self.plan.stores for a in s.axes if a not in known}
        return (*self.plan.grid, *extra)

    def run(self) -> dict[str, np.ndarray]:
        """The stores, by name."""
        held: Held = {}
        for loop in self.plan.loops:
            held.update(self.loop(loop, held))
        return self.stores(held)

    def stores(self, held: Held) -> dict[str, np.ndarray]:
        """The stores, given the final values of the loops."""
        out = {}
        with np.errstate(all="ignore"):
            for s in self.plan.stores:
                alone = not held or any(loop.axis in s.axes for loop in self.plan.loops)
                array = TileEvaluator(self.known, held).at(s.expr, s.axes if alone else self.scope)
                array = array if alone else self._of(array, s.axes)
                shape = tuple(a.extent for a in s.axes)
                array = np.broadcast_to(array, shape).astype(storage(s.dtype))
                out[s.name] = np.empty(s.shape, array.dtype)
                out[s.name][tuple(TileEvaluator(self.known, {}).at(i, s.axes) for i in s.index)] = array
        return out

    def _of(self, array: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
        """`array` over the whole scope, with the dimensions of `axes` in that order."""
        rest = [n for n, a in enumerate(self.scope) if a not in axes]
        assert all(array.shape[n] == 1 for n in rest), "a store varies along an axis it does not have"
        return array.transpose([self.scope.index(a) for a in axes] + rest).reshape(
            [array.shape[self.scope.index(a)] for a in axes]
        )

    def initial(self, loop: Loop) -> Held:
        return {s.name: self._initial(s) for s in loop.steps}

    def _initial(self, step: Step) -> np.ndarray:
        shape = tuple(a.extent if a in step.axes else 1 for a in self.scope)
        if not isinstance(step, Accumulator):
            return np.zeros(shape)
        kind = bool if step.kind in ("any", "all") else storage(step.update.dtype)
        value = IDENTITY[step.kind]
        if kind is np.int64 and isinstance(value, float) and np.isinf(value):
            value = np.iinfo(np.int64).max if value > 0 else np.iinfo(np.int64).min
        return np.full(shape, value, kind)

    def loop(self, loop: Loop, outer: Held, first: int = 0, last: int | None = None) -> Held:
        """The values of the loop's steps after it ran over [first, last)."""
        last = loop.axis.extent if last is None else last
        side = self.side or self.plan.choices.tile(loop.axis)
        assert side
        runs = self._runs(loop, side, outer) if self.bounded or loop.parts is not None else None
        visits = self.visits(loop, outer) if self.bounded and loop.visits else None
        inner = self.limits(loop)[2:4] if self.bounded and visits is None else ()
        now = self.initial(loop)
        for start in range(first, last, side):
            new = self._tile(loop.steps, loop.axis, {**outer}, now, start, min(last, start + side))
            if loop.interior is not None and inner and start + side <= loop.axis.extent:
                bare = self._tile(interior_steps(loop), loop.axis, {**outer}, now, start, start + side)
                low, high = (x if x is not None else missing for x, missing in zip(inner, (0, last), strict=True))
                within = (low <= start) & (start + side <= np.asarray(high))
                new = {name: np.where(within, bare[name], x) for name, x in new.items()}
            if visits is not None and loop.visits:
                visited, whole = (x[start // loop.visits.granule] for x in visits)
                bare = self._tile(interior_steps(loop), loop.axis, {**outer}, now, start, min(last, start + side))
                new = {name: np.where(visited, np.where(whole, bare[name], x), now[name]) for name, x in new.items()}
            elif runs is not None:
                begin, end = self._own(loop, *runs)
                here = (start // side >= begin) & (start // side < end)
                new = {name: np.where(here, x, now[name]) for name, x in new.items()}
            now = new
        if loop.settled and visits is not None and loop.visits:
            settled = np.logical_and.reduce([now[name] >= least for name, least in loop.settled])
            for start in range(first, last, side):
                here = ~settled & ~visits[0][start // loop.visits.granule]
                new = self._tile(loop.steps, loop.axis, {**outer}, now, start, min(last, start + side))
                now = {name: np.where(here, x, now[name]) for name, x in new.items()}
        elif loop.settled and runs is not None and self.bounded:
            begin, end = runs
            length = np.maximum(end - begin, 0)
            least, most = self._own(loop, np.array(0), -(-loop.axis.extent // side) - length)
            # Tiles, and not rows alone, go on; for what is computed that is the same.
            settled = np.logical_and.reduce([now[name] >= least for name, least in loop.settled])
            for start in range(first, last, side):
                n = start // side - np.where(start // side >= end, length, 0)
                outside = (length == 0) | (start // side < begin) | (start // side >= end)
                here = ~settled & outside & (least <= n) & (n < most)
                new = self._tile(loop.steps, loop.axis, {**outer}, now, start, min(last, start + side))
                now = {name: np.where(here, x, now[name]) for name, x in new.items()}
        return now

    def _runs(self, loop: Loop, side: int, outer: Held) -> tuple[np.ndarray, np.ndarray]:
        """First tile of the loop that programs run, all its parts, and one past the last."""
        begin, end = np.array(0), np.array(-(-loop.axis.extent // side))
        low, high = self.limits(loop)[:2] if self.bounded else (None, None)
        if low is not None:
            begin = np.clip(low, 0, loop.axis.extent) // side
        if high is not None:
            end = -(-np.clip(high, 0, loop.axis.extent) // side)
        if self.bounded:
            hold = self._hold(loop, outer)
            begin, end = np.where(hold, begin, 0), np.where(hold, end, -(-loop.axis.extent // side))
        return begin, end

    def _hold(self, loop: Loop, outer: Held) -> np.ndarray:
        """Whether what a loop's bounds rest on is so. (Tiles, and not rows alone, do without bounds; for what is
        computed that is the same.)"""
        hold = np.array(True)
        for name in loop.finite:
            hold = hold & np.isfinite(outer[name]) & (outer[name] != 0)
        for load, least in loop.above:
            found = TileEvaluator(self.known, {}, {loop.axis: (0, loop.axis.extent)}).at(load, (*self.scope, loop.axis))
            hold = hold & (np.isfinite(found) & (found >= least)).all()
        return hold

    def visits(self, loop: Loop, outer: Held) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Whether a loop visits a granule, and whether it does without masks there: by granule, over the scope."""
        assert loop.visits is not None
        at, whole, some = (loop.visits.at, loop.visits.whole, loop.visits.some)
        every = -(-loop.axis.extent // loop.visits.granule)
        found = [[np.array(False)] * every for _ in range(2)]
        counts = [TileEvaluator(self.known, self._ends()).at(e, self.scope) for e in (some, whole)]
        counts[0] = np.where(self._hold(loop, outer), counts[0], every)
        for place in range(every):
            held = {**self._ends(), PLACE: np.full([1] * len(self.scope), place)}
            here = TileEvaluator(self.known, held).at(at, self.scope)
            for granule in range(every):
                for n, count in enumerate(counts):
                    found[n][granule] = found[n][granule] | (here == granule) & (place < count)
        return found[0], found[1]

    def _own(self, loop: Loop, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of these tiles those of each program."""
        if loop.parts is None:
            return begin, end
        part = TileEvaluator({}, {}).at(index(loop.parts), self.scope)
        share = -(-np.maximum(end - begin, 0) // loop.parts.extent)
        first = np.minimum(begin + part * share, end)
        return first, np.minimum(first + share, end)

    def _tile(self, steps: tuple[Step, ...], axis: Axis, held: Held, now: Held, start: int, stop: int) -> Held:
        new: Held = {}
        scope = (*self.scope, axis)
        for step in steps:
            held[f"{step.name}.old"] = now[step.name]
            ev = TileEvaluator(self.known, held, {axis: (start, stop)})
            with np.errstate(all="ignore"):
                if isinstance(step, Accumulator):
                    part = ev.at(step.update, scope)
                    part = np.broadcast_to(part, (*part.shape[:-1], stop - start))
                    before = now[step.name] if step.correct is None else ev.at(step.correct, self.scope)
                    made = COMBINE[step.kind](before, _REDUCTIONS[step.kind](part, axis=-1))
                    made = made.astype(now[step.name].dtype)
                else:
                    value = ev.at(step.value, self.scope)
                    made = np.where(np.isfinite(value), value, now[step.name])
            held[step.name] = new[step.name] = made
        return new

    def limits(self, loop: Loop) -> tuple[np.ndarray | None, ...]:
        """The bounds of a loop and of its interior over the parallel axes, by the plan's grid tiles."""
        ev = TileEvaluator(self.known, self._ends())
        bounds = bounds_of(replace(loop, visits=None))
        return tuple(None if e is None else ev.at(e, self.scope) for e in bounds)

    def _ends(self) -> Held:
        """The ends of the grid's tiles."""
        ends: Held = {}
        for n, axis in enumerate(self.scope):
            side = self.plan.choices.tile(axis) or 1
            shape = [1] * len(self.scope)
            shape[n] = axis.extent
            first = (np.arange(axis.extent) // side * side).reshape(shape)
            ends[f"{axis.name}.first"] = first
            ends[f"{axis.name}.last"] = np.minimum(first + side, axis.extent) - 1
        return ends


@dataclass(frozen=True)
class Captured:
    """A torch program down to its schedule.

    Attributes:
      program: as captured.
      made: its schedule.
      tensors: what it is fed, by name: inputs, constants, and what only PyTorch computes.
    """

    program: Program
    made: Schedule
    tensors: dict[str, torch.Tensor]

    def values(self) -> dict[str, np.ndarray]:
        """Every value of the program by its own meaning, operands included."""
        live = {n: _array(x) for n, x in self.tensors.items() if n in self.made.program.by_name}
        return {**live, **evaluate(self.made.program, live)}

    def kernels(self, **how: Any) -> Iterator[tuple[KernelPlan, PlanRun, dict[str, np.ndarray]]]:
        """(plan, a run of it, everything known to it) for each kernel, in order."""
        known = self.values()
        for plans in self.made.kernels:
            own = dict(known)
            for plan in plans:
                run = PlanRun(plan, own, **how)
                yield plan, run, own
                own.update((name, x) for name, x in run.run().items() if name not in known)


def captured(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Captured:
    """`fn` through TorchDynamo, capture and scheduler; it must be one graph, and every IR of it well formed."""
    graphs: list[tuple[torch.fx.GraphModule, tuple]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            graphs.append((gm, args))
            return gm(*args)

        return run

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    ((gm, args),) = graphs
    with torch.no_grad():
        aten = to_aten(gm, args)
    program = translate(aten)
    recorder = _Recorder(aten)
    with torch.no_grad():
        recorder.run(*args)
    tensors = {v.name: recorder.seen[v.name] for v in program.values if v.expr is None}
    return Captured(program, schedule(program, verify=True), tensors)


class _Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps every tensor: inputs, and what only PyTorch computes."""

    def __init__(self, gm: torch.fx.GraphModule):
        super().__init__(gm)
        self.seen: dict[str, torch.Tensor] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        out = super().run_node(n)
        if isinstance(out, torch.Tensor):
            self.seen[n.name] = out
        return out


def _array(x: torch.Tensor) -> np.ndarray:
    return (x.double() if x.is_floating_point() else x).numpy(force=True)
