"""A KernelPlan as a Pallas function: Triton lowering on NVIDIA GPUs, interpret mode elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..errors import Unsupported
from ..schedule.expr import (
    Axis,
    Expr,
    Op,
    Reduce,
    Ref,
    Size,
    children,
    free_axes,
    loads,
    ref_names,
    walk,
)
from ..schedule.interior import bare
from ..schedule.plan import (
    Accumulator,
    Interior,
    KernelPlan,
    Loop,
    Step,
    Store,
    bounds_of,
    expressions,
    is_by_thread,
    operand_names,
    step_expressions,
    without_maxima,
)
from ..schedule.scan import RUNNING
from .blocks import Blocks
from .native import read_once
from .pointwise import POINTWISE
from .tile import FIRST, JNP, Evaluator, Operand, Scope, Tile, identity_of, never, seen

# What a loop's steps hold.
Carry = tuple[Array, ...]
# How many scores of a row a guess of their maximum goes by. In bits, powers of two: by how much it is put above those
# (in bfloat16: others have no such range, or precision to lose); how large sums of weights may become, and how small
# (in float16, not as small); and below what there is no score, for masks add -10000 and less.
SAMPLE, ABOVE, MOST, HIDDEN = 32, 50.0, 90.0, -7000.0


@dataclass(frozen=True)
class TensorSpec:
    """How a tensor lies in its flat array: sizes and strides in elements, offset of its first element."""

    shape: tuple[int | Size, ...]
    strides: tuple[int | Size, ...]
    offset: int
    dtype: str

    @property
    def stored(self) -> object:
        """The jax type of the flat array (bool is kept as u8)."""
        return JNP["u8" if self.dtype == "bool" else self.dtype]

    @property
    def span(self) -> int:
        """Length of the flat array."""
        ends = zip(map(seen, self.shape), map(seen, self.strides), strict=True)
        return self.offset + 1 + sum((n - 1) * s for n, s in ends)


def contiguous(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """The spec of a freshly allocated tensor."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(shape, strides, 0, dtype)


def check_supported(plan: KernelPlan, interpret: bool) -> None:
    """Refuse what this realisation cannot express.

    Raises: Unsupported.
    """
    for e in expressions(plan):
        for n in walk(e):
            name = getattr(n, "name", "cast")
            if type(n).__name__ == "Op" and name != "cast" and name not in (*POINTWISE, *RUNNING):
                raise Unsupported(name, "no tile operation computes it")
            if not interpret and n.dtype == "f64" and free_axes(n):
                raise Unsupported("float64", "kernels compute in float32 on the GPU; float64 runs in PyTorch")
            if not interpret and isinstance(n, Reduce) and n.kind == "prod":
                raise Unsupported("prod", "the Triton lowering has no product reduction")
    for loop in plan.loops:
        for s in loop.steps:
            if isinstance(s, Accumulator) and s.kind == "prod" and not interpret:
                raise Unsupported("prod", "the Triton lowering has no product reduction")


def output_specs(plan: KernelPlan) -> tuple[TensorSpec, ...]:
    """How freshly allocated outputs of a plan lie."""
    return tuple(contiguous(s.shape, s.dtype) for s in plan.stores)


