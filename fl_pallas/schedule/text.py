"""The only printer of the IRs, from expressions to KernelPlans: short, stable text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .expr import Axis, Const, Expr, Index, Load, Op, Reduce, Ref, Size, children, free_axes, walk
from .plan import LOWEST, Anchor, KernelPlan, Step, Store, bounds_of, stored_in, stored_last
from .program import Program, Value

if TYPE_CHECKING:
    from .passes.fuse import Fused
    from .passes.region import Growth

_INFIX = {
    "add": ("+", 4), "sub": ("-", 4), "mul": ("*", 5), "div": ("/", 5), "floordiv": ("//", 5), "mod": ("%", 5),
    "lt": ("<", 3), "le": ("<=", 3), "gt": (">", 3), "ge": (">=", 3), "eq": ("==", 3), "ne": ("!=", 3),
    "and": ("&", 2), "or": ("|", 1),
}  # fmt: skip


def expr_text(e: Expr, names: Mapping[Expr, str] | None = None) -> str:
    """`e` as one line, reductions as sum[r64](body); nodes in `names` as their names."""
    return _text(e, names or {})[0]


def _text(e: Expr, names: Mapping[Expr, str]) -> tuple[str, int]:
    """The text of `e`, and how tightly it binds."""
    if e in names:
        return names[e], 9
    if isinstance(e, Const):
        return (f"{e.value:g}" if isinstance(e.value, float) else str(e.value)), 9
    if isinstance(e, Size):
        return f"n{e.number}", 9
    if isinstance(e, Index):
        return e.axis.name, 9
    if isinstance(e, Load):
        return f"{e.source}[{', '.join(expr_text(i, names) for i in e.index)}]", 9
    if isinstance(e, Ref):
        return e.name, 9
    if isinstance(e, Reduce):
        return f"{e.kind}[{e.axis.name}]({expr_text(e.body, names)})", 9
    if e.name in _INFIX:
        sign, level = _INFIX[e.name]
        left, right = _text(e.args[0], names), _text(e.args[1], names)
        a = left[0] if left[1] >= level else f"({left[0]})"
        b = right[0] if right[1] > level else f"({right[0]})"
        return f"{a} {sign} {b}", level
    if e.name == "neg":
        inner = _text(e.args[0], names)
        return f"-{inner[0] if inner[1] > 5 else f'({inner[0]})'}", 6
    if e.name == "cast":
        return f"{e.dtype}({expr_text(e.args[0], names)})", 9
    return f"{e.name}({', '.join(expr_text(a, names) for a in e.args)})", 9


def shared(exprs: Iterable[Expr], letter: str = "t") -> dict[Expr, str]:
    """Names t0, t1, … for the larger expressions that several places use, in order of evaluation."""
    uses: Counter[Expr] = Counter()
    order: dict[Expr, None] = {}
    for e in exprs:
        uses[e] += 1
        for node in walk(e):
            if node not in order:
                order[node] = None
                uses.update(children(node))
    large = (n for n in order if isinstance(n, (Op, Reduce)) and uses[n] > 1 and free_axes(n))
    return {n: f"{letter}{i}" for i, n in enumerate(n for n in large if sum(1 for _ in walk(n)) > 3)}


def axes_text(axes: tuple[Axis, ...]) -> str:
    return "[" + ", ".join(f"{a.name}:{a.extent}" for a in axes) + "]"


def value_text(v: Value) -> str:
    """One line: name[axes]: dtype = expression   # op, user's line."""
    body = expr_text(v.expr) if v.expr is not None else v.op + (f"({', '.join(v.reads)})" if v.reads else "")
    where = f"  # {v.op}" + (f" {v.where.file.rsplit('/', 1)[-1]}:{v.where.line}" if v.where else "")
    return f"{v.name}{axes_text(v.axes)}: {v.dtype} = {body}" + (where if v.expr is not None else "")


def program_text(p: Program) -> str:
    """The Program, one value a line, then what it returns."""
    return "\n".join([*map(value_text, p.values), f"return {', '.join(p.outputs)}"])


def growth_text(growth: Growth) -> str:
    """Regions with their members and outputs, then the rejected blow-ups."""
    lines = [f"region {n}: {', '.join(r.members)} -> {', '.join(r.outputs)}" for n, r in enumerate(growth.regions)]
    lines += [f"rejected {r.value.name} ({r.nbytes} bytes): {r.blocker.op}: {r.why}" for r in growth.rejected]
    return "\n".join(lines) or "no region"


