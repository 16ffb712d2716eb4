"""Operations of Triton's that Pallas's Triton lowering lacks.

Kernels write one down as inline assembly that names it, and in the Triton IR Triton's own takes its place
(`with_native`); where nobody puts it there (the DLPack road), kernels do without.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxlib.mlir import ir

_GATHER, _EXTREME, _DIRECT = "fl_pallas gather", "fl_pallas extreme ", "fl_pallas direct"
_BACKWARDS = "fl_pallas backwards"
_EXTREMES = {"max": "arith.maximumf", "min": "arith.minimumf"}


def gather(row: Array, at: Array) -> Array:
    """The elements of `row`, [1, n], at the int32 indices `at`, [1, m]: Triton's `tt.gather`."""
    # Inline assembly wants operands of one shape: what comes of a reduction of `row` leads to it.
    led = jnp.broadcast_to(jnp.max(row, axis=1, keepdims=True), at.shape)
    return _named(_GATHER, row.dtype, led, at)


def extreme(kind: str, a: Array, b: Array) -> Array:
    """The larger ("max") or smaller ("min") of two float32 tiles, NaN where one of them is: one instruction on NVIDIA
    GPUs from sm_80 on."""
    return _named(f"{_EXTREME}{kind}", a.dtype, a, b)


def direct(loaded: Array) -> Array:
    """What was loaded, by threads for themselves: each brings the elements that it computes with.

    Triton would bring them in another order, through shared memory, ahead of their use where they have 32 bits (a bias
    by distance: four bytes at a time; 0.4 ms for 0.24 on an H200).
    """
    return _named(_DIRECT, loaded.dtype, loaded)


def read_once(x: Array) -> Array:
    """`x`, a row of float32 that a loop ends with, for whatever reads it: Triton 3.6 ends the compilation by an
    assertion where two operations read a sum that it would finish behind the loop."""
    return _copied(x)


def opaque(x: Array, interpret: bool) -> Array:
    """`x` of float32; Triton moves nothing that is made of it to before it."""
    return x if interpret else _copied(x)


def _copied(x: Array) -> Array:
    return _assembly("mov.b32 $0, $1;", x.dtype, x, constraints="=r,r")


def never() -> Array:
    """0, of which compilers have to believe that it may be 2 ** 20.

    ptxas (12.8 to 13.0) loses the constant of some sums of 16-bit pairs, which LLVM makes where it divides narrow
    numbers (`is_miscompiled` in machine_code.py knows such code).
    """
    return lax.shift_left(lax.shift_right_logical(pl.program_id(0), jnp.int32(30)), jnp.int32(20))


def uncertain(x: Array) -> Array:
    """`x` of float32, none of whose elements compilers know.

    Where an operand of two matrix products has numbers that are the same whatever the kernel reads (a mask's, in a
    tile whose place is known), ptxas (12.8, 12.9) writes them to the operand's registers ahead of the second product
    alone.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) ^ never()
    return lax.bitcast_convert_type(bits, x.dtype)


def quotient(a: Array, b: Array) -> Array:
    """a / b of float32 tiles, rounded to the nearest, as PyTorch's; Triton's division may be off by two bits."""
    return _assembly("div.rn.f32 $0, $1, $2;", a.dtype, a, b, constraints="=f,f,f")


def summed_from_the_end(x: Array, axis: int) -> Array:
    """Running sums along `axis`, from its end on."""
    return _named(_BACKWARDS, x.dtype, jnp.cumsum(x, axis=axis))


def _named(name: str, dtype: Any, *args: Array) -> Array:
    return _assembly(name, dtype, *args, constraints="")


def _assembly(text: str, dtype: Any, *args: Array, constraints: str) -> Array:
    result = jax.ShapeDtypeStruct(args[-1].shape, dtype)
    (out,) = plgpu.elementwise_inline_asm(
        text, args=args, constraints=constraints, pack=1, result_shape_dtypes=[result]
    )
    return out


def with_native(entry: list[Any]) -> None:
    """Put Triton's op in the place of every one that is named so among the operations of a module."""
    for op in entry:
        if op.name != "tt.elementwise_inline_asm":
            continue
        text = ir.StringAttr(op.attributes["asm_string"]).value
        if text.startswith(_EXTREME):
            with ir.InsertionPoint(op):
                made = ir.Operation.create(_EXTREMES[text.removeprefix(_EXTREME)], [op.results[0].type], [*op.operands])
            op.results[0].replace_all_uses_with(made.results[0])
            op.erase()
        elif text == _GATHER:
            _gathered(op)
        elif text == _BACKWARDS:
            scan = op.operands[0].owner
            scan.attributes["reverse"] = ir.BoolAttr.get(True)
            op.results[0].replace_all_uses_with(scan.results[0])
            op.erase()
        elif text == _DIRECT:
            op.results[0].replace_all_uses_with(_directly(op.operands[0].owner))
            op.erase()


def _gathered(op: Any) -> None:
    led, at = op.operands
    (out,) = op.results
    dead = [op]
    while dead[-1].name != "tt.reduce":
        dead.append(led.owner)
        led = led.owner.operands[0]
    along = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
    # With a layout that Triton finds efficient, warps would exchange registers, and spill them.
    with ir.InsertionPoint(op):
        made = ir.Operation.create(
            "tt.gather", [out.type], [led, at], attributes={"axis": along, "efficient_layout": ir.UnitAttr.get()}
        )
    out.replace_all_uses_with(made.results[0])
    for unused in dead:
        if not any(True for r in unused.results for _ in r.uses):
            unused.erase()


def _directly(load: Any) -> Any:
    """The value of a `tt.load` as inline assembly gives it, which Triton computes where its result is wanted.

    Where the mask is false, the first element of the memory is read in place of another.
    """
    pointer, *masked = load.operands
    mask, other = masked or (None, None)
    (out,) = load.results
    bits = out.type.element_type.width
    whole = ir.RankedTensorType.get(out.type.shape, ir.IntegerType.get_signless(bits))
    with ir.InsertionPoint(load):
        if mask is not None:
            base, offset = pointer.owner.operands
            first = _op("arith.constant", offset.type, value=ir.DenseElementsAttr.get_splat(offset.type, _zero(offset)))
            offset = _op("arith.select", offset.type, mask, offset, first)
            pointer = _op("tt.addptr", pointer.type, base, offset)
        loaded = _op(
            "tt.elementwise_inline_asm",
            whole,
            pointer,
            asm_string=ir.StringAttr.get(f"ld.global.nc.b{bits} $0, [$1];"),
            constraints=ir.StringAttr.get(f"={'h' if bits == 16 else 'r'},l"),
            pure=ir.BoolAttr.get(True),
            packed_element=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
        )
        if whole != out.type:
            loaded = _op("tt.bitcast", out.type, loaded)
        return loaded if mask is None else _op("arith.select", out.type, mask, loaded, other)


def _zero(x: Any) -> Any:
    return ir.IntegerAttr.get(x.type.element_type, 0)


def _op(name: str, result: Any, *operands: Any, **attributes: Any) -> Any:
    return ir.Operation.create(name, [result], [*operands], attributes=attributes).results[0]