def pallas_function(
    plan: KernelPlan,
    specs: Sequence[TensorSpec],
    precision: object,
    interpret: bool,
    outputs: Sequence[TensorSpec] | None = None,
    sizes: int = 0,
    programs: int | None = None,
    blocks: Blocks | None = None,
) -> Callable[..., list[Array]]:
    """The function of a plan: flat operand arrays → flat output arrays.

    Args:
      plan: what to compute.
      specs: the operands, in the order of `operand_names(plan)`.
      precision: jax precision (or DotAlgorithmPreset) of float32 matrix products.
      interpret: run on any device, by Pallas's interpreter.
      outputs: how the outputs lie, if not as `output_specs` tells.
      sizes: how many sizes are given at launch, in an int32 array that comes before the operands.
      programs: how many run, if not what the plan's extents give.
      blocks: where the tiles that the copy engine brings are told; None where the Triton IR stays as Pallas makes it.

    Raises: Unsupported.
    """
    check_supported(plan, interpret)
    names = operand_names(plan)
    laid = tuple(outputs or output_specs(plan))

    def kernel(*refs: object) -> None:
        given, refs = [r[k] for r in refs[: bool(sizes)] for k in range(sizes)], refs[bool(sizes) :]  # type: ignore
        placed = [Operand(r, s.shape, s.strides, s.offset, s.dtype) for r, s in zip(refs, (*specs, *laid), strict=True)]
        operands = dict(zip(names, placed, strict=False))
        _Program(plan, operands, placed[len(names) :], precision, interpret, given, blocks).run()

    kernel.__name__ = plan.name
    return pl.pallas_call(  # type: ignore[return-value]
        kernel,
        out_shape=[jax.ShapeDtypeStruct((math.prod(map(seen, s.shape)),), s.stored) for s in laid],
        grid=(grid_size(plan) if programs is None else programs,),
        interpret=interpret,
        compiler_params=None
        if interpret
        else plgpu.CompilerParams(num_warps=plan.choices.warps, num_stages=plan.choices.stages),
        name=plan.name,
    )


def grid_size(plan: KernelPlan) -> int:
    """Number of programs of a plan."""
    return math.prod(_programs(plan, a) for a in plan.grid)


def _grows(plan: KernelPlan, axis: Axis) -> bool:
    """Whether some loop ends later the further a tile lies along `axis`, and none begins later.

    Bounds that data give, by reductions over it, tell nothing of the kind.
    """
    ends = {f"{axis.name}.last", f"{axis.name}.first"}
    upper = any(loop.upper is not None and _plain_refs(loop.upper) & ends for loop in plan.loops)
    lower = any(loop.lower is not None and _plain_refs(loop.lower) & ends for loop in plan.loops)
    return upper and not lower


def _plain_refs(e: Expr) -> frozenset[str]:
    """Names of the references inside `e` and outside of its reductions."""
    if isinstance(e, Reduce):
        return frozenset()
    return ref_names(e) if isinstance(e, Ref) else frozenset().union(*map(_plain_refs, children(e)))


def _names(loop: Loop) -> list[str]:
    """The references that an iteration of a loop has."""
    return [n for s in loop.steps for n in (s.name, f"{s.name}.old")]


def _multiplies_in(loop: Loop, dtype: str) -> bool:
    """Whether a loop has products of matrices of this type."""
    return any(isinstance(s, Accumulator) and s.dtype == dtype for s in loop.steps)


