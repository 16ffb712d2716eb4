"""A KernelPlan as Triton IR text, by JAX's public lowering; no GPU is needed or touched."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.backend import clear_backends
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from ..config import config
from ..errors import Unsupported, failing
from ..schedule.plan import KernelPlan, operand_names
from .blocks import Block, Blocks, has_descriptors, operations, with_blocks
from .native import with_native
from .triton import TensorSpec, contiguous, pallas_function

# The custom call that carries the Triton IR, in JAX 0.10 and 0.11.
TARGET = "__gpu$xla.gpu.triton"
# What JAX 0.11 wants to know a GPU by; the Triton IR depends on it only for float8 casts.
DEVICE = AbstractDevice("NVIDIA H200", None, "gpu")
# What the array of sizes is called among the operands.
SIZES = "sizes"
# What Triton makes use of: the widest load is 16 bytes.
ALIGNMENT = 16
_DIVISIBILITY = re.compile(r"(%arg(\d+): !tt\.ptr<[^>]*>(?: \{[^}]*?tt\.divisibility = ))\d+( : i32)")

_lock = threading.RLock()


@dataclass(frozen=True)
class Lowered:
    """A kernel as Triton IR.

    Attributes:
      ttir: the module, as MLIR text. Its entry takes one pointer per operand, then one per output.
      name: of the entry.
      programs: number of programs, along x.
      warps: of a program.
      stages: depth of the software pipeline.
      operands: names of the tensors read, in order.
      outputs: names of the tensors written, in order.
      registers: the most that a thread may have; 0 for as many as there are.
      blocks: of which its entry takes descriptors, after the pointers.
      newest: whether the newest ptxas assembles it that there is, for Triton's own gets it wrong.
    """

    ttir: str
    name: str
    programs: int
    warps: int
    stages: int
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    registers: int = 0
    blocks: tuple[Block, ...] = ()
    newest: bool = False

    @property
    def arguments(self) -> tuple[int, int]:
        """How many pointers its entry takes, and how many descriptors after them."""
        return len(self.operands) + len(self.outputs), len(self.blocks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Lowered:
        blocks = tuple(
            Block(b["operand"], tuple(map(tuple, b["dims"])), tuple(b["box"]), b["dtype"]) for b in kept["blocks"]
        )
        operands, outputs = tuple(kept["operands"]), tuple(kept["outputs"])
        return cls(**{**kept, "operands": operands, "outputs": outputs, "blocks": blocks})

    def aligned(self, alignments: Sequence[int]) -> Lowered:
        """The same kernel for pointers that are multiples of `alignments` bytes, one per pointer."""

        def put(m: re.Match[str]) -> str:
            return f"{m[1]}{alignments[int(m[2])]}{m[3]}"

        text, count = _DIVISIBILITY.subn(put, self.ttir)
        if count != len(self.operands) + len(self.outputs):
            # Without the attribute nothing is assumed of a pointer; that is slow, but right.
            text = re.sub(r"tt\.divisibility = \d+ : i32", "tt.divisibility = 1 : i32", self.ttir)
        return replace(self, ttir=text)


def lower(
    plan: KernelPlan,
    specs: Sequence[TensorSpec],
    precision: object,
    outputs: Sequence[TensorSpec] | None = None,
    sizes: int = 0,
    engine: Set[int] = frozenset(),
) -> Lowered:
    """Lower a plan to Triton IR.

    Args:
      plan: what to compute.
      specs: the operands, in the order of `operand_names(plan)`.
      precision: jax precision (or DotAlgorithmPreset) of float32 matrix products.
      outputs, sizes: as for `pallas_function`.
      engine: positions of the operands that a copy engine can reach; it brings tiles of them where the plan's choices
        want that.

    Returns: Triton IR that takes pointers to 16-byte aligned memory (see `Lowered.aligned`).

    Raises: Unsupported.
    """
    names = operand_names(plan)
    blocks = Blocks({names[n]: n for n in engine} if plan.choices.blocks and has_descriptors() else {})
    function = pallas_function(plan, specs, precision, False, outputs, sizes, blocks=blocks)
    given = [jax.ShapeDtypeStruct((sizes,), jnp.int32)] if sizes else []
    shapes = [*given, *(jax.ShapeDtypeStruct((max(1, s.span),), s.stored) for s in specs)]
    mesh = AbstractMesh((), (), abstract_device=DEVICE)
    with failing(plan.name, config.verify), off_the_gpu(), jax.enable_x64(True), use_abstract_mesh(mesh):
        try:
            stablehlo = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        except NotImplementedError as e:
            raise Unsupported(plan.name, f"Pallas cannot lower it to Triton: {e}") from e
        call = _config(stablehlo)
        text = _text(call["ir"].value_bytes, blocks.made)
    made = Lowered(
        text,
        call["name"].value,
        call["grid_x"].value,
        call["num_warps"].value,
        call["num_stages"].value,
        (*(SIZES for _ in given), *names),
        tuple(s.name for s in plan.stores),
        blocks=tuple(blocks.made),
    )
    return made.aligned([ALIGNMENT] * (len(shapes) + len(plan.stores)))


def lower_contiguous(plan: KernelPlan, tensors: Sequence[tuple[tuple[int, ...], str]], precision: object) -> Lowered:
    """`lower` for operands of these shapes and types, each freshly allocated."""
    specs = [contiguous(shape, dtype) for shape, dtype in tensors]
    return lower(plan, specs, precision, engine=frozenset(range(len(specs))))


@contextlib.contextmanager
def off_the_gpu() -> Iterator[None]:
    """Keep JAX from starting its GPU backend, and with it a context on every GPU, just to lower a kernel.

    JAX starts all of its backends whenever it lowers. If none runs yet and nobody chose any
    (JAX_PLATFORMS), it gets the CPU alone here, and forgets that afterwards.
    """
    with _lock:
        chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
        if chosen or _is_running():
            yield
            return
        jax.config.update("jax_platforms", "cpu")
        try:
            yield
        finally:
            clear_backends()
            jax.config.update("jax_platforms", chosen)


def _is_running() -> bool:
    """Whether JAX's backends have started. This setting may only change before they do."""
    count: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", 1 if count != 1 else 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def _config(module: Any) -> Any:
    """The backend config of the one Triton call of a StableHLO module."""
    calls = [op for op in operations(module.operation) if op.name == "stablehlo.custom_call"]
    found = [op for op in calls if op.attributes["call_target_name"].value == TARGET]
    if len(found) != 1 or len(calls) != 1:
        targets = ", ".join(op.attributes["call_target_name"].value for op in calls)
        raise Unsupported("lowering", f"JAX {jax.__version__} emitted calls to [{targets}] instead of one to {TARGET}")
    return found[0].attributes["mhlo.backend_config"]


def _text(bytecode: bytes, blocks: Sequence[Block]) -> str:
    context = ir.Context()
    dialect.register_dialect(context)
    module = ir.Module.parse(bytecode, context)
    with context, ir.Location.unknown():
        with_native(operations(module.operation))
    return with_blocks(module, blocks)
