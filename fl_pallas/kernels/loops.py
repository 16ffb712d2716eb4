"""Loops of a kernel: their tiles, masks that are left out where none is needed, and sums about guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ..schedule.expr import Axis, Expr, Op, loads, ref_names, walk
from ..schedule.inner import power_of_two
from ..schedule.interior import bare
from ..schedule.plan import (
    PLACE,
    Accumulator,
    Interior,
    KernelPlan,
    Loop,
    Step,
    Store,
    Visits,
    above_along,
    bounds_of,
    step_expressions,
    stored_in,
    without_maxima,
)
from .elementwise import combined
from .evaluate import Evaluator
from .native import never, read_once
from .products import side_tile
from .reductions import identity_of, reduce_tile
from .steady import hoist, steady_sides
from .tile import JNP, Scope, Tile

# What a loop's steps hold.
Carry = tuple[Array, ...]
# How many scores of a row a guess of their maximum goes by. In bits, powers of two: by how much it is put above those
# (in bfloat16: others have no such range, or precision to lose); how large sums of weights may become, and how small
# (in float16, not as small); and below what there is no score, for masks add -10000 and less.
SAMPLE, ABOVE, MOST, HIDDEN = 32, 50.0, 90.0, -7000.0
# How many rows' maxima are looked at together, where a loop's bounds rest on all of them.
LOOKED_AT = 1024


class Loops:
    """The loops of one program of a kernel, traced once for all.

    Args:
      plan: of the kernel.
      ev: evaluates what they accumulate, the grid's axes being bound.
      store: makes a store, where it is.
    """

    def __init__(self, plan: KernelPlan, ev: Evaluator, store: Callable[[Store], None]):
        self.plan, self.ev, self.store = plan, ev, store
        steps = [s for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
        corrections = [s.correct for s in steps if s.correct is not None]
        # What something has to equal keeps its NaN, which nothing equals.
        asked = [m for e in corrections for m in walk(e) if isinstance(m, Op) and m.name == "isnan"]
        used, exact = (
            frozenset(n.removesuffix(".old") for e in found for n in ref_names(e)) for found in (corrections, asked)
        )
        self.references = used - exact

    def run(self, loop: Loop, outer: Scope) -> None:
        """Run a loop; masks are left out of the tiles that need none."""
        ev = self.ev
        guessed = bool(loop.guesses) and self.plan.choices.guesses
        if not guessed:
            self._hoist(loop)
        run = self._guessed if guessed else self._run
        carry = self._with_steady_sides(loop, lambda carry: run(loop, carry))
        for s, x in zip(loop.steps, carry, strict=True):
            summed = isinstance(s, Accumulator) and s.kind == "sum" and x.ndim == 1 and x.dtype == jnp.float32
            outer.refs[s.name] = self._tile(s, read_once(x) if summed and not ev.interpret else x)

    def _with_steady_sides(self, loop: Loop, run: Callable[[Carry], Carry]) -> Carry:
        """What a loop ends with, which is given the sides of products that are computed and the same in all of it.

        Such a side has to lie in shared memory: Triton leaves it in registers, and ptxas (12.8, 12.9) then gives them
        away, so that the second iteration multiplies other numbers. Triton stores what comes of loads, or is handed
        to a loop: of one iteration, here, which no compiler knows.
        """
        ev, carry = self.ev, tuple(self._initial(s) for s in loop.steps)
        ev.scopes.append(self._probe(loop))
        sides = [] if ev.interpret else steady_sides(ev, self._evaluated(loop))
        ev.pop()
        if not sides:
            return run(carry)
        tiles = [side_tile(ev, s) for s in sides]

        def once(_: Array, state: tuple[list[Array], Carry]) -> tuple[list[Array], Carry]:
            arrays, carry = state
            ev.push({}, {}).memo.update((s, Tile(x, t.axes)) for s, x, t in zip(sides, arrays, tiles, strict=True))
            carry = run(carry)
            ev.pop()
            return [jnp.zeros_like(x) for x in arrays], carry

        return lax.fori_loop(0, 1 + never(), once, ([t.array for t in tiles], carry))[1]

    def _probe(self, loop: Loop) -> Scope:
        """The scope of an iteration, of which no more is asked than what it binds."""
        side = self.plan.choices.tile(loop.axis) or 1
        return Scope({loop.axis: jnp.int32(0)}, {loop.axis: side}, dict.fromkeys(_names(loop)))

    def _hoist(self, loop: Loop) -> None:
        """Evaluate what is the same in all iterations of a loop."""
        hoist(self.ev, self._evaluated(loop), self._probe(loop))

    def _evaluated(self, loop: Loop) -> list[Expr]:
        """What an iteration evaluates."""
        steps = [e for s in loop.steps for e in step_expressions(s)]
        return steps + [s.expr for s in stored_in(loop, self.plan.stores)]

    def _guessed(self, loop: Loop, carry: Carry) -> Carry:
        """A loop about guesses of its maxima; and about running ones, where those were too far off."""
        ev, quick = self.ev, without_maxima(loop)
        known = self._guesses(loop)
        ev.push({}, {}).refs.update(known)
        self._hoist(quick)
        sums = self._run(quick, tuple(map(self._initial, quick.steps)))
        ev.pop()
        found = known | {s.name: self._tile(s, x) for s, x in zip(quick.steps, sums, strict=True)}

        def again(_: Array, __: Carry) -> Carry:
            # All that this time needs is computed now: held from before the first loop, it would take registers there.
            zero = jnp.int32(0) if ev.interpret else lax.shift_right_logical(pl.program_id(0), jnp.int32(30))
            places = {a: at + zero for a, at in ev.scopes[0].starts.items()}
            ev.push(places, {a: ev.side(a) for a in places})
            ev.zero = None if ev.interpret else zero
            self._hoist(loop)
            running = self._run(loop, carry)
            ev.zero = None
            ev.pop()
            return running

        # A loop, for in a branch Hopper's products would wait for each other.
        times = jnp.int32(1) - self._is_close(loop, found).astype(jnp.int32)
        return lax.fori_loop(0, times, again, tuple(found[s.name].array for s in loop.steps))

    def _guesses(self, loop: Loop) -> dict[str, Tile]:
        """What sums are taken about: more than the maxima of a loop's first indices, so that there is room on both
        sides; 0 where those say nothing of others, for a mask hides them."""
        ev, side = self.ev, self.plan.choices.tile(loop.axis) or 1
        if loop.visits is None:
            first, _ = self._own(loop, *self._bounds(loop, side))
        else:
            first = self._visited(loop.visits, side, jnp.int32(0))
        first = jnp.minimum(first, self.ev.tiles(loop.axis, side) - jnp.int32(1))
        above = ABOVE if _multiplies_in(loop, "bf16") else 0.0
        bits = {g.maximum: g.bits for g in loop.guesses}
        ev.push({loop.axis: first * jnp.int32(side)}, {loop.axis: min(side, SAMPLE)})
        made: dict[str, Tile] = {}
        for s in loop.steps:
            if isinstance(s, Accumulator) and s.name in bits:
                largest = reduce_tile(ev, s.kind, s.update, loop.axis, s.dtype, keep_nan=False)
                x = jnp.where(largest.array > HIDDEN / bits[s.name], largest.array, 0) + above / bits[s.name]
                made[s.name] = Tile(x, largest.axes)
        ev.pop()
        return made

    def _is_close(self, loop: Loop, found: dict[str, Tile]) -> Array:
        """Whether guesses served: weights neither vanish nor are too many, and all sums are finite."""
        totals = {g.total for g in loop.guesses}
        half = any(_multiplies_in(other, "f16") for other in self.plan.loops)
        least, most = (2.0**-10, 2.0**15) if half else (2.0**-MOST, 2.0**MOST)
        close = jnp.bool_(True)
        for s in loop.steps:
            if isinstance(s, Accumulator) and s.correct is not None:
                x = found[s.name]
                size = jnp.abs(x.array)
                good = (size > least) & (size < most) if s.name in totals else size < jnp.inf
                close = close & self._everywhere(good, x.axes)
        return close & self._are_settled(loop, found)

    def _are_finite(self, names: Sequence[str]) -> Array:
        """Whether what earlier loops made is finite, and no sum is 0, for all of the tile."""
        kinds = {s.name: s.kind for loop in self.plan.loops for s in loop.steps if isinstance(s, Accumulator)}
        hold = jnp.bool_(True)
        for name in names:
            x = self.ev.held(name)
            if not jnp.issubdtype(x.array.dtype, jnp.floating):
                continue
            size = jnp.abs(x.array)
            good = (size > 0) & (size < jnp.inf) if kinds.get(name) == "sum" else size < jnp.inf
            hold = hold & self._everywhere(good, x.axes)
        return hold

    def _are_above(self, loop: Loop) -> Array:
        """Whether what a loop's bounds rest on is no less than a number, and finite: for the tile, and all along the
        loop's axis."""
        ev, all_along = self.ev, above_along(loop)
        side = min(LOOKED_AT, power_of_two(loop.axis.extent))

        def good(e: Expr, least: float) -> Array:
            x = ev.eval(e)
            return self._or_outside((x.array >= least) & (x.array < jnp.inf), x.axes).astype(jnp.int32)

        def look(n: Array) -> list[Array]:
            ev.push({loop.axis: n * jnp.int32(side)}, {loop.axis: side})
            found = [good(*asked) for asked in all_along]
            ev.pop()
            return found

        def both(n: Array, before: list[Array]) -> list[Array]:
            return [x * y for x, y in zip(before, look(n), strict=True)]

        found = [good(*asked) for asked in loop.above if asked not in all_along]
        if all_along:
            # Element by element: threads have to wait for each other where they agree.
            found += lax.fori_loop(1, ev.tiles(loop.axis, side), both, look(jnp.int32(0)))
        hold = jnp.bool_(True)
        for x in found:
            hold = hold & self._all(x)
        return hold

    def _everywhere(self, good: Array, axes: tuple[Axis, ...]) -> Array:
        """Whether something holds for all of a tile that lies inside of its axes."""
        return self._all(self._or_outside(good, axes).astype(jnp.int32))

    def _or_outside(self, good: Array, axes: tuple[Axis, ...]) -> Array:
        """Whether something holds for an element, or it lies outside of the tile's axes."""
        for a in axes:
            within = self.ev.within(a)
            good = good if within is None else good | ~self.ev.spread(within, axes)
        return good

    def _all(self, count: Array) -> Array:
        """Whether no element is 0."""
        while count.ndim:
            count = jnp.min(count, axis=count.ndim - 1)
        return count > 0

    def _run(self, loop: Loop, carry: Carry) -> Carry:
        """The loop's iterations."""
        ev, side = self.ev, self.plan.choices.tile(loop.axis) or 1
        unmasked, inside = bare(loop), stored_in(loop, self.plan.stores)

        def tile(n: Array, carry: Carry, interior: Array | bool = False, whole: bool = True) -> Carry:
            scope = ev.push({loop.axis: n * jnp.int32(side)}, {loop.axis: side})
            scope.refs.update(dict.fromkeys(_names(loop)))
            scope.whole = frozenset((loop.axis,)) if whole else frozenset()
            scope.bare, scope.interior = unmasked, interior
            new = tuple(self._step(s, old, loop.axis, scope) for s, old in zip(loop.steps, carry, strict=True))
            for s in inside:
                self.store(s)
            ev.pop()
            return new

        if loop.visits is not None:
            return self._visit(loop, loop.visits, tile, carry)
        begin, end = self._bounds(loop, side)
        first, last = self._own(loop, begin, end)
        # Tiles below this one lie inside of the axis whole.
        ragged = lax.div(self.ev.extent32(loop.axis), jnp.int32(side))
        whole = jnp.minimum(last, ragged)
        if loop.interior is None:
            carry = lax.fori_loop(first, whole, tile, carry)
        else:
            # Where the interior lies does not hang on data for that, on which threads are not known to agree.
            asks = bool(loop.finite or loop.above) and loop.parts is None
            near = self._contributing(loop, side) if asks else (first, last)
            start, stop = self._interior(loop, loop.interior, side, near[0], jnp.minimum(near[1], ragged))
            if any(loads(bound) for bound in bounds_of(loop) if bound is not None):
                # Threads are not known to agree where data says what is inside, and a branch takes longer then than a
                # loop of its own. One more serves both sides of it.
                def outside(n: Array, carry: Carry) -> Carry:
                    return tile(n + jnp.where(n >= start, stop - start, 0), carry)

                carry = lax.fori_loop(start, stop, lambda n, c: tile(n, c, True), carry)
                carry = lax.fori_loop(first, whole - (stop - start), outside, carry)
            else:
                carry = lax.fori_loop(first, whole, lambda n, c: tile(n, c, (start <= n) & (n < stop)), carry)
        if loop.axis.size is not None or loop.axis.extent % side:
            # One tile, and no loop, which would take registers from the others, and make them test each index.
            there = (first <= ragged) & (ragged < last)
            carry = lax.cond(there, lambda c: tile(ragged, c, whole=False), lambda c: c, carry)
        if loop.settled:
            found = {s.name: self._tile(s, x) for s, x in zip(loop.steps, carry, strict=True)}
            # Of several parts, each goes on with its share: one that is settled knows that the sum of all is.
            length = jnp.maximum(end - begin, 0)
            start, stop = self._own(loop, jnp.int32(0), ev.tiles(loop.axis, side) - length)
            stop = jnp.where(self._are_settled(loop, found), start, stop)
            carry = lax.fori_loop(
                start, stop, lambda n, c: tile(n + jnp.where(n >= begin, length, 0), c, whole=False), carry
            )
        return carry

    def _visit(self, loop: Loop, visits: Visits, tile: Callable[..., Carry], carry: Carry) -> Carry:
        """The iterations of a loop that goes through some granules: those without masks, then others."""
        ev, side = self.ev, self.plan.choices.tile(loop.axis) or 1
        each = jnp.int32(visits.granule // side)
        whole, some, every = (ev.eval(n).array * each for n in (visits.whole, visits.some, visits.every))
        if loop.finite or loop.above:
            some = jnp.where(self._are_finite(loop.finite) & self._are_above(loop), some, every)
        first, last = self._own(loop, jnp.int32(0), some)
        middle = jnp.maximum(jnp.minimum(whole, last), first)
        inside = loop.axis.size is None and not loop.axis.extent % visits.granule
        carry = lax.fori_loop(first, middle, lambda n, c: tile(self._visited(visits, side, n), c, True), carry)

        def masked(n: Array, carry: Carry) -> Carry:
            return tile(self._visited(visits, side, n), carry, whole=inside)

        carry = lax.fori_loop(middle, last, masked, carry)
        if loop.settled:
            found = {s.name: self._tile(s, x) for s, x in zip(loop.steps, carry, strict=True)}
            start, stop = self._own(loop, some, every)
            stop = jnp.where(self._are_settled(loop, found), start, stop)
            carry = lax.fori_loop(start, stop, masked, carry)
        return carry

    def _visited(self, visits: Visits, side: int, n: Array) -> Array:
        """The tile of `side` indices that is the `n`-th to be visited."""
        each = jnp.int32(visits.granule // side)
        self.ev.push({}, {}).refs[PLACE] = Tile(lax.div(n, each), ())
        granule = self.ev.eval(visits.at).array
        self.ev.pop()
        return granule * each + lax.rem(n, each)

    def _are_settled(self, loop: Loop, found: dict[str, Tile]) -> Array:
        """Whether the maxima of all of the tile are above what masks put in the place of scores."""
        hold = jnp.bool_(True)
        for name, least in loop.settled:
            hold = hold & self._everywhere(found[name].array >= least, found[name].axes)
        return hold

    def _interior(self, loop: Loop, interior: Interior, side: int, first: Array, last: Array) -> tuple[Array, Array]:
        """First tile from `first` to `last` that lies inside of the loop's interior whole, and one past the last."""
        start, stop = first, last
        if interior.lower is not None:
            start = lax.div(self._clipped(interior.lower, loop) + jnp.int32(side - 1), jnp.int32(side))
        if interior.upper is not None:
            stop = lax.div(self._clipped(interior.upper, loop), jnp.int32(side))
        start = jnp.minimum(jnp.maximum(start, first), jnp.maximum(first, last))
        return start, jnp.maximum(jnp.minimum(stop, last), start)

    def _clipped(self, bound: Expr, loop: Loop) -> Array:
        return jnp.clip(self.ev.eval(bound).array, 0, self.ev.extent32(loop.axis)).astype(jnp.int32)

    def _bounds(self, loop: Loop, side: int) -> tuple[Array, Array]:
        """First tile of the loop that programs run, all its parts, and one past the last."""
        first, last = self._contributing(loop, side)
        if loop.finite or loop.above:
            hold = self._are_finite(loop.finite) & self._are_above(loop)
            first, last = jnp.where(hold, first, 0), jnp.where(hold, last, self.ev.tiles(loop.axis, side))
        return first, last

    def _contributing(self, loop: Loop, side: int) -> tuple[Array, Array]:
        """First tile of the loop that can contribute, and one past the last."""
        first, last = jnp.int32(0), self.ev.tiles(loop.axis, side)
        if loop.lower is not None:
            first = lax.div(self._clipped(loop.lower, loop), jnp.int32(side))
        if loop.upper is not None:
            last = lax.div(self._clipped(loop.upper, loop) + jnp.int32(side - 1), jnp.int32(side))
        return first, last

    def _own(self, loop: Loop, first: Array, last: Array) -> tuple[Array, Array]:
        """Of the tiles from `first` to `last` those of this program."""
        if loop.parts is None:
            return first, last
        here, count = self.ev.start(loop.parts), self.ev.extent32(loop.parts)
        assert here is not None
        share = lax.div(jnp.maximum(last - first, 0) + count - jnp.int32(1), count)
        start = jnp.minimum(first + here * share, last)
        return start, jnp.minimum(start + share, last)

    def _step(self, step: Step, old: Array, axis: Axis, scope: Scope) -> Array:
        ev = self.ev
        scope.refs[f"{step.name}.old"] = self._tile(step, old)
        axes = ev.sorted_axes(step.axes)
        if isinstance(step, Accumulator):
            # The sums taken about a maximum turn NaN by themselves; the maximum need not.
            part = reduce_tile(ev, step.kind, step.update, axis, step.dtype, step.name not in self.references)
            part = ev.spread(part, axes).astype(old.dtype)
            before = old if step.correct is None else ev.spread(ev.eval(step.correct), axes)
            new = combined(ev, step.kind, before, part)
        else:
            value = ev.spread(ev.eval(step.value), axes)
            new = jnp.where(jnp.abs(value) < jnp.inf, value, old)
        scope.refs[step.name] = self._tile(step, new)
        return new

    def _initial(self, step: Step) -> Array:
        shape = self.ev.shape(self.ev.sorted_axes(step.axes))
        if isinstance(step, Accumulator):
            return jnp.full(shape, identity_of(step.kind, self._held(step)))
        return jnp.zeros(shape, JNP[self.plan.compute])

    def _held(self, step: Accumulator) -> object:
        if step.kind in ("any", "all"):
            return jnp.int32
        kind = step.update.dtype
        return JNP[self.plan.compute] if kind in ("f16", "bf16", "f32", "f64") else JNP[kind]

    def _tile(self, step: Step, x: Array) -> Tile:
        axes = self.ev.sorted_axes(step.axes)
        logical = isinstance(step, Accumulator) and step.kind in ("any", "all")
        return Tile(x != 0 if logical else x, axes)


def _names(loop: Loop) -> list[str]:
    """The references that an iteration of a loop has."""
    return [n for s in loop.steps for n in (s.name, f"{s.name}.old")]


def _multiplies_in(loop: Loop, dtype: str) -> bool:
    """Whether a loop has products of matrices of this type."""
    return any(isinstance(s, Accumulator) and s.dtype == dtype for s in loop.steps)
