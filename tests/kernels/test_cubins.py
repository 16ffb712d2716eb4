"""Every kernel of the corpus becomes machine code, and keeps its registers to itself. No GPU is needed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.bridge.dlpack import matmul_precision
from fl_pallas.errors import Unsupported
from fl_pallas.kernels import cubin, loops
from fl_pallas.kernels.blocks import ENGINE
from fl_pallas.kernels.cubin import SOUND, Cubin, compile_ttir, is_serial, simplified
from fl_pallas.kernels.fit import SPILL, fitting
from fl_pallas.kernels.lower import Lowered, lower_contiguous
from fl_pallas.kernels.machine_code import is_miscompiled
from fl_pallas.schedule import pipeline
from fl_pallas.schedule.passes import skip_tiles
from fl_pallas.schedule.plan import KernelPlan, operand_names
from fl_pallas.schedule.target import target_of
from tests.programs import BY_NAME, FUSED, Case
from tests.unrun import unrun

SEQ = 257


@pytest.fixture(autouse=True, scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own, so that compilation is really tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@functools.cache
def kernels_of(name: str, dtype: torch.dtype) -> tuple[tuple[KernelPlan, Callable[[KernelPlan], Lowered]], ...]:
    """The kernels of a case, as the CPU's scheduler makes them, and how each becomes Triton IR."""
    case = BY_NAME[name]
    return kernels_made(case.target(dtype, "cpu"), case.make_inputs(SEQ, dtype, "cpu"))


def kernels_made(
    fn: Callable, inputs: Sequence[Tensor]
) -> tuple[tuple[KernelPlan, Callable[[KernelPlan], Lowered]], ...]:
    """The kernels of a function, and how each becomes Triton IR."""
    with unrun():
        explanation = fl.explain(fn, *inputs)
    found = []
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for graph in explanation.graphs:
        if graph.schedule is None:
            continue
        tensors |= {v.name: (v.shape, v.dtype) for v in graph.schedule.program.values}
        for plan in graph.kernels:
            tensors |= {s.name: (s.shape, s.dtype) for s in plan.stores}
            operands = [tensors[n] for n in operand_names(plan)]
            found.append((plan, functools.cache(functools.partial(_lower, operands))))
    return tuple(found)


def _lower(operands: list[tuple[tuple[int, ...], str]], plan: KernelPlan) -> Lowered:
    return lower_contiguous(plan, operands, matmul_precision(False))


def lowered(name: str, dtype: torch.dtype) -> Lowered:
    """The one kernel of a case under the scheduler's pick."""
    ((plan, lower),) = kernels_of(name, dtype)
    return lower(plan)


def dtype_of(case: Case) -> torch.dtype:
    """Mostly bfloat16; float32 for a quarter of the cases, always the same ones."""
    return torch.float32 if zlib.crc32(case.name.encode()) % 4 == 0 else torch.bfloat16


def by_addresses(plan: KernelPlan) -> KernelPlan:
    """A plan for GPUs without a copy engine."""
    every = [replace(c, blocks=False) for c in (plan.choices, *plan.others)]
    return replace(plan, choices=every[0], others=tuple(every[1:]))


def compiled(plan: KernelPlan, lower: Callable[[KernelPlan], Lowered], capability: int) -> Cubin:
    """The scheduler's pick; where that does not fit, the choice that is taken in its place."""
    with contextlib.suppress(Unsupported):
        cubin = compile_ttir(simplified(lower(plan), capability), capability)
        if cubin.stack <= SPILL and cubin.shared <= target_of(capability).shared_bytes:
            return cubin
    (made,) = fitting(plan, lower, capability)
    return made.cubin


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in FUSED])
def test_compiles(case: Case) -> None:
    dtype = dtype_of(case)
    kernels = kernels_of(case.name, dtype)
    assert kernels or case.kernels is None
    for (plan, lower), capability in itertools.product(kernels, (80, 90)):
        cubin = compiled(plan if capability >= ENGINE else by_addresses(plan), lower, capability)
        what = f"{case.name} {plan.name} on sm_{capability}"
        assert cubin.binary.startswith(b"\x7fELF"), what
        spilled = cubin.stack  # by itself, or pytest prints the whole cubin
        assert spilled <= SPILL, f"{what}: {cubin.registers} registers, {spilled} bytes spilled"


