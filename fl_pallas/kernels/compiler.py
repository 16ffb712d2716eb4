"""Triton's compiler, with what is done otherwise here at the end of its stages."""

from __future__ import annotations

import re
from typing import Any, cast

from .chosen import CHOSEN

# What Triton does otherwise here: kernels are told apart by it, in Triton's cache too.
VERSION = "fl_pallas 2: gathers lie as products do, LLVM assumes nothing of vectors of integers"
# What an operation on vectors of integers lets LLVM assume of each element.
_ASSUMED = re.compile(r"(= \w+)(?: (?:nuw|nsw|exact|disjoint|nneg|samesign))+(?= .*<\d+ x i\d+>)")


def settings() -> str:
    """What of the user's environment Triton's code depends on."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return str((sorted(get_cache_invalidating_env_vars().items()), CHOSEN["TRITON_PTXAS_PATH"]))


def compiled(path: str, capability: int, options: dict[str, Any]) -> Any:
    """Triton's CompiledKernel of the Triton IR in a file.

    Raises: whatever Triton, LLVM, MLIR and ptxas do.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    with knobs.runtime.scope():
        # Triton's own type for it has neither the backend that it is given nor the key that it is asked for.
        knobs.runtime.add_stages_inspection_hook = cast(Any, _changed)
        return triton.compile(path, target=GPUTarget("cuda", capability, 32), options=options)


def _changed(backend: Any = None, stages: dict[str, Any] | None = None, *of: Any) -> tuple[str, str] | None:
    """Have gathers lie as products do, and LLVM assume nothing of vectors of integers, each at the end of a stage. Of
    no stages (Triton 3.7 and later ask first), what is added to the key of the cache, and its hash."""
    if stages is None:
        return VERSION, VERSION
    laid_out, optimised = stages["ttgir"], stages["llir"]
    stages["ttgir"] = lambda module, metadata: relaid(laid_out(module, metadata))
    stages["llir"] = lambda module, metadata: unassumed(optimised(module, metadata))
    return None


def relaid(module: Any) -> Any:
    """A module of Triton's GPU dialect in which threads gather (`skew.py`) of what they hold of a product, and for what
    they hold of the next one.

    Triton has a gather's operands lie in the order of its one row: it would take the product to shared memory and back
    twice besides, once to that order and once from it. The relative positions of a Conformer took 1.3 to 2 times as
    long (8 × 4 × 1024², an H100).
    """
    from triton._C.libtriton import ir, passes

    gathers = list[Any]()
    module.walk(lambda op: gathers.append(op) if op.get_name() == "tt.gather" else None)
    if not gathers:
        return module
    products, makers, readers = dict[str, Any](), dict[int, Any](), dict[int, list[Any]]()

    def note(op: Any) -> None:
        for n in range(op.get_num_operands()):
            readers.setdefault(op.get_operand(n).id(), []).append(op)
        for n in range(op.get_num_results()):
            makers[op.get_result(n).id()] = op
        if op.get_name() in ("ttng.warp_group_dot", "tt.dot"):
            products.setdefault(_shape(op.get_result(0)), op.get_result(0))

    def reader(value: Any, name: str) -> Any:
        """What the one operation that reads a value makes of it, if that is its name."""
        of = readers.get(value.id(), [])
        return of[0].get_result(0) if len(of) == 1 and of[0].get_name() == name else None

    module.walk(note)
    for op in gathers:
        row = op.get_operand(0)
        maker = makers.get(row.id())
        if maker is not None and maker.get_name() == "ttg.convert_layout":
            row = maker.get_operand(0)
        out = reader(op.get_result(0), "tt.reshape")
        stored = out and reader(out, "ttg.local_alloc")
        wanted = out and (reader(out, "ttg.convert_layout") or stored and reader(stored, "ttg.local_load"))
        like = wanted or out and products.get(_shape(out))
        if like:
            _gather_as(module, op, row, like, wanted or out)
    manager = ir.pass_manager(module.context)
    # Indices are computed as they are wanted, and so is what is computed of elements.
    passes.ttgpuir.add_remove_layout_conversions(manager)
    passes.ttgpuir.add_reduce_data_duplication(manager)
    passes.common.add_cse(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(module, "relaid")
    return module


def _gather_as(module: Any, op: Any, row: Any, like: Any, out: Any) -> None:
    """Gather from `row` in the layout of a tensor `like` the outcome, which takes the place of `out`."""
    from triton._C.libtriton import gluon_ir
    from triton.experimental.gluon.language import DistributedLinearLayout

    build = gluon_ir.GluonOpBuilder(module.context)
    rows, columns = map(int, _shape(out).split("x"))
    layout = build.to_linear_layout(build.get_gluon_layout_from_tensor(like)._to_ir(build), [rows, columns])
    registers, lanes, warps, blocks = (
        [[0, i * columns + j] for i, j in bases]
        for bases in (layout.reg_bases, layout.lane_bases, layout.warp_bases, layout.block_bases)
    )
    flat = [1, rows * columns]
    of_row = DistributedLinearLayout(registers, lanes, warps, blocks, flat)._to_ir(build)
    build.set_insertion_point_after(op)
    at = build.create_convert_layout(build.get_distributed_ty(build.get_int32_ty(), flat, of_row), op.get_operand(1))
    found = build.create_gather(row, at, 1)
    found.set_attr("efficient_layout", build.get_unit_attr())
    of_tile = build.create_reshape(found, [rows, columns], False)
    out.replace_all_uses_with(build.create_convert_layout(out.get_type(), of_tile))


def _shape(tensor: Any) -> str:
    """Extents of a value, as Triton writes them."""
    found = re.match(r"tensor<([0-9x]+)x[a-z]", str(tensor.get_type()))
    return found[1] if found else ""


def unassumed(llir: str) -> str:
    """LLVM IR whose vectors of integers are no longer said not to overflow.

    LLVM (of Triton 3.6) puts two numbers that are shifted into one vector, and says of both that they do not overflow
    where only one is read. Its NVPTX backend makes one number of 64 bits of them, and lets the one that does overflow,
    and is not read, run over into the other: a row's number, and with it a mask, was another one in half of the rows.
    """
    return _ASSUMED.sub(r"\1", llir)


def address(kernel: Any) -> dict[str, Any]:
    """Where Triton's cache keeps a CompiledKernel: its hash, and its files by name."""
    return {"hash": kernel.hash, "files": {**kernel.metadata_group}}
