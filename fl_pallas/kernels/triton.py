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

from ..config import config
from ..errors import Unsupported, failing
from ..schedule.dtype import is_narrow_float
from ..schedule.expr import (
    Axis,
    Expr,
    Reduce,
    Ref,
    Size,
    children,
    free_axes,
    ref_names,
    walk,
)
from ..schedule.plan import (
    Accumulator,
    KernelPlan,
    Store,
    expressions,
    held_whole,
    is_by_thread,
    operand_names,
    stored_last,
)
from ..schedule.scan import RUNNING
from .blocks import Blocks
from .evaluate import Evaluator
from .loads import address
from .loops import Loops
from .pointwise import POINTWISE
from .tile import FIRST, JNP, Operand, Scope, Tile, seen, stored_type


@dataclass(frozen=True)
class TensorSpec:
    """How a tensor lies in its flat array: sizes and strides in elements, offset of its first element."""

    shape: tuple[int | Size, ...]
    strides: tuple[int | Size, ...]
    offset: int
    dtype: str

    @property
    def stored(self) -> object:
        """The jax type of the flat array."""
        return stored_type(self.dtype)

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
        with failing(plan.name, config.verify):
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
        self.plan = plan
        self.results = dict(zip((s.name for s in plan.stores), results, strict=True))
        order = (*(a for a in plan.grid if a not in plan.features), *(loop.axis for loop in plan.loops))
        self.ev = Evaluator(operands, order, plan.features, plan.compute, precision, interpret, sizes, blocks)
        self.ev.places = {loop.axis: FIRST for loop in plan.loops if is_by_thread(plan, loop)}
        self.loops = Loops(plan, self.ev, lambda s: self._store(s, self._value(s)))

    def run(self) -> None:
        outer, loops = self._enter_grid(), self.plan.loops
        stores = stored_last(loops, self.plan.stores)
        # What no loop has a part in leaves registers before they begin; all of it is loaded before any is stored, for
        # what is loaded for two reasons is loaded once then.
        first = [(s, self._value(s)) for s in stores if not ref_names(s.expr)]
        for s, value in first:
            self._store(s, value)
        for loop in loops:
            self.loops.run(loop, outer)
        for s in stores:
            if ref_names(s.expr):
                self._store(s, self._value(s))

    def _value(self, store: Store) -> Array:
        return self.ev.spread(self.ev.eval(store.expr), self.ev.sorted_axes(store.axes))

    def _store(self, store: Store, value: Array) -> None:
        result = self.results[store.name]
        offset, inside = address(self.ev, result, store.index, self.ev.sorted_axes(store.axes))
        if self.ev.interpret and inside is not None:
            # The interpreter writes back what it reads at masked-out places, which may be another element's;
            # past the end it writes nothing.
            offset = jnp.where(inside, offset, math.prod(map(seen, result.shape)))
        if is_narrow_float(result.dtype):
            value = lax.bitcast_convert_type(value.astype(JNP[result.dtype]), jnp.uint8)
        value = value.astype(stored_type(result.dtype))
        plgpu.store(result.ref.at[offset], value, mask=inside)  # type: ignore[attr-defined]

    def _enter_grid(self) -> Scope:
        """Bind the grid axes: the last grid axis runs fastest, except that tiles of one row follow each other."""
        plan = self.plan
        rest = pl.program_id(0)
        if self.ev.interpret:
            self.ev.nothing = lax.shift_right_logical(rest, jnp.int32(30))
        order = sorted(plan.grid, key=lambda a: (plan.choices.tile(a) or 1) > 1)
        starts: dict[Axis, Array] = {}
        whole = held_whole(plan)
        sides: dict[Axis, int] = {}
        for axis in reversed(order):
            side = sides[axis] = plan.choices.tile(axis) or 1
            if axis not in whole and (axis.size is not None or _programs(plan, axis) > 1):
                count = self.ev.tiles(axis, side)
                at = lax.rem(rest, count)
                if _grows(plan, axis):
                    # Programs with the longest loops go first.
                    at = count - jnp.int32(1) - at
                starts[axis] = at * jnp.int32(side)
                rest = lax.div(rest, count)
        scope = self.ev.push(starts, sides)
        for axis, side in sides.items():
            first = starts.get(axis, jnp.int32(0))
            last = jnp.minimum(first + jnp.int32(side - 1), self.ev.extent32(axis) - jnp.int32(1))
            scope.refs[f"{axis.name}.first"] = Tile(first, ())  # type: ignore
            scope.refs[f"{axis.name}.last"] = Tile(last, ())
        return scope
