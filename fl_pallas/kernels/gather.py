"""Elements of a tile picked by an index along one of its dimensions.

Triton's op for it, `tt.gather`, goes through shared memory. Pallas's Triton lowering has none: kernels write one down
as inline assembly that names it (`gather`), and Triton's op takes its place in the Triton IR (`with_gathers`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu
from jaxlib.mlir import ir

_MARK = "fl_pallas gather "


def gather(x: Array, at: Array, axis: int, interpret: bool) -> Array:
    """The elements of `x`, of two dimensions, at int32 indices `at` along `axis`; `at` is as wide along the other."""
    if interpret:
        return jnp.take_along_axis(x, at, axis)
    # Inline assembly wants operands of one shape: what comes of a reduction of `x` leads to it.
    shape = jnp.broadcast_to(jnp.max(x, axis=axis, keepdims=True), at.shape)
    result = jax.ShapeDtypeStruct(at.shape, x.dtype)
    name = f"{_MARK}{axis}"
    (out,) = plgpu.elementwise_inline_asm(name, args=[shape, at], constraints="", pack=1, result_shape_dtypes=[result])
    return out


def with_gathers(entry: list[Any]) -> None:
    """Put Triton's op in the place of every `gather` among the operations of a module."""
    for op in entry:
        if op.name != "tt.elementwise_inline_asm":
            continue
        text = ir.StringAttr(op.attributes["asm_string"]).value
        if not text.startswith(_MARK):
            continue
        led, at = op.operands
        (out,) = op.results
        dead = [op]
        while dead[-1].name != "tt.reduce":
            dead.append(led.owner)
            led = led.owner.operands[0]
        axis = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), int(text.removeprefix(_MARK)))
        # With a layout that Triton finds efficient, warps would exchange registers, and spill them.
        with ir.InsertionPoint(op):
            made = ir.Operation.create(
                "tt.gather", [out.type], [led, at], attributes={"axis": axis, "efficient_layout": ir.UnitAttr.get()}
            )
        out.replace_all_uses_with(made.results[0])
        for unused in dead:
            if not any(True for r in unused.results for _ in r.uses):
                unused.erase()
