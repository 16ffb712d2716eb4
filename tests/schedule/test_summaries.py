"""One kernel summarises what several kernels ask of a mask."""

from __future__ import annotations

from fl_pallas.schedule.expr import Axis, Expr, const, index, load, loads, ref
from fl_pallas.schedule.passes.summaries import join_summaries
from fl_pallas.schedule.plan import Accumulator, Choices, KernelPlan, Loop, Store
from fl_pallas.schedule.verify import verify_plan

GRANULES, INSIDE, ROWS = Axis("t", 32), Axis("g", 64), Axis("x", 32)


def of(tensor: str, kind: str, name: str) -> Accumulator:
    """A summary of a tensor of truths, as a plan names it: numbers of those that it does not want are left out."""
    return Accumulator(name, kind, (GRANULES,), load(tensor, (index(GRANULES), index(INSIDE)), "bool"), "bool", None)


def summary(name: str, *steps: Accumulator) -> KernelPlan:
    stores = tuple(Store(f"{name}_{s.name}", (GRANULES,), "bool", ref(s.name, (GRANULES,), "bool")) for s in steps)
    tiles = Choices(((GRANULES, 16), (INSIDE, 64)))
    return KernelPlan(f"{name}_tiles", (GRANULES,), (), (Loop(INSIDE, steps),), stores, "f32", tiles, minor=True)


def reader(name: str, *sources: str) -> KernelPlan:
    """A kernel whose loop ends where the first of some tensors says, and that stores the sum of all."""
    loop = Axis("j", 64)
    steps = tuple(
        Accumulator(f"a{n}", "any", (ROWS,), load(source, (index(ROWS),), "bool"), "bool", None)
        for n, source in enumerate(sources)
    )
    stores = tuple(Store(f"{name}_{s.name}", (ROWS,), "bool", ref(s.name, (ROWS,), "bool")) for s in steps)
    bound: Expr = load(sources[0], (const(0, "i64"),), "bool")
    return KernelPlan(
        name, (ROWS,), (), (Loop(loop, steps, bound),), stores, "f32", Choices(((ROWS, 16), (loop, 64))),
        notes=(f"by what {name}_tiles finds",),
    )  # fmt: skip


def test_numbers_that_are_left_out_are_no_others() -> None:
    """The first wants the second of its summaries alone, s1, and so does the other: not of the same."""
    plans = [
        summary("k0", of("mask", "any", "s1")),
        reader("k0", "k0_s1"),
        summary("k2", of("mask", "all", "s0"), of("mask", "any", "s1")),
        reader("k2", "k2_s0", "k2_s1"),
    ]
    table, first, second = join_summaries(plans)
    verify_plan(table)
    assert {s.name: s.expr.name for s in table.stores} == {"k0_s1": "s1", "k2_s0": "s0"}
    assert [s.kind for s in table.loops[0].steps] == ["any", "all"]
    assert first == plans[1]
    (loop,) = second.loops
    assert [n.source for s in loop.steps for n in loads(s.update)] == ["k2_s0", "k0_s1"]
    assert loop.lower is not None and loads(loop.lower)[0].source == "k2_s0"
    assert second.notes == ("by what k0_tiles finds",)


def test_others_names_are_kept_apart() -> None:
    """Both have an s0, of different masks."""
    table, *readers = join_summaries(
        [
            summary("k0", of("mask", "any", "s0")),
            reader("k0", "k0_s0"),
            summary("k2", of("other", "any", "s0"), of("mask", "any", "s1")),
            reader("k2", "k2_s1", "k2_s0"),
        ]
    )
    verify_plan(table)
    assert [s.name for s in table.loops[0].steps] == ["s0", "s1"]
    assert [n.source for s in readers[1].loops[0].steps for n in loads(s.update)] == ["k0_s0", "k2_s0"]
    assert loads(readers[1].loops[0].lower)[0].source == "k0_s0"


def test_what_is_made_in_between_is_summarised_behind_it() -> None:
    plans = [
        summary("k0", of("mask", "any", "s0")),
        reader("k0", "k0_s0"),
        summary("k2", of("k0_a0", "any", "s0")),
        reader("k2", "k2_s0"),
    ]
    assert join_summaries(plans) == plans
