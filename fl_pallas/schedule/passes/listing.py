"""Lists of the granules that a loop visits, and the kernels that make them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..build import cast, op, reduce_over, select, substitute
from ..expr import Axis, Expr, const, free_axes, index, load, raw_op, ref, ref_names
from ..plan import PLACE, Accumulator, Choices, Interior, KernelPlan, Loop, Store, Visits

# Elements of a list, at most; and pairs of a row and an index that are looked at one by one.
LARGEST, LOOKED_AT = 2**24, 2**33
# Granules, and runs, that a program of the kernels that make lists takes at once.
TILE, RUN = 64, 16
# Pairs that a program looks at.
PAIRS = 2048


@dataclass(frozen=True)
class Granules:
    """A loop's axis in granules, and the rows of a program in runs.

    Attributes:
      axis: of the loop.
      granule: how many of its indices are visited together.
      every: the axis of granules.
      rows: the axes of the grid of which a program takes a tile, and how many indices a run has of each: no fewer than
        any tile. The references to the ends of a tile stand for those of its run.
      singles: the axes of which a program takes one index.
    """

    axis: Axis
    granule: int
    every: Axis
    rows: Mapping[Axis, int]
    singles: Sequence[Axis]

    def are_whole(self, certain: Expr) -> Expr:
        """Whether something is certain of a granule, and that lies inside of the axis whole."""
        end = op(
            "mul", op("add", index(self.every), const(1, "i64"), dtype="i64"), const(self.granule, "i64"), dtype="i64"
        )
        # (No comparison that could be solved for the granule: that would be another kernel for each length.)
        inside = raw_op("min", (end, const(self.axis.extent, "i64")), "i64")
        return op("and", certain, op("eq", inside, end, dtype="bool"), dtype="bool")

    def seen_by(self, e: Expr) -> tuple[list[Axis], dict[Axis, int]]:
        """The single axes that an expression depends on, and the rows, by their index or the ends of their tiles."""
        own, names = free_axes(e), ref_names(e)
        rows = {a: n for a, n in self.rows.items() if a in own or names & {f"{a.name}.first", f"{a.name}.last"}}
        return [a for a in self.singles if a in own], rows


@dataclass(frozen=True)
class Classes:
    """What is known of a granule and a run of rows.

    Attributes:
      certain, possible: whether all masks let it through whole, and whether it may contribute; by the index of the
        granule, and the ends of the rows.
      constants: what masks come to where it is certain.
    """

    certain: Expr
    possible: Expr
    constants: tuple[tuple[Expr, Expr], ...]


def end_of(axis: Axis, end: str) -> Expr:
    """The reference to the first or the last row of a tile."""
    return ref(f"{axis.name}.{end}", (), "i64")


def ends_of(rows: Mapping[Axis, int], runs: Mapping[Axis, Axis]) -> dict[Expr, Expr]:
    """What stands for the references to the ends of a tile, of all rows of a run.

    Args:
      rows: how many indices a run has of each axis.
      runs: the axes of their runs.
    """
    ends: dict[Expr, Expr] = {}
    for a, n in rows.items():
        first = op("mul", index(runs[a]), const(n, "i64"), dtype="i64")
        last = op("add", first, const(n - 1, "i64"), dtype="i64")
        ends |= {end_of(a, "first"): first, end_of(a, "last"): raw_op("min", (last, const(a.extent - 1, "i64")), "i64")}
    return ends


def run_of(axis: Axis, side: int) -> Expr:
    """The run that a tile's rows lie in."""
    return op("floordiv", end_of(axis, "first"), const(side, "i64"), dtype="i64")


