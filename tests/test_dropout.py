"""Dropout in training: what kernels draw by themselves, forward and backward, from one seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fl_pallas as fl
from fl_pallas.capture import random
from fl_pallas.kernels.fit import SPILL, fitting
from fl_pallas.kernels.pointwise import POINTWISE
from fl_pallas.schedule.philox import MASK, WEYL, philox
from tests.evaluate import _uniform
from tests.kernels.test_cubins import _lower
from tests.plan_evaluate import captured
from tests.unrun import unrun

F = torch.nn.functional
P = 0.3
SHAPE = (2, 3, 96, 32)


@pytest.fixture(autouse=True)
def no_fallbacks() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.FallbackWarning)
        yield


def qkv(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(shape or SHAPE, generator=made).to(dtype).requires_grad_(grad) for _ in range(3)]


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(weights(q, k), P) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P)


def seeded(f: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return f(*args)


def mask_of(f: Callable[..., Tensor], q: Tensor, k: Tensor, seed: int = 0) -> Tensor:
    """Which weights `f` keeps: what it returns for an identity matrix of values."""
    eye = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-1], k.shape[-2]).contiguous()
    return seeded(f, q.detach(), k.detach(), eye, seed=seed) != 0


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "first", "second", "key", "word"),
    [
        (7, 0x00000000, 0x00000000, 0x00000000, 0x257A3673),
        (7, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xAB302C4D),
        (7, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0xBEDBBE6B),
        (10, 0x00000000, 0x00000000, 0x00000000, 0xFF1DAE59),
        (10, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0x2C3F628B),
        (10, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0xDD7CE038),
    ],
)
def test_philox(rounds: int, first: int, second: int, key: int, word: int) -> None:
    """The known answers of Random123 (kat_vectors, philox2x32)."""
    keys = [torch.tensor(key + n * WEYL & MASK) for n in range(rounds)]
    assert philox(torch.tensor(first), torch.tensor(second), keys, random._multiplied).item() == word


def test_kernels_and_pytorch_draw_the_same_numbers() -> None:
    import jax
    import jax.numpy as jnp

    seed = torch.tensor([0xFEDCBA98, 0xFFFFFFF0])
    expected = random.uniform(seed, (5, 7, 33)).reshape(35, 33)
    words = (*seed.numpy(), np.arange(35)[:, None], np.arange(33)[None])
    np.testing.assert_array_equal(_uniform(*words), expected.double().numpy())
    with jax.enable_x64(True):
        arrays = [jnp.broadcast_to(jnp.asarray(w), (35, 33)) for w in words]
        np.testing.assert_array_equal(np.asarray(POINTWISE["uniform"](*arrays)), expected.numpy())


def test_statistics() -> None:
    kept = mask_of(fl.compile(dropped), *qkv(2, 4, 256, 16)[:2]).double()
    sigma = (P * (1 - P)) ** 0.5

    def even(x: Tensor, n: int) -> None:
        assert (x.abs() < 5 * sigma / n**0.5).all()

    z = kept - (1 - P)
    even(z.mean(), z.numel())
    for axis in (-1, -2):
        even(z.mean(axis), z.shape[axis])
    for other in (z.roll(1, 0), z.roll(1, 1), z.roll(1, -1), z.roll(1, -2), z.mT):
        even((z * other).mean() / sigma, z.numel())
    rows = z.flatten(0, -2)
    correlation = rows @ rows.T / rows.shape[-1] / sigma**2 - torch.eye(rows.shape[0])
    # 2 million pairs: the largest of so many is expected at about 5.1 sigma.
    assert correlation.fill_diagonal_(0).abs().max() < 6.5 / rows.shape[-1] ** 0.5


def test_the_mean_is_preserved() -> None:
    q, k, v = qkv()
    f = fl.compile(dropped)
    mean = torch.stack([seeded(f, q, k, v, seed=n) for n in range(60)]).mean(0)
    spread = ((weights(q, k) ** 2) @ v**2 * P / (1 - P) / 60) ** 0.5
    assert ((mean - weights(q, k) @ v).abs() < 6 * spread).all()


# --- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [dropped, sdpa])
def test_seeds(f: Callable[..., Tensor]) -> None:
    x, compiled = qkv(), fl.compile(f)
    first = seeded(compiled, *x)
    assert not torch.equal(compiled(*x), first), "each call draws"
    assert torch.equal(seeded(compiled, *x), first)
    assert not torch.equal(seeded(compiled, *x, seed=1), first)


def test_two_dropouts_of_one_function_differ() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = torch.sigmoid(0.1 * q @ k.mT)
        return (F.dropout(w, 0.5) @ v - F.dropout(w, 0.5) @ v).abs() > 1e-3

    differing = mask_of(fl.compile(f), *qkv()[:2]).double().mean()
    assert abs(differing - 0.5) < 5 * 0.5 / (2 * 3 * 96 * 96) ** 0.5


def test_probabilities() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        return F.dropout(weights(q, k), p) @ v

    q, k, v = qkv()
    compiled = fl.compile(f)
    torch.testing.assert_close(compiled(q, k, v, 0.0), weights(q, k) @ v)
    assert (compiled(q, k, v, 1.0) == 0).all()
    for p in (0.25, 0.75):
        torch.manual_seed(0)
        kept = compiled(q, k, torch.eye(96).expand(2, 3, 96, 96).contiguous(), p)
        expected = weights(q, k) * (kept != 0) / (1 - p)
        torch.testing.assert_close(kept, expected)
        assert abs((kept != 0).double().mean() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5


def test_evaluation_drops_nothing() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(P)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.drop(weights(q, k)) @ v

    x, module = qkv(), Attention()
    compiled = fl.compile(module)
    assert not torch.allclose(compiled(*x), weights(*x[:2]) @ x[2])
    module.eval()
    torch.testing.assert_close(compiled(*x), weights(*x[:2]) @ x[2])
    assert not any("rand" in op for g in fl.explain(module, *x).graphs for op in dict(g.left))


# --- forward and backward -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("f", [dropped, sdpa])
def test_gradients(f: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """The backward pass finds the mask of the forward pass again."""
    x = qkv(grad=True, dtype=dtype)
    compiled = fl.compile(f)
    mask = mask_of(compiled, *x[:2])
    out = seeded(compiled, *x)
    with torch.no_grad():
        torch.testing.assert_close(out, seeded(compiled, *x))
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = (weights(*wide[:2]) * mask / (1 - P)) @ wide[2]
    gradient = torch.randn_like(out)
    bound = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert _error(out, expected) < bound
    found, wanted = (torch.autograd.grad(o, i, gradient.to(o.dtype)) for o, i in ((out, x), (expected, wide)))
    for a, b in zip(found, wanted, strict=True):
        assert _error(a, b) < bound


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def test_a_gradient_is_zero_where_the_mask_is() -> None:
    q, k, v = qkv(1, 1, 64, 16, grad=True)
    compiled = fl.compile(dropped)
    mask = mask_of(compiled, q, k)
    (gradient,) = torch.autograd.grad(seeded(compiled, q, k, v)[0, 0, 5].sum(), v)
    assert torch.equal(gradient[0, 0, :, 0] != 0, mask[0, 0, 5])


def test_random_tensors_have_gradients_around_them() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = weights(q, k)
        return (w * (torch.rand_like(w) >= P)) @ v

    x, compiled = qkv(grad=True), fl.compile(f)
    mask = mask_of(compiled, *x[:2])
    out, expected = seeded(compiled, *x), (weights(*x[:2]) * mask) @ x[2]
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(o.sum(), x) for o in (out, expected)), strict=True):
        assert _error(a, b.double()) < 1e-5


def test_bernoulli() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bernoulli((q @ k.mT).sigmoid()) @ v

    q, k, _ = qkv()
    p = (q @ k.mT).sigmoid()
    z = mask_of(fl.compile(f), q, k).float() - p
    assert abs(z.sum()) < 5 * (p * (1 - p)).sum() ** 0.5


# --- what is left to PyTorch ----------------------------------------------------------------------


@pytest.mark.parametrize("f", [dropped, sdpa])
@pytest.mark.parametrize("grad", [False, True])
def test_kernels(f: Callable[..., Tensor], grad: bool) -> None:
    """Nothing is drawn but seeds, and no random tensor is stored."""
    with unrun():
        explanation = fl.explain(f, *qkv(grad=grad))
    assert not explanation.fallbacks
    forward, *backward = explanation.graphs
    assert len(forward.kernels) == 1 and dict(forward.left) == {"aten.randint.low": 1}
    assert len(backward) == grad
    for graph in backward:
        assert len(graph.kernels) <= 3 and not graph.left


def test_linear_dropouts_are_pytorchs() -> None:
    """The same bits as PyTorch's, by its one operation, and a mask that is drawn once."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(dropped(q, k, v) * 2, 0.5)

    forward, backward = fl.explain(f, *qkv(grad=True)).graphs
    assert dict(forward.left)["aten.native_dropout.default"] == 1
    assert not any("rand" in op or op == "aten.native_dropout.default" for op in dict(backward.left))
    x, compiled = qkv(grad=True), fl.compile(f)
    out = seeded(compiled, *x)
    (gradient,) = torch.autograd.grad(out.sum(), x[2])
    inner = mask_of(fl.compile(dropped), *x[:2])
    outer = out != 0
    torch.testing.assert_close(out, (weights(*x[:2]) * inner / (1 - P)) @ x[2] * 4 * outer)
    wanted = (weights(*x[:2]) * inner / (1 - P)).mT @ (outer * 4.0)
    torch.testing.assert_close(gradient, wanted)


