"""Well-formedness of the IRs: what every pass may assume and none may break."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from ..errors import ScheduleError
from .dtype import DTYPES, is_float, is_int
from .expr import Axis, Expr, Index, Load, Op, Reduce, Ref, children, free_axes, loads, walk
from .integer import bounds
from .plan import (
    PLACE,
    Accumulator,
    Anchor,
    KernelPlan,
    Loop,
    Step,
    Store,
    bounds_of,
    expressions,
    operand_names,
    reduced_over,
)
from .program import Program, Value, reads_of
from .text import axes_text, expr_text, plan_text, program_text

KINDS = ("sum", "max", "min", "prod", "any", "all")
# Lines of context around the offending one.
_AROUND = 3
# How deep an expression is written out.
_BRIEF = 6

Axes = tuple[Axis, ...]


def verify_program(p: Program) -> None:
    """Check a Program.

    Raises: ScheduleError, with the value at fault and its neighbours.
    """
    known: dict[str, Value] = {}
    for n, v in enumerate(p.values):
        check = _Checker(f"value {v.name}", lambda n=n: _excerpt(program_text(p), n))
        check.that(v.name not in known, "another value has this name")
        check.that(v.dtype in DTYPES, f"unknown type {v.dtype}")
        check.axes(v.axes, "its axes")
        for name in v.reads:
            check.that(name in known, f"it reads {name}, which is not defined before it")
        if v.expr is not None:
            check.that(set(v.reads) == set(reads_of(v.expr)), f"its reads {v.reads} are not what it loads")
            check.bound(v.expr, v.axes)
            check.nodes(v.expr)
            for node in loads(v.expr):
                source = known[node.source]
                check.load(node, len(source.axes))
                check.that(
                    node.dtype == source.dtype, f"{_brief(node)} is a {node.dtype}, but {source.dtype} is stored"
                )
            check.refs(v.expr, {})
        known[v.name] = v
    for name in p.outputs:
        last = _Checker("the program", lambda: _excerpt(program_text(p), len(p.values)))
        last.that(name in known, f"it returns {name}, which no value defines")


def verify_plan(plan: KernelPlan) -> None:
    """Check a KernelPlan.

    Raises: ScheduleError, with the line at fault and its neighbours.
    """
    _PlanVerifier(plan).run()


def verify_stores(plans: Iterable[KernelPlan]) -> None:
    """Check that no two kernels store the same.

    Raises: ScheduleError, with the second kernel.
    """
    known: set[str] = set()
    for plan in plans:
        check = _Checker(f"kernel {plan.name}", lambda plan=plan: plan_text(plan))
        names = [s.name for s in plan.stores]
        check.that(known.isdisjoint(names) and len(set(names)) == len(names), f"another store has a name of {names}")
        known.update(names)


def verify_operands(program: Program, members: Iterable[str], plans: Iterable[KernelPlan]) -> None:
    """Check that the kernels of a region load what its members read, what they store themselves, and tensors that are
    there in any case: PyTorch would compute anything else, with all that leads to it; and that they look where there is
    something.

    Raises: ScheduleError, with the kernel.
    """
    there = {v.name: v.shape for v in program.values if v.expr is None} | {v.name: v.shape for v in program.facts}
    there |= {r: program.by_name[r].shape for m in members for r in program.by_name[m].reads}
    for plan in plans:
        check = _Checker(f"kernel {plan.name}", lambda plan=plan: plan_text(plan))
        there |= {s.name: s.shape for s in plan.stores}
        unknown = set(operand_names(plan)) - there.keys()
        check.that(not unknown, f"it loads {sorted(unknown)}, which its region does not read")
        for node in {n for e in expressions(plan) for n in loads(e)}:
            check.load(node, len(there[node.source]))
            spans = zip(map(bounds, node.index), there[node.source], strict=True)
            beyond = any(span is not None and (span[1] < 0 or span[0] >= extent) for span, extent in spans)
            check.that(not beyond, f"{_brief(node)} lies beyond {node.source}, whose shape is {there[node.source]}")


class _Checker:
    """Raises ScheduleError about one line of a printed IR."""

    def __init__(self, what: str, excerpt: Callable[[], str]):
        self.what, self.excerpt = what, excerpt

    def that(self, holds: bool, complaint: str) -> None:
        if not holds:
            raise ScheduleError(f"{self.what}: {complaint}\n{self.excerpt()}")

    def axes(self, axes: Axes, what: str) -> None:
        self.that(len({a.name for a in axes}) == len(axes), f"{what} {axes_text(axes)} repeat a name")
        self.that(all(a.extent >= 0 for a in axes), f"{what} {axes_text(axes)} have a negative extent")

    def bound(self, e: Expr, axes: Iterable[Axis]) -> None:
        loose = sorted(a.name for a in free_axes(e) - set(axes))
        self.that(not loose, f"{', '.join(loose)} is not bound in {_brief(e)}")

    def nodes(self, e: Expr) -> None:
        """Each node by itself: types, kinds, index expressions."""
        for n in walk(e):
            self.that(n.dtype in DTYPES, f"{_brief(n)} has the unknown type {n.dtype}")
            if isinstance(n, Load):
                for i in n.index:
                    self.that(is_int(i.dtype), f"index {_brief(i)} of {n.source} is a {i.dtype}, not an integer")
            elif isinstance(n, Reduce):
                self.that(n.kind in KINDS, f"unknown reduction {n.kind}")
                self.that(n.axis.extent > 0, f"a {n.kind} over the empty axis {n.axis}")
            elif isinstance(n, Op) and n.name == "select":
                self.that(len(n.args) == 3, f"{_brief(n)} takes {len(n.args)} arguments")
                self.that(n.args[0].dtype == "bool", f"the condition of {_brief(n)} is a {n.args[0].dtype}")
                self.that(_alike(n.args[1], n.args[2]), f"the branches of {_brief(n)} differ in type")
            elif isinstance(n, Index):
                self.that(n.axis.extent > 0, f"an index along the empty axis {n.axis}")

    def load(self, node: Load, rank: int) -> None:
        self.that(
            len(node.index) == rank, f"{_brief(node)} has {len(node.index)} indices, {node.source} has {rank} axes"
        )

    def refs(self, e: Expr, known: Mapping[str, Axes]) -> None:
        for n in walk(e):
            if isinstance(n, Ref):
                self.that(n.name in known, f"{n.name} has no value here")
                self.that(
                    n.axes == known[n.name],
                    f"{n.name} is used over {axes_text(n.axes)}, held over {axes_text(known[n.name])}",
                )


def _brief(e: Expr) -> str:
    """The text of `e`; what lies deeper than _BRIEF is left out, for messages are made before they are needed."""
    level: dict[Expr, None] = {e: None}
    for _ in range(_BRIEF):
        level = dict.fromkeys(c for n in level for c in children(n))
    return expr_text(e, dict.fromkeys(level, "…"))


def _alike(a: Expr, b: Expr) -> bool:
    return a.dtype == b.dtype or any(f(a.dtype) and f(b.dtype) for f in (is_float, is_int))


class _PlanVerifier:
    """Walks a plan in execution order; `held` are the references that have a value, and their axes."""

    def __init__(self, plan: KernelPlan):
        self.plan = plan
        self.held: dict[str, Axes] = {}
        self.ranks: dict[str, int] = {}

    def check(self, what: str, start: str) -> _Checker:
        """A checker of what is printed on the line that begins with `start`."""

        def excerpt() -> str:
            text = plan_text(self.plan)
            found = [n for n, line in enumerate(text.splitlines()) if line.startswith(start)]
            return _excerpt(text, found[-1] if found else 0)

        return _Checker(f"kernel {self.plan.name}, {what}", excerpt)

    def run(self) -> None:
        plan = self.plan
        check = self.check("grid", "  grid [")
        check.axes((*plan.grid, *(loop.axis for loop in plan.loops)), "grid and loop axes")
        check.that(plan.compute in ("f32", "f64"), f"it computes in {plan.compute}")
        check.that(set(plan.features) <= set(plan.grid), "a feature axis is no grid axis")
        for axis in plan.grid:
            self.tile(axis, check)
        for loop in plan.loops:
            self.loop(loop)
        names: set[str] = set()
        for store in plan.stores:
            check = self.check(f"store {store.name}", f"  store {store.name}[")
            check.that(store.name not in names, "stored twice")
            names.add(store.name)
            self.store(store, check)

    def tile(self, axis: Axis, check: _Checker) -> None:
        side = self.plan.choices.tile(axis)
        check.that(side is not None, f"no tile was chosen for {axis}")
        assert side is not None
        check.that(side > 0 and side & (side - 1) == 0, f"the tile of {axis} is {side}, no power of two")

    def loop(self, loop: Loop) -> None:
        check = self.check(f"loop over {loop.axis}", f"  for {loop.axis.name} in ")
        self.tile(loop.axis, check)
        check.that(loop.axis.extent > 0, "it is empty")
        check.that(bool(loop.steps), "it has no steps")
        self.bounds(loop, check)
        if loop.parts is not None:
            inside = loop.parts in self.plan.grid and self.plan.choices.tile(loop.parts) == 1
            check.that(inside, f"its parts {loop.parts} are no grid axis taken one index at a time")
        before: dict[str, Axes] = {}
        for step in loop.steps:
            check = self.check(f"step {step.name}", f"    {step.name}[")
            check.that(step.name not in self.held and not step.name.endswith(".old"), "another step has this name")
            check.axes(step.axes, "its axes")
            check.that(
                set(step.axes) <= set(self.plan.grid), f"its axes {axes_text(step.axes)} are not all in the grid"
            )
            self.step(step, loop, before, check)
            self.held[step.name] = step.axes
            before[f"{step.name}.old"] = step.axes

    def step(self, step: Step, loop: Loop, before: Mapping[str, Axes], check: _Checker) -> None:
        if isinstance(step, Anchor):
            self.expr(step.value, step.axes, self.held, check)
            return
        assert isinstance(step, Accumulator)
        check.that(step.kind in KINDS, f"unknown reduction {step.kind}")
        self.expr(step.update, (*step.axes, loop.axis), self.held, check)
        if step.correct is not None:
            known = {**self.held, **before, f"{step.name}.old": step.axes}
            self.expr(step.correct, step.axes, known, check)

    def bounds(self, loop: Loop, check: _Checker) -> None:
        every = (self.plan.choices, *self.plan.others)
        ends: dict[str, Axes] = {f"{a.name}.{end}": () for a in self.plan.grid for end in ("first", "last")}
        ends[PLACE] = ()
        single = [a for a in self.plan.grid if all((c.tile(a) or 1) == 1 for c in every)]
        for e in bounds_of(loop):
            if e is not None:
                check.that(is_int(e.dtype), f"the bound {_brief(e)} is a {e.dtype}, not an integer")
                self.expr(e, single, ends, check)

    def store(self, store: Store, check: _Checker) -> None:
        check.axes(store.axes, "its axes")
        loops = [loop for loop in self.plan.loops if loop.axis in store.axes]
        looped = {loop.axis for loop in loops}
        outside = [a for a in store.axes if a.extent > 1 and a not in self.plan.grid and a not in looped]
        check.that(not outside, f"its axes {axes_text(tuple(outside))} are not in the grid")
        check.that(store.dtype in DTYPES, f"unknown type {store.dtype}")
        self.expr(store.expr, store.axes, {} if loops else self.held, check)
        bounded = any(bound is not None for loop in loops for bound in bounds_of(loop))
        check.that(not bounded and len(loops) < 2, "its loop does not go through all of its axis")
        for axis in reduced_over(self.plan.grid, loops, [store]):
            sides = (c.tile(axis) or 1 for c in (self.plan.choices, *self.plan.others))
            check.that(min(sides) >= axis.extent, f"it is reduced over {axis}, of which no tile has the whole")
        for i, n in store.dims:
            self.expr(i, store.axes, {}, check)
            span = bounds(i)
            check.that(span is not None and 0 <= span[0] and span[1] < n, f"{_brief(i)} is outside of 0 .. {n}")
        if store.dims:
            elements = math.prod(a.extent for a in store.axes)
            check.that(elements == math.prod(store.shape), "its axes and its dimensions differ in size")

    def expr(self, e: Expr, axes: Iterable[Axis], known: Mapping[str, Axes], check: _Checker) -> None:
        check.refs(e, known)
        check.bound(e, axes)
        check.nodes(e)
        for node in loads(e):
            check.load(node, self.ranks.setdefault(node.source, len(node.index)))


def _excerpt(text: str, at: int) -> str:
    """The lines around line `at`, that one marked."""
    lines = text.splitlines()
    first, last = max(0, at - _AROUND), min(len(lines), at + _AROUND + 1)
    return "\n".join(f"{'>' if n == at else ' '} {lines[n]}" for n in range(first, last))