def looked_at(
    classes: Classes, granules: Granules, name: str, compute: str, steps: Mapping[Axis, int]
) -> tuple[Classes, tuple[KernelPlan, ...]] | None:
    """Classes of which a kernel finds by looking at each pair whether they may contribute, and whether all masks let
    them through; None if there are too many pairs.

    Args:
      classes: of single indices and rows, in their own axes.
      steps: how many indices of an axis are alike, of which one is looked at; 1 where it is not there.
    """
    either = op("or", classes.possible, classes.certain, dtype="bool")
    singles, rows = granules.seen_by(either)
    if math.prod(-(-a.extent // steps.get(a, 1)) for a in (*singles, *rows, granules.axis)) > LOOKED_AT:
        return None
    runs = {a: Axis(f"r{k}", -(-a.extent // n)) for k, (a, n) in enumerate(rows.items())}
    inside: list[Axis] = []
    places: dict[Axis, Expr] = {}
    for a, n, run in [*((a, n, runs[a]) for a, n in rows.items()), (granules.axis, granules.granule, granules.every)]:
        step = math.gcd(steps.get(a, 1), n)
        inside.append(Axis(f"i{len(inside)}", n // step))
        begin = op("mul", index(run), const(n, "i64"), dtype="i64")
        at = op("add", begin, op("mul", index(inside[-1]), const(step, "i64"), dtype="i64"), dtype="i64")
        # Beyond the end, the last again.
        places[a] = raw_op("min", (at, const(a.extent - 1, "i64")), "i64")
    grid = (*singles, *runs.values(), granules.every)
    found = {"certain": ("all", classes.certain), "possible": ("any", classes.possible)}
    stores = tuple(
        Store(f"{name}_{k}", grid, "bool", reduce_over(kind, inside, substitute(e, places), "bool"))
        for k, (kind, e) in found.items()
    )
    # As many granules at once as make so many pairs.
    together = max(1, min(TILE, PAIRS // math.prod(a.extent for a in inside)))
    tiles = Choices(tuple((a, together if a == granules.every else 1) for a in grid))
    looking = KernelPlan(f"{name}_looks", grid, (), (), stores, compute, tiles, minor=True)
    where = (*map(index, singles), *(run_of(a, n) for a, n in rows.items()), index(granules.every))
    certain, possible = (load(s.name, where, "bool") for s in stores)
    return Classes(certain, possible, classes.constants), (looking,)


def with_visits(
    loop: Loop, classes: Classes, granules: Granules, part: float, name: str, compute: str
) -> tuple[Loop, tuple[KernelPlan, ...]] | None:
    """The loop with visits, of this part of the granules, and the kernels that list them; None where the list would be
    large."""
    kind = _kind(classes)
    singles, rows = granules.seen_by(kind)
    runs = [Axis(f"r{k}", -(-a.extent // n)) for k, (a, n) in enumerate(rows.items())]
    if math.prod(a.extent for a in (*singles, *runs, granules.every)) > LARGEST:
        return None
    ends = ends_of(rows, dict(zip(rows, runs, strict=True)))
    made = _listing(substitute(kind, {}, ends), (*singles, *runs), granules.every, name, compute)
    where = (*map(index, singles), *(run_of(a, n) for a, n in rows.items()))
    visits = Visits(
        load(f"{name}_order", (*where, ref(PLACE, (), "i64")), "i32"),
        load(f"{name}_whole", where, "i32"),
        load(f"{name}_some", where, "i32"),
        const(granules.every.extent, "i64"),
        granules.granule,
        part,
    )
    return replace(loop, visits=visits, interior=Interior(None, None, classes.constants)), made


def _kind(classes: Classes) -> Expr:
    """Of a granule: 0 if it may contribute and no mask is needed, 1 if it may contribute, 2 if not."""
    zero, one, two = (const(n, "i32") for n in range(3))
    return select(classes.possible, select(classes.certain, zero, one), two)


def _listing(
    kind: Expr, before: tuple[Axis, ...], granules: Axis, name: str, compute: str
) -> tuple[KernelPlan, KernelPlan, KernelPlan]:
    """Three kernels: the kinds of granules, and how many are of the first, and of the first two; the place of each; and
    what has each place.

    How many granules before one are of its kind, is a product of matrices.
    """
    other, zero, one = Axis("u", granules.extent), const(0, "i32"), const(1, "i32")
    own = (*before, granules)

    def read(stored: str, axes: Sequence[Axis]) -> Expr:
        return load(f"{name}_{stored}", tuple(map(index, axes)), "i32")

    def kernel(what: str, loops: Sequence[Loop], *stores: Store) -> KernelPlan:
        grid = before if what == "kinds" else own
        tiles = {a: RUN if a is before[-1] else 1 for a in before} | dict.fromkeys((granules, other), TILE)
        used = (*grid, *(loop.axis for loop in loops))
        choices = Choices(tuple((a, tiles[a]) for a in used))
        return KernelPlan(f"{name}_{what}", grid, (), tuple(loops), stores, compute, choices, minor=True)

    def store(what: str, axes: tuple[Axis, ...], e: Expr) -> Store:
        return Store(f"{name}_{what}", axes, "i32", e)

    def number(test: Expr) -> Expr:
        return select(test, const(1.0, "bf16"), const(0.0, "bf16"))

    def is_kind(e: Expr, n: int) -> Expr:
        return op("eq", e, const(n, "i32"), dtype="bool")

    counts = tuple(
        Accumulator(what, "sum", before, select(op("lt", kind, const(n, "i32"), dtype="bool"), one, zero), "i32", None)
        for what, n in (("whole", 1), ("some", 2))
    )
    kinds = kernel(
        "kinds",
        [Loop(granules, counts)],
        *(store(s.name, before, ref(s.name, before, "i32")) for s in counts),
        store("kind", own, kind),
    )
    earlier = number(op("lt", index(other), index(granules), dtype="bool"))
    is_there = [number(is_kind(read("kind", (*before, other)), n)) for n in range(2)]
    alike = tuple(
        Accumulator(f"n{n}", "sum", own, op("mul", there, earlier, dtype="f32"), "bf16", None)
        for n, there in enumerate(is_there)
    )
    n0, n1 = (cast(ref(s.name, own, "f32"), "i32") for s in alike)
    rest = op("sub", op("sub", cast(index(granules), "i32"), n0, dtype="i32"), n1, dtype="i32")
    mine = read("kind", own)
    places = select(
        is_kind(mine, 0),
        n0,
        select(
            is_kind(mine, 1),
            op("add", read("whole", before), n1, dtype="i32"),
            op("add", read("some", before), rest, dtype="i32"),
        ),
    )
    # (Each place is one of these; that is said for those who ask.)
    last = const(granules.extent - 1, "i64")
    there = op("min", op("max", read("place", own), const(0, "i64"), dtype="i64"), last, dtype="i64")
    dims = (*((index(a), a.extent) for a in before), (there, granules.extent))
    order = Store(f"{name}_order", own, "i32", cast(index(granules), "i32"), dims)
    return kinds, kernel("places", [Loop(other, alike)], store("place", own, places)), kernel("orders", [], order)
