"""Operations that only Triton has: sheared products, of which each element takes its place, and maxima with NaN."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.bridge.dlpack import matmul_precision
from fl_pallas.kernels import products, reductions
from fl_pallas.kernels.cubin import compile_ttir, simplified
from fl_pallas.kernels.tile import Context
from fl_pallas.kernels.triton import contiguous, pallas_function
from fl_pallas.schedule.plan import operand_names
from tests.kernels.test_cubins import kernels_made, kernels_of
from tests.oracle import check_gradients, run_and_check
from tests.programs import BY_NAME
from tests.unrun import unrun


def by_queries(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """r [2s, d]: a vector for each distance."""
    s = torch.arange(q.shape[-2])
    distances = s - s[:, None] + q.shape[-2]
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, r[distances])
    return torch.softmax(scores / 4, -1) @ v


def by_keys(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    s = torch.arange(q.shape[-2])
    distances = s[:, None] - s + q.shape[-2]
    scores = q @ k.mT + torch.einsum("bhjd,ijd->bhij", k, r[distances])
    return torch.softmax(scores / 4, -1) @ v


def by_sums(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Positions i + j, that only a causal mask keeps inside of the table."""
    s = torch.arange(q.shape[-2])
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, r[s[:, None] + s])
    return torch.softmax(scores.masked_fill(s > s[:, None], -torch.inf) / 4, -1) @ v


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what elements are gathered from."""
    found: list[tuple[int, ...]] = []
    plain = products.skewed

    def noted(x: torch.Tensor, *rest: object) -> object:
        found.append(x.shape)
        return plain(x, *rest)

    monkeypatch.setattr(products, "skewed", noted)
    return found


@pytest.mark.parametrize("fn", [by_queries, by_keys, by_sums])
@pytest.mark.parametrize("length", [64, 83, 20])
def test_matches(fn: Callable, length: int, gathered: list[tuple[int, ...]]) -> None:
    inputs = [*(torch.randn(1, 2, length, 16) for _ in range(3)), torch.randn(2 * length, 16)]
    run_and_check(fn, fl.compile(fn), inputs)
    assert gathered


def test_other_lengths(gathered: list[tuple[int, ...]]) -> None:
    compiled = fl.compile(by_queries)
    for length in (40, 56, 33):
        inputs = [*(torch.randn(1, 2, length, 16) for _ in range(3)), torch.randn(2 * length, 16)]
        run_and_check(by_queries, compiled, inputs)
    assert gathered


@pytest.mark.parametrize("name", ["xlnet", "transformer_xl"])
def test_in_triton_ir(name: str) -> None:
    ((plan, lower),) = kernels_of(name, torch.bfloat16)
    made = lower(plan)
    gathers = [line for line in made.ttir.splitlines() if "tt.gather" in line]
    # Of one row: neighbours of a warp are neighbours in shared memory.
    assert "fl_pallas " not in made.ttir and gathers and all("(tensor<1x" in line for line in gathers)
    cubin = compile_ttir(simplified(made, 90), 90)
    assert "wgmma" in cubin.asm["ptx"] and cubin.stack == 0


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # the gradient of vectors at clamped distances
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("name", ["xlnet", "transformer_xl", "relative_keys"])
def test_gradients_of_queries(name: str, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores' gradients take their places among the positions of a tile; or are summed one key at a time."""
    case, placed = BY_NAME[name], []
    plain = reductions.shifted if gathers else reductions._by_index
    monkeypatch.setattr(reductions, plain.__name__, lambda *args: placed.append(name) or plain(*args))
    monkeypatch.setattr(Context, "gathers", lambda _: gathers)
    check_gradients(case.fn, fl.compile(case.fn), case.make_inputs(67, torch.float32, torch.device("cpu")))
    assert placed


def max_plus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[..., :, None, :] + k[..., None, :, :]).amax(-1).softmax(-1) @ v


def test_maxima_are_one_instruction() -> None:
    """Of an element of the scores, and with NaN: a comparison, a test and a choice otherwise."""
    (plan, lower), *_ = kernels_made(max_plus, [torch.randn(1, 2, 257, 64, dtype=torch.bfloat16) for _ in range(3)])
    made = lower(plan)
    assert "fl_pallas " not in made.ttir and "arith.maximumf" in made.ttir
    assert "max.NaN.f32" in compile_ttir(simplified(made, 90), 90).asm["ptx"]


def by_distance(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    return (q @ k.mT + table[:, i[:, None] - j + k.shape[-2]]).softmax(-1).to(v.dtype) @ v


def by_bucket(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    return (q @ k.mT + table[:, (i[:, None] - j).abs().clamp(max=100)]).softmax(-1).to(v.dtype) @ v


def by_pair(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Neighbours in memory, in a table whose pairs have one number."""
    i, j = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    return (q @ k.mT + table[:, i[:, None] * k.shape[-2] + j]).softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize("length", [128, 187])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fn, places", [(by_distance, 2), (by_bucket, 1), (by_pair, 0)])
def test_threads_load_what_lies_scattered(fn: Callable, places: int, dtype: torch.dtype, length: int) -> None:
    """Where the products' results lie, and not through shared memory; other tables as ever."""
    q, k, v = (torch.randn(1, 2, length, 64, dtype=torch.bfloat16) for _ in range(3))
    table = torch.randn(2, (length * places or length**2), dtype=dtype)
    ((plan, lower),) = kernels_made(fn, [q, k, v, table])
    made = lower(plan)
    loads = [line for line in made.ttir.splitlines() if "ld.global.nc" in line]
    assert bool(loads) == bool(places) and "fl_pallas" not in made.ttir
    ttgir = compile_ttir(simplified(made, 90), 90).asm["ttgir"]
    assert all("#mma" in line for line in ttgir.splitlines() if "ld.global.nc" in line)


def test_without_what_only_triton_has() -> None:
    """The DLPack road leaves Pallas's Triton IR as it is."""
    q, k, v, r = *(torch.randn(1, 2, 64, 16) for _ in range(3)), torch.randn(128, 16)
    for fn, inputs in ((max_plus, (q, k, v)), (by_queries, (q, k, v, r)), (by_distance, (q, k, v, r[:, :2].mT))):
        with unrun():
            (graph,) = fl.explain(fn, *inputs).graphs
        assert graph.schedule is not None
        known = {v.name: contiguous(v.shape, v.dtype) for v in graph.schedule.program.values}
        for plan in graph.kernels:
            specs = [known[n] for n in operand_names(plan)]
            known |= {s.name: contiguous(s.shape, s.dtype) for s in plan.stores}
            function = pallas_function(plan, specs, matmul_precision(False), interpret=False)
            traced = jax.jit(function).trace(*(jax.ShapeDtypeStruct((s.span,), s.stored) for s in specs))
            assert "fl_pallas" not in str(traced.jaxpr)
