"""Rows that go through far more than others (`long_lists.py`) are shared out to several programs.

Before: a kernel whose programs take a tile of rows each, some a hundred times as long as others. After: a kernel takes
the longest rows alone, each shared out to several programs that store their accumulators; the kernel of all rows merges
these for the rows whose they are, and goes through what the others have. Small kernels find which rows are the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..build import cast, op, select, substitute
from ..expr import Axis, Expr, Load, Ref, const, index, load, raw_op, ref, walk
from ..plan import Accumulator, Anchor, Choices, Interior, KernelPlan, Long, Loop, Step, Store, stored_in
from ..target import Target
from .lengths import span_of
from .listing import RUN, TILE, end_of, run_of
from .long_lists import long_spans, singles_of
from .merge_partials import folded, held_type
from .split_loop import with_part

# Choices beside the first that are tried for what is shared out: it is the lesser part.
OTHERS = 2


def share_out_long(plan: KernelPlan, target: Target) -> tuple[KernelPlan, ...]:
    """`plan` alone; or kernels that find which of its rows go through most, one whose programs share these, and `plan`,
    which merges what that stores and goes through what others have."""
    if len(plan.loops) != 1 or plan.minor:
        return (plan,)
    (loop,) = plan.loops
    if loop.parts is not None or loop.settled or stored_in(loop, plan.stores):
        return (plan,)
    long = loop.visits.long if loop.visits else long_spans(plan, loop, target)
    if long is None:
        return (plan,)
    part, ranks = Axis("p0", long.parts), _Ranks(f"{plan.name}_long", singles_of(plan, loop), long)
    note = f"{long.runs} times {long.side} rows go through most: {long.parts} programs of {ranks.name} share each"
    plan = replace(plan, loops=(replace(loop, visits=loop.visits and replace(loop.visits, long=None)),))
    merging = _merging(replace(plan, notes=(*plan.notes, note)), ranks, part)
    return (*ranks.finding(loop), _sharing(plan, ranks, part), merging)


@dataclass(frozen=True)
class _Ranks:
    """What is stored of runs: how many go through more, and which run it is by that order.

    Attributes:
      name: begins the names of what is stored.
      singles: the axes that it has besides.
    """

    name: str
    singles: tuple[Axis, ...]
    long: Long

    def stored(self, what: str, run: Expr) -> Expr:
        return load(f"{self.name}_{what}", (*map(index, self.singles), run), "i32")

    def is_long(self, run: Expr) -> Expr:
        return op("lt", self.stored("rank", run), const(self.long.runs, "i32"), dtype="bool")

    def finding(self, loop: Loop) -> tuple[KernelPlan, KernelPlan]:
        """The kernels that store this; and lists without those of the longest runs."""
        rows, side, visits = self.long.rows, self.long.side, loop.visits
        run, other = (Axis(name, -(-rows.extent // side)) for name in ("r0", "u"))
        before, zero, one = (*self.singles, run), const(0, "i32"), const(1, "i32")

        def count_of(kind: Expr, a: Axis) -> Expr:
            assert isinstance(kind, Load)
            return load(kind.source, (*kind.index[:-1], index(a)), "i32")

        def length(a: Axis) -> Expr:
            return count_of(visits.some, a) if visits else cast(span_of(loop, {rows: side}, {rows: a}), "i32")

        own, others = length(run), length(other)
        alike, earlier = op("eq", others, own, dtype="bool"), op("lt", index(other), index(run), dtype="bool")
        more = op("or", op("gt", others, own, dtype="bool"), op("and", alike, earlier, dtype="bool"), dtype="bool")
        count = Accumulator("n", "sum", before, select(more, one, zero), "i32", None)
        rank = ref(count.name, before, "i32")
        is_long = op("lt", rank, const(self.long.runs, "i32"), dtype="bool")
        kept = {} if visits is None else {"whole": visits.whole, "some": visits.some}
        found = {"rank": rank} | {what: select(is_long, zero, count_of(e, run)) for what, e in kept.items()}
        ranks = tuple(Store(f"{self.name}_{what}", before, "i32", e) for what, e in found.items())
        # (Each rank is one of these; that is said for those who ask.)
        place = op("max", self.stored("rank", index(run)), const(0, "i64"), dtype="i64")
        place = op("min", place, const(run.extent - 1, "i64"), dtype="i64")
        dims = (*((index(a), a.extent) for a in self.singles), (place, run.extent))
        runs = Store(f"{self.name}_run", before, "i32", cast(index(run), "i32"), dims)
        tiles = (*((a, 1) for a in self.singles), (run, RUN))

        def kernel(what: str, loops: tuple[Loop, ...], stores: tuple[Store, ...], choices: Choices) -> KernelPlan:
            return KernelPlan(f"{self.name}_{what}", before, (), loops, stores, "f32", choices, minor=True)

        ranking = kernel("ranks", (Loop(other, (count,)),), ranks, Choices((*tiles, (other, TILE))))
        return ranking, kernel("runs", (), (runs,), Choices(tiles))


def _sharing(plan: KernelPlan, ranks: _Ranks, part: Axis) -> KernelPlan:
    """The kernel that takes the longest runs alone, and stores what each program's part of one comes to."""
    (loop,), rows, side = plan.loops, ranks.long.rows, ranks.long.side
    slot, inside = Axis("l0", ranks.long.runs), Axis("l1", side)
    run = cast(ranks.stored("run", index(slot)), "i64")
    begin = op("mul", run, const(side, "i64"), dtype="i64")
    ends = (index(inside), *(end_of(inside, end) for end in ("first", "last")))
    at, first, last = (op("add", begin, e, dtype="i64") for e in ends)
    if rows.extent % side:
        # Beyond the end, the last row again, which is not read.
        at, first, last = (raw_op("min", (e, const(rows.extent - 1, "i64")), "i64") for e in (at, first, last))
    known = {run_of(rows, side): run, end_of(rows, "first"): first, end_of(rows, "last"): last}

    def moved(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(b for a in axes for b in ((slot, inside) if a == rows else (a,)))

    def of(e: Expr) -> Expr:
        own = {n: ref(n.name, moved(n.axes), n.dtype) for n in walk(e) if isinstance(n, Ref) and rows in n.axes}
        return substitute(e, {rows: at}, {**known, **own})

    def of_end(e: Expr | None) -> Expr | None:
        return None if e is None else of(e)

    def of_step(s: Step) -> Step:
        if isinstance(s, Anchor):
            return replace(s, axes=moved(s.axes), value=of(s.value))
        return replace(s, axes=moved(s.axes), update=of(s.update), correct=of_end(s.correct))

    def of_choices(c: Choices) -> Choices:
        sides = ((slot, 1), (inside, c.tile(rows) or 1))
        return with_part(
            replace(c, tiles=tuple(t for a, n in c.tiles for t in (sides if a == rows else ((a, n),)))), part
        )

    inner, visits = loop.interior, loop.visits
    if inner is not None:
        constants = tuple((of(a), of(b)) for a, b in inner.constants)
        inner = Interior(of_end(inner.lower), of_end(inner.upper), constants)
    if visits is not None:
        visits = replace(visits, **{what: of(getattr(visits, what)) for what in ("at", "whole", "some", "every")})
    shared = Loop(
        loop.axis,
        tuple(map(of_step, loop.steps)),
        of_end(loop.lower),
        of_end(loop.upper),
        inner,
        part,
        above=tuple((of(e), least) for e, least in loop.above),
        visits=visits,
    )
    kept = ((s, held_type(s, plan.compute)) for s in shared.steps)
    return replace(
        plan,
        name=ranks.name,
        grid=(part, *moved(plan.grid)),
        loops=(shared,),
        stores=tuple(Store(f"{ranks.name}_{s.name}", (part, *s.axes), t, ref(s.name, s.axes, t)) for s, t in kept),
        choices=of_choices(plan.choices),
        others=tuple(map(of_choices, plan.others[:OTHERS])),
        notes=(),
    )


def _merging(plan: KernelPlan, ranks: _Ranks, part: Axis) -> KernelPlan:
    """The kernel of all rows: it goes through what others than the longest runs have, and merges what these store."""
    (loop,), rows, side = plan.loops, ranks.long.rows, ranks.long.side
    own = {s.name: f"{s.name}l" for s in loop.steps}
    run, tile = op("floordiv", index(rows), const(side, "i64"), dtype="i64"), run_of(rows, side)
    slot = op("min", cast(ranks.stored("rank", run), "i64"), const(ranks.long.runs - 1, "i64"), dtype="i64")
    inside = op("mod", index(rows), const(side, "i64"), dtype="i64")

    def stored(held: Ref) -> Expr:
        places = (i for a in held.axes for i in ((slot, inside) if a == rows else (index(a),)))
        return load(f"{ranks.name}_{held.name}", (index(part), *places), held.dtype)

    def named(e: Expr) -> Expr:
        bases = {n: n.name.removesuffix(".old") for n in walk(e) if isinstance(n, Ref)}
        new = {n: ref(own[b] + n.name[len(b) :], n.axes, n.dtype) for n, b in bases.items() if b in own}
        return substitute(e, {}, new)

    def of_step(s: Step) -> Step:
        s = folded(s, stored, plan.compute)
        if isinstance(s, Anchor):
            return replace(s, name=own[s.name], value=named(s.value))
        correct = None if s.correct is None else named(s.correct)
        return replace(s, name=own[s.name], update=named(s.update), correct=correct)

    def of_store(s: Store) -> Store:
        refs = [n for n in walk(s.expr) if isinstance(n, Ref) and n.name in own]
        chosen = {n: select(ranks.is_long(run), ref(own[n.name], n.axes, n.dtype), n) for n in refs}
        return replace(s, expr=substitute(s.expr, {}, chosen))

    zero = const(0, "i64")
    merged = Loop(
        part, tuple(map(of_step, loop.steps)), upper=select(ranks.is_long(tile), const(part.extent, "i64"), zero)
    )
    if loop.visits is not None:
        left = {what: ranks.stored(what, tile) for what in ("whole", "some")}
        loop = replace(loop, visits=replace(loop.visits, **left))
    else:
        upper = const(loop.axis.extent, "i64") if loop.upper is None else loop.upper
        loop = replace(loop, upper=select(ranks.is_long(tile), zero, upper))
    return replace(
        plan,
        loops=(loop, merged),
        stores=tuple(map(of_store, plan.stores)),
        choices=with_part(plan.choices, part),
        others=tuple(with_part(c, part) for c in plan.others),
    )
