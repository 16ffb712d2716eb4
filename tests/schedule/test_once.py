"""Kernels that are the same but for their names run once, and all that loads what they store finds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fl_pallas as fl
from fl_pallas.schedule.expr import Axis, index, load
from fl_pallas.schedule.passes import lay_out as laying
from fl_pallas.schedule.passes.once import once
from fl_pallas.schedule.plan import Choices, KernelPlan, Loop, Store, operand_names
from tests.schedule.test_lay_out import heads_last, of_pairs
from tests.unrun import unrun

X, Y = Axis("x0", 8), Axis("x1", 4)


def turning(name: str, source: str = "a", *stores: str) -> KernelPlan:
    """A kernel that stores a [8, 4] as [4, 8]."""
    made = tuple(Store(s, (Y, X), "f32", load(source, (index(X), index(Y)), "f32")) for s in stores or (f"{name}_t",))
    return KernelPlan(name, (Y, X), (), (), made, "f32", Choices(((Y, 4), (X, 8))))


def adding(name: str, *sources: str) -> KernelPlan:
    expr = load(sources[0], (index(Y), index(X)), "f32")
    stores = tuple(Store(f"{name}_{s}", (Y, X), "f32", load(s, (index(Y), index(X)), "f32")) for s in sources)
    bound = load(sources[-1], (index(Y), index(X)), "i64")
    return KernelPlan(
        name, (Y, X), (), (Loop(X, (), lower=bound),), (replace(stores[0], expr=expr), *stores[1:]), "f32"
    )


def test_repeats() -> None:
    made = once([turning("k0"), turning("k1"), turning("k2", "b"), adding("k3", "k0_t", "k1_t", "k2_t", "k1_t")], [])
    assert [p.name for p in made] == ["k0", "k2", "k3"]
    # Loads of what is left out, bounds and all; and what is then stored twice.
    assert operand_names(made[-1]) == ("k0_t", "k2_t") and len(made[-1].stores) == 2


def test_repeats_of_repeats() -> None:
    """Kernels that differ in what they load, until that is the same."""
    made = once([turning("k0"), turning("k1", "k0_t"), turning("k2"), turning("k3", "k2_t"), adding("k4", "k3_t")], [])
    assert [p.name for p in made] == ["k0", "k1", "k4"] and operand_names(made[-1]) == ("k1_t",)


def test_stores() -> None:
    (first, last) = once([turning("k0", "a", "s", "t", "out"), adding("k1", "t")], ["out"])
    assert [s.name for s in first.stores] == ["s", "out"] and operand_names(last) == ("s",)


def test_results_stay() -> None:
    plans = [turning("k0"), turning("k1"), turning("k2")]
    assert [p.name for p in once(plans, ["k1_t"])] == ["k0", "k1"]


def test_a_copy_for_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the backward pass's kernels with rows i all read one copy of the bias, and those with rows j another."""
    monkeypatch.setattr(laying, "LAUNCH", 0)
    with unrun():
        wanted = [t.requires_grad_() for t in of_pairs(64)]
        kernels = fl.explain(heads_last, *wanted).graphs[1].kernels
    copies = [p for p in kernels if operand_names(p) == ("primals_4",)]
    assert len({s.axes for p in copies for s in p.stores}) == len(copies) <= 2, copies