def test_linear_dropouts_draw_as_eager_does() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(weights(q, k) @ v, 0.5)

    x = qkv()
    torch.testing.assert_close(seeded(fl.compile(f), *x), seeded(f, *x))


@pytest.mark.parametrize("grad", [False, True])
def test_multi_head_attention(grad: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 2, dropout=P, batch_first=True)
    x = torch.randn(2, 160, 32)

    def f(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False)[0]

    with torch.set_grad_enabled(grad):
        forward, *_ = fl.explain(f, x).graphs
        assert forward.kernels and not forward.fallbacks
        assert [op for op in dict(forward.left) if "rand" in op or "dropout" in op] == ["aten.randint.low"]
        compiled = fl.compile(f, fallback="torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fl.FallbackWarning)  # what a projection's backward pass stores
            assert torch.equal(seeded(compiled, x), seeded(compiled, x))
            assert not torch.equal(compiled(x), compiled(x))
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), f(x), atol=1e-5, rtol=1e-4)


def test_autocast() -> None:
    x = qkv(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = fl.compile(dropped)
        out = seeded(compiled, *x)
        mask = mask_of(compiled, *x[:2])
    expected = (weights(*x[:2]) * mask / (1 - P)) @ x[2]
    assert _error(out, expected.double()) < 1e-2
    (gradient,) = torch.autograd.grad(out.sum(), x[2])
    (wanted,) = torch.autograd.grad(expected.sum(), x[2])
    assert _error(gradient, wanted.double()) < 1e-2


# --- the plans, and machine code ------------------------------------------------------------------


def test_plan() -> None:
    """The kernel's own meaning, by an evaluator that knows nothing of jax."""
    x = qkv(1, 2, 40, 16)
    with torch.random.fork_rng(devices=[]):
        made = captured(dropped, x)
    for plan, run, known in made.kernels():
        for name, found in run.run().items():
            np.testing.assert_allclose(found, known[name], rtol=1e-9, atol=1e-12, err_msg=plan.name)


@pytest.mark.parametrize("causal", [False, True])
def test_machine_code(causal: bool) -> None:
    """Forward and backward kernels keep their registers to themselves."""
    from fl_pallas.schedule.plan import operand_names

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=P)

    with unrun():
        explanation = fl.explain(f, *qkv(2, 2, 512, 64, grad=True, dtype=torch.bfloat16))
    for graph in explanation.graphs:
        assert graph.schedule is not None
        program = graph.schedule.program
        tensors = {v.name: (v.shape, v.dtype) for v in (*program.values, *program.facts)}
        for plan in graph.kernels:
            tensors |= {s.name: (s.shape, s.dtype) for s in plan.stores}
            operands = [tensors[n] for n in operand_names(plan)]
            (made,) = fitting(plan, lambda p, operands=operands: _lower(operands, p), 90)
            assert made.cubin.stack <= SPILL
            if graph is explanation.graphs[0]:
                assert "mul.wide.u32" in made.cubin.asm["ptx"]


