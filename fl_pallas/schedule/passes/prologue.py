"""Prologues: what a small kernel computes of rows goes into the kernel whose programs have these rows.

Before: `r0_d0[h, x] = sum[d](do[h, x, d] * o[h, x, d])` is a kernel, and two kernels with loops load it.
After: the one with rows x computes it before its loop, stores it, and runs before the other.

Nobody computes anything twice, for each row is in one program of that kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from ..build import cast, op, row_major, substitute
from ..expr import Axis, Expr, Index, Load, Op, free_axes, index, loads
from ..integer import linear
from ..plan import KernelPlan, Store, expressions, held_whole, operand_names, stored_in
from ..scan import scanned_axes
from .rewritten import rewritten


def into_prologues(plans: Sequence[KernelPlan], results: Collection[str]) -> list[KernelPlan]:
    """Kernels in the order in which they run → the same work in fewer, where one can take another's along.

    Args:
      results: names of what is stored for others than these kernels.
    """
    made = list(plans)
    for small in plans:
        # Running sums are of tiles, of which a program has one row; what is minor is of large tiles.
        if small.loops or small.minor or scanned_axes([s.expr for s in small.stores]):
            continue
        for host in [p for p in made if p.loops and _reads(p, small)]:
            taken = _taken(small, host)
            order = _order(made, small, host) if taken is not None else None
            if taken is not None and order is not None:
                read = {name for p in order if p is not host for name in operand_names(p)}
                needed = tuple(s for s in taken.stores if s in host.stores or s.name in read or s.name in results)
                made = [replace(taken, stores=needed) if p is host else p for p in order]
                break
    return made


def _reads(plan: KernelPlan, other: KernelPlan) -> bool:
    return not {*operand_names(plan)}.isdisjoint(s.name for s in other.stores)


def _order(plans: Sequence[KernelPlan], small: KernelPlan, host: KernelPlan) -> list[KernelPlan] | None:
    """`plans` without `small`, all that read it after `host`; None if `host` needs one of them."""
    first = plans.index(small)
    needed = [host]
    for p in reversed(plans[first + 1 : plans.index(host)]):
        if any(_reads(n, p) for n in needed):
            needed.insert(0, p)
    if any(_reads(p, small) for p in needed[:-1]):
        return None
    rest = [p for p in plans[first + 1 :] if p not in needed]
    return [*plans[:first], *needed, *rest]


def _taken(small: KernelPlan, host: KernelPlan) -> KernelPlan | None:
    """`host` with all that `small` computes and stores; None unless each of its programs has rows of its own."""
    places = _places(small, host)
    if places is None or small.compute != host.compute:
        return None
    # A program that has some of the features alone would do it again for each part of them; and a tile of what stands
    # for several dimensions lies in none.
    single = {a for at in places.values() if not isinstance(at, Index) for a in free_axes(at)}
    every = [c for c in (host.choices, *host.others) if all((c.tile(a) or 1) >= a.extent for a in host.features)]
    choices = [c for c in every if all((c.tile(a) or 1) == 1 for a in single)]
    if host.choices not in choices:
        return None
    stores = {s.name: s for s in small.stores}

    def rule(n: Expr) -> Expr:
        if not isinstance(n, Load) or n.source not in stores:
            return n
        store = stores[n.source]
        return cast(substitute(store.expr, dict(zip(store.axes, n.index, strict=True))), n.dtype)

    made = rewritten(host, rule)
    note = f"{', '.join(stores)}: of rows, computed before the loop"
    moved = (_moved(s, places) for s in small.stores)
    made = replace(made, others=tuple(choices[1:]), stores=(*made.stores, *moved), notes=(*made.notes, note))
    return None if _reads(made, small) else made


def _places(small: KernelPlan, host: KernelPlan) -> dict[Axis, Expr] | None:
    """For each axis of `small` what it is in `host`, whose programs have all rows once; None if they do not."""
    stores = {s.name: s for s in small.stores}
    places: dict[Axis, Expr] = {}
    for node in dict.fromkeys(n for e in expressions(host) for n in loads(e) if n.source in stores):
        store = stores[node.source]
        if store.dims:
            return None
        for axis, at in zip(store.axes, node.index, strict=True):
            if axis.extent > 1 and axis not in small.features and places.setdefault(axis, at) is not at:
                return None
    rows = {*host.grid} - {*host.features}
    parts = {loop.parts for loop in host.loops if loop.parts is not None}
    inside = {loop.axis for loop in host.loops if stored_in(loop, host.stores)}
    if any(free_axes(at) & inside for at in places.values()):
        # At each tile of its loop, of whichever part, it has other rows, and all that these go along.
        rows = (rows - held_whole(host) - parts) | inside
        parts = set()
    if parts or not _is_each_once(places, rows):
        return None
    free = list(host.features)
    for axis in (a for a in small.grid if a not in places):
        same = next((a for a in free if a.extent == axis.extent and axis in small.features), None)
        if same is None:
            return None
        places[axis] = index(same)
        free.remove(same)
    return places


def _is_each_once(places: Mapping[Axis, Expr], rows: Set[Axis]) -> bool:
    """Whether the indices of `rows` have each of the places once: they are the same dimensions, or one side has some of
    them as one (a batch and its heads)."""
    terms, c = linear(row_major(places.values(), places))
    for t, k in [*terms.items()]:
        # k · n · (a // n) + k · (a % n) is k · a.
        if isinstance(t, Op) and t.name == "mod":
            whole = op("floordiv", *t.args, dtype=t.dtype)
            if terms.get(whole) == k * t.args[1].value:  # type: ignore[union-attr]
                del terms[t], terms[whole]
                terms[t.args[0]] = k
    expected = 1
    for t, k in sorted(terms.items(), key=lambda term: term[1]):
        if not isinstance(t, Index) or k != expected:
            return False
        expected *= t.axis.extent
    return c == 0 and {t.axis for t in terms if isinstance(t, Index)} == {a for a in rows if a.extent > 1}


def _moved(store: Store, places: Mapping[Axis, Expr]) -> Store:
    """A store of another kernel's axes."""
    found = [places.get(a, index(Axis(f"u{k}", 1))) for k, a in enumerate(store.axes)]
    mapping = dict(zip(store.axes, found, strict=True))
    axes = tuple(dict.fromkeys(a for at in found for a in sorted(free_axes(at), key=lambda a: a.name)))
    dims = tuple((substitute(i, mapping), n) for i, n in zip(store.index, store.shape, strict=True))
    if not store.dims and all(isinstance(at, Index) for at in found):
        dims = ()
    return replace(store, axes=axes, expr=substitute(store.expr, mapping), dims=dims)
