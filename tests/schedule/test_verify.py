"""The verifier: what the compiler makes passes, what is broken is named with its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fl_pallas.errors import ScheduleError
from fl_pallas.schedule.build import op, reduce
from fl_pallas.schedule.expr import Axis, Expr, const, index, load, raw_op, ref
from fl_pallas.schedule.pipeline import schedule
from fl_pallas.schedule.plan import Accumulator, Anchor, Choices, KernelPlan, Loop, Store
from fl_pallas.schedule.program import Program, Value
from fl_pallas.schedule.verify import verify_operands, verify_plan, verify_program
from tests.plan_evaluate import captured
from tests.programs import BY_NAME

CASES = (
    "vanilla causal_tril sdpa_gqa packed_qkv transposed_softmax sliding_window padding_lengths neighbourhood_2d rope "
    "retention_normalised max_plus two_softmax_mixture with_entropy value_variance_centred two_layers any_and_count "
    "differential triangle_starting ipa forgetting_gates"
).split()


@pytest.mark.parametrize("name", CASES)
def test_corpus_is_well_formed(name: str) -> None:
    case = BY_NAME[name]
    assert captured(case.fn, case.make_inputs(33, torch.float32, "cpu")).made.kernels


# --- programs -----------------------------------------------------------------------------------

A0, A1, K = Axis("a0", 3), Axis("a1", 4), Axis("r4", 4)
AT0, AT1 = index(A0), index(A1)


def x_at(*idx: Expr) -> Expr:
    return load("x", idx, "f32")


X = Value("x", (A0, A1), "f32")


def program(*values: Value, outputs: tuple[str, ...] = ()) -> Program:
    return Program((X, *values), outputs)


def value(expr: Expr, name: str = "y", axes: tuple[Axis, ...] = (A0, A1), reads: tuple[str, ...] = ("x",)) -> Value:
    return Value(name, axes, "f32", expr, "aten.test", reads)


GOOD = value(op("exp", x_at(AT0, AT1), dtype="f32"))
BROKEN_PROGRAMS: dict[str, tuple[Program, str]] = {
    "name twice": (program(GOOD, GOOD), "value y: another value has this name"),
    "read before definition": (
        program(value(load("z", (AT0, AT1), "f32"), reads=("z",)), value(x_at(AT0, AT1), name="z")),
        "it reads z, which is not defined before it",
    ),
    "reads are not loads": (program(value(x_at(AT0, AT1), reads=())), r"its reads \(\) are not what it loads"),
    "rank": (program(value(x_at(AT0))), r"x\[a0\] has 1 indices, x has 2 axes"),
    "unbound axis": (program(value(x_at(AT0, index(K)))), r"r4 is not bound in x\[a0, r4\]"),
    "axis of another extent": (program(value(x_at(AT0, index(Axis("a1", 5))))), "a1 is not bound"),
    "float index": (
        program(value(x_at(AT0, op("exp", x_at(AT0, AT1), dtype="f32")))),
        r"index exp\(x\[a0, a1\]\) of x is a f32, not an integer",
    ),
    "load of another type": (program(value(load("x", (AT0, AT1), "i64"))), "is a i64, but f32 is stored"),
    "axes repeat": (program(value(const(1.0, "f32"), axes=(A0, A0), reads=())), "repeat a name"),
    "reference": (program(value(ref("m0", (A0,), "f32"), reads=())), "m0 has no value here"),
    "condition": (
        program(value(raw_op("select", (AT0, x_at(AT0, AT1), x_at(AT0, AT1)), "f32"))),
        "the condition of .* is a i64",
    ),
    "type": (program(replace(GOOD, dtype="f33")), "unknown type f33"),
    "output": (program(GOOD, outputs=("nothing",)), "it returns nothing, which no value defines"),
}


@pytest.mark.parametrize("name", BROKEN_PROGRAMS)
def test_broken_program(name: str) -> None:
    broken, message = BROKEN_PROGRAMS[name]
    with pytest.raises(ScheduleError, match=message):
        verify_program(broken)


def test_good_program() -> None:
    verify_program(program(GOOD, outputs=("y",)))


def test_message_shows_the_neighbourhood() -> None:
    values = [value(x_at(AT0, AT1), name=f"y{n}") for n in range(9)]
    values[5] = value(x_at(AT0), name="y5")
    with pytest.raises(ScheduleError) as caught:
        verify_program(program(*values))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("value y5: ")
    assert [line for line in lines if line.startswith(">")] == ["> y5[a0:3, a1:4]: f32 = x[a0]  # aten.test"]
    assert len(lines) == 7


# --- plans --------------------------------------------------------------------------------------


def softmax_plan() -> KernelPlan:
    """out = softmax(q k^T) v on [2,8,4] and [2,9,4]."""
    b, i, j, d, r4, r9 = Axis("a0", 2), Axis("a1", 8), Axis("a2", 9), Axis("a2", 4), Axis("%r", 4), Axis("%r", 9)
    queries, keys = (b, i, d), (b, Axis("a1", 9), d)

    def at(name: str, *axes: Axis) -> Expr:
        return load(name, tuple(map(index, axes)), "f32")

    def f32(name: str, *args: Expr) -> Expr:
        return op(name, *args, dtype="f32")

    scores = reduce("sum", r4, f32("mul", at("q", b, i, r4), at("k", b, j, r4)), "f32")
    peak = reduce("max", r9, at("s", b, i, r9), "f32")
    total = reduce("sum", r9, f32("exp", f32("sub", at("s", b, i, r9), peak)), "f32")
    weights = f32("div", f32("exp", f32("sub", at("s", b, i, j), peak)), total)
    out = reduce("sum", r9, f32("mul", at("p", b, i, r9), at("v", b, r9, d)), "f32")
    values = (
        Value("q", queries, "f32"),
        Value("k", keys, "f32"),
        Value("v", keys, "f32"),
        Value("s", (b, i, j), "f32", scores, "aten.bmm", ("q", "k")),
        Value("p", (b, i, j), "f32", weights, "aten.softmax", ("s",)),
        Value("out", queries, "f32", out, "aten.bmm", ("p", "v")),
    )
    made = Program(values, ("out",))
    verify_program(made)
    ((plan,),) = schedule(made).kernels
    return plan


PLAN = softmax_plan()
LOOP = PLAN.loops[0]
PEAK, TOTAL = (next(s for s in LOOP.steps if isinstance(s, Accumulator) and s.kind == kind) for kind in ("max", "sum"))
J0 = LOOP.axis
ROW = next(a for a in PLAN.grid if (PLAN.choices.tile(a) or 1) > 1 and a not in PLAN.features)
BATCH = next(a for a in PLAN.grid if PLAN.choices.tile(a) == 1)


def with_loop(**changes: object) -> KernelPlan:
    return replace(PLAN, loops=(replace(LOOP, **changes),))


def with_step(step: Accumulator, **changes: object) -> KernelPlan:
    return with_loop(steps=tuple(replace(s, **changes) if s is step else s for s in LOOP.steps))


def with_store(**changes: object) -> KernelPlan:
    return replace(PLAN, stores=(replace(PLAN.stores[0], **changes),))


def _dims(shift: int) -> tuple[tuple[Expr, int], ...]:
    return tuple((op("add", index(a), const(shift, "i64"), dtype="i64"), a.extent) for a in PLAN.stores[0].axes)


NOWHERE = ref("m7", (), "f32")
BROKEN_PLANS: dict[str, tuple[Callable[[], KernelPlan], str]] = {
    "no tile of a grid axis": (
        lambda: PLAN.with_choices(Choices(tuple((a, n) for a, n in PLAN.choices.tiles if a != ROW))),
        f"no tile was chosen for {ROW}",
    ),
    "no tile of a loop axis": (
        lambda: PLAN.with_choices(Choices(tuple((a, n) for a, n in PLAN.choices.tiles if a != J0))),
        f"loop over {J0}: no tile was chosen for {J0}",
    ),
    "odd tile": (
        lambda: PLAN.with_choices(Choices((*(t for t in PLAN.choices.tiles if t[0] != J0), (J0, 24)))),
        "is 24, no power of two",
    ),
    "loop axis in the grid": (lambda: replace(PLAN, grid=(*PLAN.grid, J0)), "repeat a name"),
    "feature not in the grid": (lambda: replace(PLAN, features=(Axis("x9", 2),)), "a feature axis is no grid axis"),
    "step twice": (lambda: with_loop(steps=(*LOOP.steps, PEAK)), f"step {PEAK.name}: another step has this name"),
    "steps out of order": (lambda: with_loop(steps=LOOP.steps[::-1]), "m0 has no value here"),
    "unknown reference": (lambda: with_step(TOTAL, update=op("exp", NOWHERE, dtype="f32")), "m7 has no value here"),
    "old value in an update": (
        lambda: with_step(TOTAL, update=ref(f"{PEAK.name}.old", PEAK.axes, "f32")),
        r"m0\.old has no value here",
    ),
    "reference over other axes": (
        lambda: with_step(TOTAL, update=ref(PEAK.name, (), "f32")),
        r"m0 is used over \[\], held over",
    ),
    "update over more axes": (lambda: with_step(TOTAL, axes=()), "is not bound in|are not all"),
    "step over a loop axis": (lambda: with_step(PEAK, axes=(*PEAK.axes, J0)), "are not all in the grid"),
    "correction over the loop axis": (
        lambda: with_step(TOTAL, correct=op("mul", TOTAL.correct, op("cast", index(J0), dtype="f32"), dtype="f32")),
        f"{J0} is not bound",
    ),
    "unknown reduction": (lambda: with_step(PEAK, kind="median"), "unknown reduction median"),
    "anchor over the loop axis": (
        lambda: with_loop(steps=(*LOOP.steps, Anchor("c0", (), raw_op("cast", (index(J0),), "f32")))),
        f"step c0: {J0} is not bound",
    ),
    "anchor before its value": (
        lambda: with_loop(steps=(Anchor("c0", PEAK.axes, ref(PEAK.name, PEAK.axes, "f32")), *LOOP.steps)),
        "step c0: m0 has no value here",
    ),
    "store over a loop axis": (
        lambda: with_store(axes=(*PLAN.stores[0].axes, J0)),
        f"{PEAK.name} has no value here",
    ),
    "store reads an old value": (
        lambda: with_store(expr=ref(f"{PEAK.name}.old", PEAK.axes, "f32")),
        r"m0\.old has no value here",
    ),
    "store of the loop axis": (lambda: with_store(expr=raw_op("cast", (index(J0),), "f32")), f"{J0} is not bound"),
    "stored twice": (lambda: replace(PLAN, stores=PLAN.stores * 2), "stored twice"),
    "bound of a tiled index": (lambda: with_loop(upper=index(ROW)), f"{ROW} is not bound"),
    "bound of an unknown end": (lambda: with_loop(upper=ref("x9.last", (), "i64")), r"x9\.last has no value here"),
    "float bound": (lambda: with_loop(upper=const(1.0, "f32")), "is a f32, not an integer"),
    "ranks differ": (lambda: with_store(expr=load("v", (const(0, "i64"),), "f32")), "has 1 indices, v has 3 axes"),
    "parts of a tiled axis": (lambda: with_loop(parts=ROW), f"its parts {ROW} are no grid axis taken one index"),
    "parts of no grid axis": (lambda: with_loop(parts=Axis("p0", 4)), "its parts p0 are no grid axis"),
    "stored outside": (lambda: with_store(dims=_dims(1)), "is outside of 0 .. "),
    "stored with gaps": (lambda: with_store(dims=(*_dims(0), (const(0, "i64"), 2))), "differ in size"),
    "no steps": (lambda: with_loop(steps=()), "it has no steps"),
    "computes in bf16": (lambda: replace(PLAN, compute="bf16"), "it computes in bf16"),
}


def test_good_plan() -> None:
    verify_plan(PLAN)
    verify_plan(with_loop(lower=index(BATCH), upper=ref(f"{ROW.name}.last", (), "i64")))


@pytest.mark.parametrize("name", BROKEN_PLANS)
def test_broken_plan(name: str) -> None:
    make, message = BROKEN_PLANS[name]
    with pytest.raises(ScheduleError, match=message):
        verify_plan(make())


def test_plan_message_shows_the_line() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify_plan(with_step(TOTAL, update=NOWHERE))
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"kernel {PLAN.name}, step {TOTAL.name}: ")
    (marked,) = (line for line in lines if line.startswith(">"))
    assert marked.strip("> ").startswith(f"{TOTAL.name}[") and "m7" in marked


def test_store_line_is_marked() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify_plan(with_store(expr=NOWHERE))
    (marked,) = (line for line in str(caught.value).splitlines() if line.startswith(">"))
    assert marked.startswith(">   store out[")


def test_a_load_has_an_index_for_each_dimension() -> None:
    """Of an operand, and of what an earlier kernel stores."""

    def storing(name: str, expr: Expr) -> KernelPlan:
        return KernelPlan(name, (A0,), (), (), (Store(name, (A0,), "f32", expr),), "f32", Choices(((A0, 4),)))

    first, second = storing("y", x_at(AT0, const(1, "i64"))), storing("z", load("y", (AT0,), "f32"))
    verify_operands(program(), (), [first, second])
    with pytest.raises(ScheduleError, match="kernel y: .* has 1 indices, x has 2 axes"):
        verify_operands(program(), (), [storing("y", x_at(AT0))])
    with pytest.raises(ScheduleError, match="kernel z: .* has 2 indices, y has 1 axes"):
        verify_operands(program(), (), [first, storing("z", load("y", (AT0, AT0), "f32"))])


def test_types_of_a_plan() -> None:
    assert isinstance(LOOP, Loop) and isinstance(PLAN.stores[0], Store)
