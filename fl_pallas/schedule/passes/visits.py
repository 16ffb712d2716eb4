"""Visits: a loop goes through the granules of its axis that may contribute, where there are gaps between them.

Before: `for j0 in 0 .. x2.last + 1`, of which a mask, `j < 4 | i - j < 256`, leaves the first and the last tiles.
After: small kernels store, for each run of rows, which granules masks let through whole, which in part, and which not
at all, and sort them by that; the loop goes through the first two kinds. (FlexAttention's BlockMask is such a list,
arXiv 2412.05496, section 4; a user makes it, from a mask that is given apart. This one is derived.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..build import TRUE, cast, op, reduce_over, select, substitute
from ..expr import Axis, Const, Expr, Load, Op, Reduce, const, free_axes, index, load, raw_op, ref, ref_names, walk
from ..plan import PLACE, Accumulator, Choices, Interior, KernelPlan, Loop, Store, Visits
from ..positions import at_positions, is_of_positions
from ..target import Target
from .weigh import LAUNCH, cycles

# Elements of a list, at most; and pairs of a row and an index that are looked at one by one.
LARGEST, LOOKED_AT = 2**24, 2**33
# Granules, and runs, that a program of the kernels that make lists takes at once.
TILE, RUN = 64, 16
# To tell how many granules are visited: runs, rows of each, granules, and heads that are looked at.
RUNS, ROWS, GRANULES, HEADS = 8, 8, 64, 2


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
        return op("and", certain, op("le", end, const(self.axis.extent, "i64"), dtype="bool"), dtype="bool")

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


def may_have_gaps(condition: Expr, axis: Axis, rows: Collection[Axis]) -> bool:
    """Whether a condition on indices of a loop's axis is no conjunction of comparisons, which hold between two ends.

    Args:
      rows: the axes of which a program takes a tile, of whose indices or ends the condition may be.
    """
    nodes = [n for n in walk(condition) if axis in free_axes(n)]
    paired = [n for n in nodes if isinstance(n, Load) and n.dtype == "bool"]
    by_pairs = (not free_axes(n).isdisjoint(rows) or bool(ref_names(n)) for n in paired)
    return any(by_pairs) or any(isinstance(n, Reduce) or isinstance(n, Op) and n.name in ("or", "mod") for n in nodes)


def apart(condition: Expr) -> tuple[Expr, Expr]:
    """What joins to a condition by `and`: that of positions alone, and the rest."""
    found = [TRUE, TRUE]
    for e in _conjuncts(condition):
        n = 0 if is_of_positions(e) else 1
        found[n] = op("and", found[n], e, dtype="bool")
    return found[0], found[1]


def _conjuncts(e: Expr) -> Iterator[Expr]:
    if isinstance(e, Op) and e.name == "and":
        yield from (c for a in e.args for c in _conjuncts(a))
    else:
        yield e


def pays(plan: KernelPlan, part: float, target: Target) -> bool:
    """Whether going through this part of the granules saves more than three small kernels take."""
    return (1 - part) * cycles(plan, target) > 3 * LAUNCH


def part_visited(loop: Loop, condition: Expr, granules: Granules) -> float:
    """The part of the granules between a loop's bounds where a condition on positions holds somewhere, of some runs."""
    singles, rows = granules.seen_by(condition)
    heads = [_spread(a.extent, HEADS) for a in singles]
    runs = [_spread(-(-a.extent // n), RUNS) for a, n in rows.items()]
    shown = np.asarray(_spread(granules.every.extent, GRANULES))
    columns = np.minimum(shown[:, None] * granules.granule + np.arange(granules.granule), loop.axis.extent - 1)
    visited = between = 0
    for chosen in itertools.islice(itertools.product(*heads, *runs), HEADS * RUNS):
        ends: dict[Expr, Expr] = {}
        fixed = {a: np.asarray(n) for a, n in zip(singles, chosen, strict=False)}
        places = {**fixed, granules.axis: columns[None]}
        for (a, side), n in zip(rows.items(), chosen[len(singles) :], strict=True):
            last = min((n + 1) * side, a.extent) - 1
            ends |= {end_of(a, "first"): const(n * side, "i64"), end_of(a, "last"): const(last, "i64")}
            places[a] = np.linspace(n * side, last, ROWS).astype(np.int64)[:, None, None]
        known: dict[Axis, Expr] = {a: const(int(n), "i64") for a, n in fixed.items()}
        bounds = [e if e is None else substitute(e, known, ends) for e in (loop.lower, loop.upper)]
        low, high = (e.value if isinstance(e, Const) else d for e, d in zip(bounds, (0, loop.axis.extent), strict=True))
        inside = (shown + 1) * granules.granule > low
        inside &= shown * granules.granule < high
        holds = np.broadcast_to(at_positions(condition, places), (ROWS, *columns.shape)).any((0, 2))
        between += int(inside.sum())
        visited += int((holds & inside).sum())
    return visited / max(1, between)


def _spread(extent: int, most: int) -> list[int]:
    """Some of the indices of an axis, the last among them."""
    return sorted({extent - 1, *(extent * k // most for k in range(most))})


def end_of(axis: Axis, end: str) -> Expr:
    """The reference to the first or the last row of a tile."""
    return ref(f"{axis.name}.{end}", (), "i64")


def _run_of(axis: Axis, side: int) -> Expr:
    """The run that a tile's rows lie in."""
    return op("floordiv", end_of(axis, "first"), const(side, "i64"), dtype="i64")


def looked_at(
    classes: Classes, granules: Granules, name: str, compute: str
) -> tuple[Classes, tuple[KernelPlan, ...]] | None:
    """Classes of which a kernel finds by looking at each pair whether they may contribute, and whether all masks let
    them through; None if there are too many pairs.

    Args:
      classes: of single indices and rows, in their own axes.
    """
    either = op("or", classes.possible, classes.certain, dtype="bool")
    singles, rows = granules.seen_by(either)
    if math.prod(a.extent for a in (*singles, *rows, granules.axis)) > LOOKED_AT:
        return None
    runs = {a: Axis(f"r{k}", -(-a.extent // n)) for k, (a, n) in enumerate(rows.items())}
    inside: list[Axis] = []
    places: dict[Axis, Expr] = {}
    for a, n, run in [*((a, n, runs[a]) for a, n in rows.items()), (granules.axis, granules.granule, granules.every)]:
        inside.append(Axis(f"i{len(inside)}", n))
        begin = op("mul", index(run), const(n, "i64"), dtype="i64")
        at = op("add", begin, index(inside[-1]), dtype="i64")
        # Beyond the end, the last again.
        places[a] = raw_op("min", (at, const(a.extent - 1, "i64")), "i64")
    grid = (*singles, *runs.values(), granules.every)
    found = {"certain": ("all", classes.certain), "possible": ("any", classes.possible)}
    stores = tuple(
        Store(f"{name}_{k}", grid, "bool", reduce_over(kind, inside, substitute(e, places), "bool"))
        for k, (kind, e) in found.items()
    )
    tiles = Choices(tuple((a, 1) for a in grid))
    looking = KernelPlan(f"{name}_looks", grid, (), (), stores, compute, tiles, minor=True)
    where = (*map(index, singles), *(_run_of(a, n) for a, n in rows.items()), index(granules.every))
    certain, possible = (load(s.name, where, "bool") for s in stores)
    return Classes(granules.are_whole(certain), possible, classes.constants), (looking,)


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
    ends: dict[Expr, Expr] = {}
    for run, (a, n) in zip(runs, rows.items(), strict=True):
        first = op("mul", index(run), const(n, "i64"), dtype="i64")
        last = op("add", first, const(n - 1, "i64"), dtype="i64")
        ends[end_of(a, "first")] = first
        ends[end_of(a, "last")] = raw_op("min", (last, const(a.extent - 1, "i64")), "i64")
    made = _listing(substitute(kind, {}, ends), (*singles, *runs), granules.every, name, compute)
    where = (*map(index, singles), *(_run_of(a, n) for a, n in rows.items()))
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
    """Of a granule: 0 if no mask is needed, 1 if it may contribute, 2 if not."""
    zero, one, two = (const(n, "i32") for n in range(3))
    return select(classes.certain, zero, select(classes.possible, one, two))


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