@pytest.mark.parametrize("name", ["document_causal", "masked_rows", "global_and_local"])
def test_compiles_with_bounds_from_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_tiles, "MIN_EXTENT", SEQ)
    kernels = kernels_of.__wrapped__(name, torch.bfloat16)
    assert len(kernels) == 2
    for plan, lower in kernels:
        (made,) = fitting(plan, lower, 90)
        assert made.choices == plan.choices and made.cubin.stack == 0


@pytest.mark.parametrize(
    "capability, blocks, product, copy",
    [
        (80, False, "mma.sync", "cp.async.cg"),
        (90, False, "wgmma.mma_async", "cp.async.cg"),
        (90, True, "wgmma.mma_async", "cp.async.bulk.tensor"),
    ],
)
def test_uses_the_matrix_units(capability: int, blocks: bool, product: str, copy: str) -> None:
    ((plan, lower),) = kernels_of("vanilla", torch.bfloat16)
    cubin = compile_ttir(lower(plan if blocks else by_addresses(plan)), capability)
    assert product in cubin.asm["ptx"]
    assert copy in cubin.asm["ptx"], "no asynchronous copies of 16 bytes or more"


def test_products_accumulate_in_place() -> None:
    """Otherwise a product needs registers of its own beside the accumulator it is added to."""
    ((plan, lower),) = kernels_of("vanilla", torch.bfloat16)
    rows, features = (plan.choices.tile(plan.grid[n]) for n in (-2, -1))

    def added(kernel: Lowered) -> int:
        """Additions to the tile of outputs."""
        lines = compile_ttir(kernel, 90).asm["ttgir"].splitlines()
        return sum("arith.addf" in line and f"tensor<{rows}x{features}xf32" in line for line in lines)

    assert added(lower(plan)) > 0
    assert added(simplified(lower(plan), 90)) == 0


def in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed operands stay in registers, and what ptxas does to these (test_steady.py) is not looked at."""
    monkeypatch.setattr(loops, "steady_sides", lambda *_: [])
    monkeypatch.setattr(cubin, "loses_operand", lambda *_: False)


@pytest.mark.long
def test_products_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loops with products, of latent attention's gradient with its row sums: in place, they would wait for each
    other; with computed operands in registers, at least.
    """
    in_registers(monkeypatch)
    monkeypatch.setattr(pipeline, "exchange", lambda groups, *_: ((), groups))
    case = BY_NAME["latent"]
    inputs = [x.requires_grad_() for x in case.make_inputs(512, torch.bfloat16, "cpu")]
    kernels = kernels_made(case.target(torch.bfloat16, "cpu"), inputs)
    ((plan, lower),) = [made for made in kernels if len(made[0].loops) > 1]
    waits = (plan.with_choices(c) for c in reversed(plan.others))
    waiting = next(p for p in waits if is_serial(compile_ttir(simplified(lower(p), 90), 90)))
    (made,) = fitting(replace(waiting, others=()), lower, 90)
    assert not is_serial(made.cubin)


@pytest.mark.parametrize("name", ["rope_interleaved", "turned_values"])
def test_pairs_are_a_row_of_features(name: str) -> None:
    """Gradients of keys, [.., d / 2, 2] as they were turned, and of values, [.., d], of one kernel: Triton compiles no
    wide tiles of three dimensions that it would have to reshape for a product.
    """
    case = BY_NAME[name]
    inputs = [x.requires_grad_() for x in case.make_inputs(SEQ, torch.bfloat16, "cpu")]
    kernels = kernels_made(case.target(torch.bfloat16, "cpu"), inputs)
    assert len(kernels) == 3
    for plan, lower in kernels:
        assert len(plan.features) == 1
        (made,) = fitting(plan, lower, 90)
        assert made.choices == plan.choices and made.cubin.stack == 0