def _programs(plan: KernelPlan, axis: Axis) -> int:
    return -(-axis.extent // (plan.choices.tile(axis) or 1))


class _Program:
    """One program of a kernel, traced once for all."""

    def __init__(
        self,
        plan: KernelPlan,
        operands: dict[str, Operand],
        results: list[Operand],
        precision: object,
        interpret: bool,
        sizes: Sequence[Array] = (),
        blocks: Blocks | None = None,
    ):
        self.plan, self.results = plan, results
        steps = [s for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
        corrections = [s.correct for s in steps if s.correct is not None]
        # What something has to equal keeps its NaN, which nothing equals.
        asked = [m for e in corrections for m in walk(e) if isinstance(m, Op) and m.name == "isnan"]
        used, exact = (
            frozenset(n.removesuffix(".old") for e in found for n in ref_names(e)) for found in (corrections, asked)
        )
        self.references = used - exact
        order = (*(a for a in plan.grid if a not in plan.features), *(loop.axis for loop in plan.loops))
        self.ev = Evaluator(operands, order, plan.features, plan.compute, precision, interpret, sizes, blocks)
        self.ev.places = {loop.axis: FIRST for loop in plan.loops if is_by_thread(plan, loop)}

    def run(self) -> None:
        outer = self._enter_grid()
        stores = [*zip(self.plan.stores, self.results, strict=True)]
        # What no loop has a part in leaves registers before they begin; all of it is loaded before any is stored, for
        # what is loaded for two reasons is loaded once then.
        first = [(s, result, self._value(s)) for s, result in stores if not ref_names(s.expr)]
        for s, result, value in first:
            self._store(s, result, value)
        for loop in self.plan.loops:
            self._loop(loop, outer)
        for s, result in stores:
            if ref_names(s.expr):
                self._store(s, result, self._value(s))

    def _value(self, store: Store) -> Array:
        return self.ev.spread(self.ev.eval(store.expr), self.ev.sorted_axes(store.axes))

    def _store(self, store: Store, result: Operand, value: Array) -> None:
        offset, inside = self.ev.address(result, store.index, self.ev.sorted_axes(store.axes))
        if self.ev.interpret and inside is not None:
            # The interpreter writes back what it reads at masked-out places, which may be another element's;
            # past the end it writes nothing.
            offset = jnp.where(inside, offset, math.prod(map(seen, result.shape)))
        stored = JNP["u8" if result.dtype == "bool" else result.dtype]
        plgpu.store(result.ref.at[offset], value.astype(stored), mask=inside)  # type: ignore[attr-defined]

    def _enter_grid(self) -> Scope:
        """Bind the grid axes: the last grid axis runs fastest, except that tiles of one row follow each other."""
        plan = self.plan
        rest = pl.program_id(0)
        if self.ev.interpret:
            self.ev.nothing = lax.shift_right_logical(rest, jnp.int32(30))
        order = sorted(plan.grid, key=lambda a: (plan.choices.tile(a) or 1) > 1)
        starts: dict[Axis, Array] = {}
        sides: dict[Axis, int] = {}
        for axis in reversed(order):
            side = sides[axis] = plan.choices.tile(axis) or 1
            if axis.size is not None or _programs(plan, axis) > 1:
                count = self._tiles(axis, side)
                at = lax.rem(rest, count)
                if _grows(plan, axis):
                    # Programs with the longest loops go first.
                    at = count - jnp.int32(1) - at
                starts[axis] = at * jnp.int32(side)
                rest = lax.div(rest, count)
        scope = self.ev.push(starts, sides)
        for axis, side in sides.items():
            first = starts.get(axis, jnp.int32(0))
            last = jnp.minimum(first + jnp.int32(side - 1), self._extent(axis) - jnp.int32(1))
            scope.refs[f"{axis.name}.first"] = Tile(first, ())  # type: ignore
            scope.refs[f"{axis.name}.last"] = Tile(last, ())
        return scope

    def _extent(self, axis: Axis) -> Array:
        return jnp.asarray(self.ev.extent(axis), jnp.int32)

    def _tiles(self, axis: Axis, side: int) -> Array:
        """Number of tiles along an axis, the last of them perhaps not whole."""
        if axis.size is None:
            return jnp.int32(-(-axis.extent // side))
        return lax.div(self._extent(axis) + jnp.int32(side - 1), jnp.int32(side))

    def _loop(self, loop: Loop, outer: Scope) -> None:
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
        sides = [] if ev.interpret else ev.steady_sides(e for s in loop.steps for e in step_expressions(s))
        ev.pop()
        if not sides:
            return run(carry)
        tiles = [ev.side_tile(s) for s in sides]

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
        return Scope({loop.axis: jnp.int32(0)}, {loop.axis: side}, dict.fromkeys(_names(loop)))  # type: ignore[arg-type]

    def _hoist(self, loop: Loop) -> None:
        """Evaluate what is the same in all iterations of a loop."""
        self.ev.hoist((e for s in loop.steps for e in step_expressions(s)), self._probe(loop))

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
        first, _ = self._bounds(loop, side)
        first = jnp.minimum(first, self._tiles(loop.axis, side) - jnp.int32(1))
        above = ABOVE if _multiplies_in(loop, "bf16") else 0.0
        bits = {g.maximum: g.bits for g in loop.guesses}
        ev.push({loop.axis: first * jnp.int32(side)}, {loop.axis: min(side, SAMPLE)})
        made: dict[str, Tile] = {}
        for s in loop.steps:
            if isinstance(s, Accumulator) and s.name in bits:
                largest = ev.reduce_tile(s.kind, s.update, loop.axis, s.dtype, keep_nan=False)
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
                for a in x.axes:
                    within = self.ev.within(a)
                    good = good if within is None else good | ~self.ev.spread(within, x.axes)
                count = good.astype(jnp.int32)
                while count.ndim:
                    count = jnp.min(count, axis=count.ndim - 1)
                close = close & (count > 0)
        return close

    def _run(self, loop: Loop, carry: Carry) -> Carry:
        """The loop's iterations."""
        ev, side = self.ev, self.plan.choices.tile(loop.axis) or 1
        unmasked = bare(loop)

        def tile(n: Array, carry: Carry, interior: Array | bool = False, whole: bool = True) -> Carry:
            scope = ev.push({loop.axis: n * jnp.int32(side)}, {loop.axis: side})
            scope.refs.update(dict.fromkeys(_names(loop)))  # type: ignore[arg-type]
            scope.whole = frozenset((loop.axis,)) if whole else frozenset()
            scope.bare, scope.interior = unmasked, interior
            new = tuple(self._step(s, old, loop.axis, scope) for s, old in zip(loop.steps, carry, strict=True))
            ev.pop()
            return new

        first, last = self._bounds(loop, side)
        # Tiles below this one lie inside of the axis whole.
        ragged = lax.div(self._extent(loop.axis), jnp.int32(side))
        whole = jnp.minimum(last, ragged)
        if loop.interior is None:
            carry = lax.fori_loop(first, whole, tile, carry)
        else:
            start, stop = self._interior(loop, loop.interior, side, first, whole)
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
        return carry

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
        return jnp.clip(self.ev.eval(bound).array, 0, self._extent(loop.axis)).astype(jnp.int32)

    def _bounds(self, loop: Loop, side: int) -> tuple[Array, Array]:
        """First tile of the loop that can contribute, and one past the last."""
        first, last = jnp.int32(0), self._tiles(loop.axis, side)
        if loop.lower is not None:
            first = lax.div(self._clipped(loop.lower, loop), jnp.int32(side))
        if loop.upper is not None:
            last = lax.div(self._clipped(loop.upper, loop) + jnp.int32(side - 1), jnp.int32(side))
        return (first, last) if loop.parts is None else self._part(loop.parts, first, last)

    def _part(self, parts: Axis, first: Array, last: Array) -> tuple[Array, Array]:
        """This program's share of the tiles from `first` to `last`."""
        here = self.ev.start(parts)
        assert here is not None
        count = self._extent(parts)
        share = lax.div(jnp.maximum(last - first, 0) + count - jnp.int32(1), count)
        start = jnp.minimum(first + here * share, last)
        return start, jnp.minimum(start + share, last)

    def _step(self, step: Step, old: Array, axis: Axis, scope: Scope) -> Array:
        ev = self.ev
        scope.refs[f"{step.name}.old"] = self._tile(step, old)
        axes = ev.sorted_axes(step.axes)
        if isinstance(step, Accumulator):
            # The sums taken about a maximum turn NaN by themselves; the maximum need not.
            part = ev.reduce_tile(step.kind, step.update, axis, step.dtype, step.name not in self.references)
            part = ev.spread(part, axes).astype(old.dtype)
            before = old if step.correct is None else ev.spread(ev.eval(step.correct), axes)
            new = ev.combined(step.kind, before, part)
        else:
            value = ev.spread(ev.eval(step.value), axes)
            new = jnp.where(jnp.abs(value) < jnp.inf, value, old)
        scope.refs[step.name] = self._tile(step, new)
        return new

    def _initial(self, step: Step) -> Array:
        shape = tuple(self.ev.side(a) for a in self.ev.sorted_axes(step.axes))
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
