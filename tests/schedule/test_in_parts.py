"""Float32 that is multiplied in parts: numbers of bfloat16 that a small kernel stores once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.kernels.fit import SPILL, fitting
from fl_pallas.schedule.passes import in_parts
from fl_pallas.schedule.plan import KernelPlan, operand_names
from tests.kernels.test_cubins import kernels_made
from tests.oracle import check_gradients
from tests.unrun import explain


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    return (q @ k.mT * 0.2).masked_fill(i[:, None] < i, -torch.inf).softmax(-1) @ v


def normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A side that is computed, and is the same in the whole loop."""
    q = q / (1 + q.norm(dim=-1, keepdim=True))
    return (torch.tanh(q @ k.mT) * 3).softmax(-1) @ v


def half_of_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Float32 beside bfloat16."""
    return (q.float() @ k.mT * 0.2).softmax(-1) @ v.float()


def itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is multiplied is read by itself, too."""
    return (-((q * q).sum(-1, keepdim=True) - 2 * q @ k.mT + (k * k).sum(-1)[..., None, :]) * 0.1).softmax(-1) @ v


def made(seq: int, features: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 2, seq, features, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However seldom it is read."""
    monkeypatch.setattr(in_parts, "OFTEN", 0)
    monkeypatch.setattr(in_parts, "MANY", 0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def splitting(plans: tuple[KernelPlan, ...]) -> list[KernelPlan]:
    return [p for p in plans if len(p.stores) == in_parts.PARTS and all(s.dtype == "bf16" for s in p.stores)]


@pytest.mark.parametrize("fn", [plain, causal, normed, itself])
def test_is_as_exact_as_float32(fn: Callable[..., Tensor], always: None, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn), made(70, 24, device))
    assert splitting(explain(fn, *made(70, 24, "cpu")).kernels)


def test_beside_bfloat16(always: None, device: torch.device) -> None:
    q, k, v = made(70, 32, device)
    k = k.detach().bfloat16().float().requires_grad_()
    check_gradients(half_of_it, fl.compile(half_of_it), [q, k, v])


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 3e38, 1e-40])
def test_numbers_that_are_none(number: float, always: None, device: torch.device) -> None:
    """What infinities, NaN and the largest numbers make is PyTorch's; their parts make nothing else of it."""
    q, k, v = (t.detach() for t in made(50, 16, device))
    v[..., 7, 3] = number
    k[0, 0, 9, 1] = math.copysign(min(abs(number), 1e30), number) if number == number else number
    out, expected = fl.compile(plain)(q, k, v), plain(q, k, v)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_where_it_is_read_often() -> None:
    assert len(splitting(explain(plain, *made(2048, 64, "cpu")).kernels)) >= 4
    assert not splitting(explain(plain, *made(100, 64, "cpu")).kernels)
    assert not splitting(explain(plain, *made(2048, 64, "cpu", torch.bfloat16)).kernels)


def test_each_is_taken_apart_once() -> None:
    """Kernels share parts, in the order in which they run."""
    graphs = [g for g in explain(plain, *made(2048, 64, "cpu")).graphs if g.schedule]
    for plans in (g.kernels for g in graphs):
        sources = [operand_names(p) for p in splitting(plans)]
        assert len(set(sources)) == len(sources)
        stored: set[str] = set()
        for p in plans:
            assert not {n for n in operand_names(p) if "_p" in n} - stored
            stored |= {s.name for s in p.stores}


def nearest(a: Tensor, b: Tensor) -> Tensor:
    """A contrastive loss."""
    return ((a @ b.mT).logsumexp(-1) - (a * b).sum(-1)).mean()


def test_many_features(always: None, device: torch.device) -> None:
    """A chunk at a time."""
    a, b = (torch.randn(70, 320, device=device).mul(0.1).requires_grad_() for _ in range(2))
    check_gradients(nearest, fl.compile(nearest), [a, b])
    (plan, lower), *_ = kernels_made(nearest, [torch.randn(4096, 512) for _ in range(2)])[1:]
    (fitted,) = fitting(plan, lower, 90)
    assert fitted.cubin.stack <= SPILL and "wgmma" in fitted.cubin.asm["ptx"]


@pytest.mark.parametrize("features", [64, 128])
def test_compiles_without_spills(features: int) -> None:
    """Of float32 that programs take apart by themselves, 64 rows of 128 features spilled a thousand bytes."""
    fitted = [fitting(p, lower, 90)[0] for p, lower in kernels_made(plain, made(2048, features, "cpu")) if p.loops]
    multiplying = [f for f in fitted if "tt.dot" in f.lowered.ttir]
    assert len(multiplying) == 3
    for f in multiplying:
        assert f.cubin.stack <= 3 * SPILL, f.lowered.name
        assert "wgmma" in f.cubin.asm["ptx"], f.lowered.name