def test_a_dropout_of_a_dropout(device: torch.device) -> None:
    """Both are PyTorch's, which no kernel draws: of an MLP, and of the residual that it ends in."""

    def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        seen = (x @ w @ x.mT).softmax(-1) @ x
        return x + F.dropout(F.dropout(F.gelu(seen @ w) @ v, P, True), P, True)

    given = [torch.randn(2, 65, 16), torch.randn(16, 16) / 4, torch.randn(16, 16) / 4]
    x, w, v = (t.to(device).requires_grad_() for t in given)
    out = fl.compile(block)(x, w, v)
    kept = (out != x).float().mean().item()
    assert abs(kept - (1 - P) ** 2) < 0.05
    out.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (x, w, v))


def test_computed_again_behind_pytorch(device: torch.device) -> None:
    """Weights that are read before and behind an operation of PyTorch's are dropped alike."""

    def by_share(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.dropout((q @ k.mT / 4).softmax(-1), P, True)
        rank = weights.sum(-2).cumsum(-1)
        return weights @ v, (weights / (1 + rank)[..., None, :]) @ ((1 + rank)[..., None] * v)

    q, k, v = (torch.randn(1, 2, 129, 16, device=device, requires_grad=True) for _ in range(3))
    first, second = fl.compile(by_share, fallback="error")(q, k, v)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    torch.autograd.grad(second.sum(), (q, k, v))