def points(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values that are points: four for each head, of three coordinates, which change places."""
    return torch.einsum("hij,jhpc->ihcp", torch.softmax(q @ k.mT, dim=-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_features_in_two_dimensions(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    """Triton would have the tile of values in shared memory by three dimensions: "Illegal shared layout"."""
    q, k, v = torch.randn(4, SEQ, 16), torch.randn(4, SEQ, 16), torch.randn(SEQ, 4, 4, 3)
    ((plan, lower),) = kernels_made(points, [t.to(dtype) for t in (q, k, v)])
    for own, capability in ((by_addresses(plan), 80), (plan, 90)):
        (made,) = fitting(own, lower, capability)
        assert made.choices == own.choices and made.cubin.stack == 0
    assert not capfd.readouterr().err


# What ptxas of CUDA 12.8 made of the descriptors of a second product, and what of those of the first.
WRONG = """
        /*18930*/                   UMOV UR10, UR8 ;
        /*18940*/                   UMOV UR11, 0xc0000010 ;
        /*18970*/                   UIADD3 UR4, UP0, UR5, 0x20, URZ ;
        /*18980*/                   UIADD3.X UR5, UR5, -0x3ffffff0, URZ, UP0, !UPT ;
"""
# The same in registers of a thread: of an unused one, even.
WRONG_IN_THREADS = """
        /*0560*/                   IADD3 R0, P2, R1.reuse, 0x2, RZ ;
        /*05a0*/                   IADD3 R3, P3, R0, 0x2, RZ ;
        /*05c0*/                   IADD3.X R2, R1, 0x40000040, RZ, P2, !PT ;
"""
RIGHT = """
        /*17d60*/                   UMOV UR4, URZ ;
        /*17e80*/                   UIADD3 UR10, UP0, UR8, 0x2, URZ ;
        /*17e90*/                   UIADD3.X UR11, UR4, -0x7fffffe0, URZ, UP0, !UPT ;
        /*15820*/                   UIADD3 UR8, UP0, UR4, 0x20, URZ ;
        /*15828*/                   UMOV UR4, URZ ;
        /*15830*/                   UIADD3.X UR9, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0560*/                    IADD3 R0, P2, R3, 0x2, RZ ;
        /*0570*/                    CS2R R2, SRZ ;
        /*05c0*/                    IADD3.X R2, R3, 0x40000040, RZ, P2, !PT ;
        /*0600*/                    IADD3.X R7, R5, -0x1, RZ, P2, !PT ;
"""
# The pointer that was in the registers before, in the place of an address in shared memory.
WRONG_BY_POINTER = """
        /*18d0*/                   LEA.HI.X R19, R12, UR23, RZ, 0x2, P4 ;
        /*1960*/                   UIADD3 UR22, UP1, UR22, 0x20, URZ ;
        /*19d0*/                   UIADD3.X UR23, UR23, -0x3ffffff0, URZ, UP1, !UPT ;
"""


def test_wrong_addresses_are_found() -> None:
    for wrong in (WRONG, RIGHT + WRONG, WRONG_IN_THREADS, WRONG_BY_POINTER):
        assert is_miscompiled(wrong)
    assert not is_miscompiled(RIGHT)


def test_sums_that_lost_their_constant_are_found() -> None:
    """ptxas makes the second of `add.s16x2 r, {1, 0}` where the upper half is not used."""
    assert not is_miscompiled("/*0320*/ VIADD.16x2 R18, R14, 0x10001 ;")
    assert is_miscompiled("/*0320*/ VIADD.16x2 R18, R14.reuse, 0x0 ;")


@pytest.mark.long
def test_narrow_numbers_are_not_divided_as_pairs() -> None:
    """A relative shift divides numbers under 2 ** 16, and LLVM would do so in 16 bits."""
    case = BY_NAME["transformer_xl"]
    inputs = [x.requires_grad_() for x in case.make_inputs(33, torch.float32, "cpu")]
    kernels = kernels_made(case.fn, inputs)
    assert len(kernels) > 1
    for plan, lower in kernels:
        assert "add.s16x2" not in compiled(plan, lower, 90).asm["ptx"], plan.name


@pytest.mark.parametrize("is_there", [False, True])
def test_what_has_wrong_addresses_is_not_taken(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the first choice were spoilt: where there is a ptxas that knows better, that assembles it."""
    looks = iter([True])
    monkeypatch.setattr(cubin, "is_miscompiled", lambda _: next(looks, False))
    monkeypatch.setattr("fl_pallas.kernels.fit.newest_ptx", lambda: SOUND if is_there else (0, 0))
    ((plan, lower),) = kernels_of("vanilla", torch.bfloat16)
    (made,) = fitting(plan, lower, 90)
    assert made.choices == (plan.choices if is_there else plan.others[0]) != plan.others[-1]
    assert made.lowered.newest == is_there
    assert ("\n.version 8.8" in made.cubin.asm["ptx"]) == is_there


def test_alignment_reaches_the_loads() -> None:
    kernel = lowered("vanilla", torch.bfloat16)
    odd = kernel.aligned([2, 2, 2, 16])
    assert odd.ttir != kernel.ttir
    assert "cp.async.cg" not in compile_ttir(odd, 90).asm["ptx"]


def test_refuses_what_does_not_compile() -> None:
    kernel = lowered("vanilla", torch.bfloat16)
    broken = Lowered("module {", "broken", 1, 4, 2, (), ())
    with pytest.raises(fl.Unsupported, match="sm_90"):
        compile_ttir(broken, 90)
    assert os.environ["TRITON_CACHE_DIR"]
    assert kernel.programs > 0


@pytest.mark.parametrize("registers, cap", [(136, 128), (128, 0), (160, 0)])
def test_makes_room_for_another_program(registers: int, cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 threads of 136 registers leave no room for a second program; with 128 there is."""
    (plan, lower), *_ = kernels_of("vanilla", torch.bfloat16)
    made = lower(plan.with_choices(replace(plan.choices, warps=8)))
    asked = []

    def compiled(lowered: Lowered, capability: int) -> Cubin:
        asked.append(lowered.registers)
        return Cubin(b"", capability, lowered.registers or registers, 0, 4096, {"ttgir": "", "ptx": ""})

    for name in ("compiled", "compile_ttir"):
        monkeypatch.setattr(f"fl_pallas.kernels.fit.{name}", compiled)
    (found,) = fitting(plan, lambda _: made, 90)
    assert (found.lowered.registers, found.cubin.registers) == (cap, cap or registers)
    assert asked[-1] == cap


@pytest.mark.parametrize("stack, forms", [(0, (0, 128)), (64, (0, 128)), (72, (0,))])
def test_tuning_tells_whether_fewer_registers_pay(stack: int, forms: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of 256 threads want 128 of 168 registers, which may spill a little; three would want 80."""
    (plan, lower), *_ = kernels_of("vanilla", torch.bfloat16)
    made = lower(plan.with_choices(replace(plan.choices, warps=8)))

    def compiled(lowered: Lowered, capability: int) -> Cubin:
        return Cubin(
            b"", capability, lowered.registers or 168, stack if lowered.registers else 0, 4096, {"ttgir": "", "ptx": ""}
        )

    for name in ("compiled", "compile_ttir"):
        monkeypatch.setattr(f"fl_pallas.kernels.fit.{name}", compiled)
    (unseen,) = fitting(plan, lambda _: made, 90)
    assert unseen.lowered.registers == 0
    found = fitting(plan, lambda _: made, 90, count=2)
    assert {f.lowered.registers for f in found} == set(forms)


def capped_cross_entropy(x: Tensor, classes: Tensor, label: Tensor) -> Tensor:
    """The score of a row's label is a number, whose tanh is no tile's."""
    return F.cross_entropy((30 * torch.tanh(x @ classes.T / 30)).float(), label, label_smoothing=0.1)


def test_tanh_of_a_number() -> None:
    x, classes = (torch.randn(n, 64, dtype=torch.bfloat16) for n in (512, 4096))
    kernels = kernels_made(capped_cross_entropy, (x, classes, torch.randint(1024, (512,))))
    assert len(kernels) > 1
    for plan, lower in kernels:
        assert compile_ttir(lower(plan), 90).binary