def fused_text(fused: Fused) -> str:
    """What several places share, then one line per output."""
    names = shared(o.expr for o in fused.outputs)
    lines = [f"{o.name}{axes_text(o.axes)}: {o.dtype} = {expr_text(o.expr, names)}" for o in fused.outputs]
    return "\n".join([*_shared_text(names, ""), *lines])


def plan_text(plan: KernelPlan) -> str:
    """The KernelPlan: grid, loops with their steps, stores."""
    tile = plan.choices.tile
    grid = ", ".join(f"{a.name}:{a.extent}/{tile(a)}" for a in plan.grid)
    choices = f"{plan.choices.warps} warps, {plan.choices.stages} stages"
    lines = [f"kernel {plan.name}", f"  grid [{grid}]  compute {plan.compute}  {choices}"]
    for loop in plan.loops:
        names = shared((e for e in bounds_of(loop) if e is not None), "b")
        lines += _shared_text(names, "  ")
        low, high, *more = (None if e is None else expr_text(e, names) for e in bounds_of(loop))
        inner, visits = (more[:2], more[2:]) if loop.interior else ([], more)
        span = f"{low or 0} .. {high or loop.axis.extent}"
        part = f", part {loop.parts.name} of {loop.parts.extent}" if loop.parts is not None else ""
        every = f", all unless {', '.join(loop.finite)} finite" if loop.finite else ""
        above = (f"{expr_text(e)} " + ("finite" if least == LOWEST else f"> {least:g}") for e, least in loop.above)
        every += "".join(f", all unless {text}" for text in above)
        every += "".join(f", all unless {name} gets to {least:g}" for name, least in loop.settled)
        lines.append(f"  for {loop.axis.name} in {span} by {tile(loop.axis)}{part}  (of {loop.axis.extent}{every})")
        if loop.visits and inner:
            lines.append(f"    # {loop.visits.granule} at a time: {visits[0]} for place in 0 .. {visits[2]}")
            lines.append(f"    # no masks in the first {visits[1]}")
        elif inner:
            lines.append(f"    # no masks in {inner[0] or 0} .. {inner[1] or loop.axis.extent}")
        lines += _steps_text(loop.steps, stored_in(loop, plan.stores))
        guesses = loop.guesses if plan.choices.guesses else ()
        lines += [f"    # about {g.maximum} of the first keys; again unless {g.total} stays in range" for g in guesses]
    last = stored_last(plan.loops, plan.stores)
    names = shared(s.expr for s in last)
    lines += _shared_text(names, "  ")
    lines += [f"  {_store_text(s, names)}" for s in last]
    return "\n".join([*lines, *(f"  # {n}" for n in plan.notes)])


def _store_text(s: Store, names: Mapping[Expr, str]) -> str:
    return f"store {s.name}{_place_text(s)}: {s.dtype} = {expr_text(s.expr, names)}"


def _place_text(s: Store) -> str:
    if not s.dims:
        return axes_text(s.axes)
    return "[" + ", ".join(f"{expr_text(i)}:{n}" for i, n in s.dims) + "]"


def _shared_text(names: dict[Expr, str], indent: str) -> list[str]:
    # An expression is written out where it is named, from the names before it.
    known: dict[Expr, str] = {}
    lines = []
    for e, name in names.items():
        lines.append(f"{indent}{name} = {expr_text(e, known)}")
        known[e] = name
    return lines


def _steps_text(steps: tuple[Step, ...], stores: tuple[Store, ...]) -> list[str]:
    """The steps of a loop, and its stores; what they share is named just before its first use."""
    named = [*((s, _step_exprs(s)) for s in steps), *((s, [s.expr]) for s in stores)]
    names = shared(e for _, exprs in named for e in exprs)
    known: dict[Expr, str] = {}
    lines = []
    for step, exprs in named:
        used = {n for e in exprs for n in walk(e)}
        for e, name in names.items():
            if e in used and e not in known:
                lines.append(f"    {name} = {expr_text(e, known)}")
                known[e] = name
        lines.append(f"    {_store_text(step, known) if isinstance(step, Store) else _step_text(step, known)}")
    return lines


def _step_exprs(step: Step) -> list[Expr]:
    if isinstance(step, Anchor):
        return [step.value]
    return [step.update] if step.correct is None else [step.correct, step.update]


def _step_text(step: Step, names: Mapping[Expr, str]) -> str:
    axes = ", ".join(a.name for a in step.axes)
    if isinstance(step, Anchor):
        return f"{step.name}[{axes}] follows {expr_text(step.value, names)}"
    old = expr_text(step.correct, names) if step.correct is not None else f"{step.name}.old"
    return f"{step.name}[{axes}] = {step.kind}({old}, {expr_text(step.update, names)})"
