"""What comes before and behind attention is fused where that is quicker, and else PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from fl_pallas.schedule.expr import Load, Op, const, free_axes, loads, walk
from fl_pallas.schedule.passes import epilogue, surround
from fl_pallas.schedule.plan import Accumulator, KernelPlan, expressions, operand_names
from fl_pallas.schedule.program import Program
from tests.oracle import check, check_gradients
from tests.unrun import unrun

BATCH, HEADS, WIDTH = 4, 8, 64


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rotary(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the type of the model."""
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    return F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)


def rotary_wide(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In 32 bits, rounded for the product."""
    q, k = (rotated(x.float(), cos, sin).to(x.dtype) for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v)


def biased(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q + cos[0].to(q.dtype), k - sin[0].to(q.dtype), v.relu())


def normed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = (F.rms_norm(x, [x.shape[-1]]) for x in (q, k))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.rms_norm(o * cos.sum().to(o.dtype), [o.shape[-1]])


def gated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v) * torch.sigmoid(q) * sin[0].to(q.dtype)


def weighed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A norm with a weight for each feature."""
    q, k = (F.rms_norm(x, [x.shape[-1]], w[1].to(x.dtype)) for x, w in ((q, cos), (k, sin)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def turned(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """By angles that the function makes itself."""
    rate = 10000.0 ** (-torch.arange(0, q.shape[-1], 2, device=q.device) / q.shape[-1])
    angle = torch.cat([torch.arange(k.shape[-2], device=q.device)[:, None] * rate] * 2, -1)
    return rotary(q, k, v, angle.cos()[: q.shape[-2]], angle.sin()[: q.shape[-2]])


VARIANTS: list[Callable] = [rotary, rotary_wide, biased, normed, weighed, gated, turned]


def draw(queries: int, keys: int, device: torch.device, dtype: torch.dtype, batch: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, n, WIDTH, generator=generator) for n in (queries, keys, keys))
    cos, sin = (f(torch.arange(keys)[:, None] * torch.linspace(0, 1, WIDTH)) for f in (torch.cos, torch.sin))
    return [*(t.to(dtype).to(device) for t in (q, k, v)), cos.to(device), sin.to(device)]


def kernels(fn: Callable, inputs: list[Tensor]) -> tuple[list[KernelPlan], list[Program]]:
    with unrun():
        graphs = fl.explain(fn, *inputs).graphs
    made = [g.schedule for g in graphs if g.schedule is not None]
    return [p for s in made for region in s.kernels for p in region], [s.program for s in made]


def operations(plan: KernelPlan) -> list[Op]:
    return [n for e in expressions(plan) for n in walk(e) if isinstance(n, Op)]


def in_loops(plan: KernelPlan) -> list[Load]:
    """What a kernel loads at every step of a loop."""
    steps = [(s, loop.axis) for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
    return [n for s, axis in steps for n in loads(s.update) if axis in free_axes(n)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fn", [rotary, rotary_wide])
def test_rows_that_many_tiles_read_are_rotated_once(fn: Callable, training: bool, device: torch.device) -> None:
    inputs = [t.requires_grad_(training and n < 3) for n, t in enumerate(draw(2048, 2048, device, torch.bfloat16))]
    plans, programs = kernels(fn, inputs)
    assert len(plans) == (3 if training else 1)
    for program, names in ((p, {v.name for v in p.values if v.shape == (2048, WIDTH)}) for p in programs):
        assert names or program is programs[-1]
        assert not names & {n.source for p in plans for n in in_loops(p)}
    # The gradients of what is rotated are stored as they are rounded; what PyTorch makes of them it makes at once.
    wide = [s for p in plans for s in p.stores if len(s.shape) == 4 and s.shape[-1] == WIDTH]
    assert [s.dtype for s in wide] == ["bf16"] * len(wide) and len(wide) == (4 if training else 1)


@pytest.mark.parametrize("training", [False, True])
def test_sines_that_all_heads_share_are_made_once(training: bool, device: torch.device) -> None:
    """A kernel made them anew for each head of each batch: 309 us for 143, and a minute for its first call."""
    inputs = [t.requires_grad_(training and n < 3) for n, t in enumerate(draw(2048, 2048, device, torch.bfloat16))]
    plans, _ = kernels(turned, inputs)
    assert plans and not {n.name for p in plans for n in operations(p)} & {"sin", "cos", "pow"}


def test_rows_that_one_tile_reads_are_rotated_there(device: torch.device) -> None:
    """A few queries: rotated keys would be stored for one reader."""

    def run(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k * cos.to(k.dtype) + sin.to(k.dtype), v)

    plans, _ = kernels(run, draw(16, 4096, device, torch.bfloat16))
    assert any(len(operand_names(p)) >= 5 for p in plans)


@pytest.mark.parametrize(("queries", "once"), [(2048, True), (16, False)])
def test_keys_are_scaled_once_for_many_queries(queries: int, once: bool, device: torch.device) -> None:
    """To the length 1: factors of scores, else, that each tile of queries has to compute."""

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v)

    (plan, *_), _ = kernels(run, draw(queries, 4096, device, torch.bfloat16))
    vectors = [n for n in in_loops(plan) if sum(i != const(0, "i64") for i in n.index) < 4]
    assert bool(vectors) is not once


@pytest.mark.parametrize("training", [False, True])
def test_what_goes_on_with_scaled_keys_is_done_with_them(training: bool, device: torch.device) -> None:
    """Their weights, and their rounding: loops take keys as they lie, in 16 bits."""
    inputs = [t.requires_grad_(training and n < 3) for n, t in enumerate(draw(2048, 2048, device, torch.bfloat16))]
    for plan in kernels(weighed, inputs)[0]:
        taken = [n for n in in_loops(plan) if any(a.name.startswith("r") for a in free_axes(n))]
        assert taken and all(n.dtype == "bf16" and len(n.index) == 4 for n in taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", VARIANTS)
def test_either_way_is_right(fn: Callable, dtype: torch.dtype, device: torch.device, monkeypatch) -> None:
    """As if launches took no time: what PyTorch can do it does."""
    monkeypatch.setattr(surround, "LAUNCH", 0)
    monkeypatch.setattr(surround, "WORTH", 0)
    monkeypatch.setattr(surround, "ROWS", 16)
    monkeypatch.setattr(epilogue, "LAUNCHED", 0)
    monkeypatch.setattr(epilogue, "WORTH", 0)
    inputs = draw(100, 100, device, dtype, batch=1)
    compiled = fl.compile(fn)
    with torch.no_grad():
        check(fn, inputs, compiled(*inputs))
    check_gradients(fn, compiled, inputs)


@pytest.mark.parametrize("first", [1, 4])
def test_tokens_that_are_not_rotated_need_no_kernels_of_their_own(first: int, device: torch.device) -> None:
    """Class tokens and registers of vision transformers."""

    def fn(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (torch.cat((x[:, :, :first], rotated(x[:, :, first:], cos, sin)), 2) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v)

    q, k, v = (torch.randn(1, 2, 70, 16, device=device, requires_grad=True) for _ in range(3))
    angles = torch.randn(70 - first, 16, device=device)
    inputs = (q, k, v, angles.cos(), angles.sin())
    assert [len(g.kernels) for g in fl.explain(fn, *inputs).graphs] == [1, 2]
    check_gradients(fn, fl.compile(fn), inputs)


def chained(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Queries that all heads share, refined again and again: each step reads the one before in two places."""
    shared = q[:, :1]
    for _ in range(40):
        shared = shared + 0.1 * shared.flip(-1).sin()
    return ((q + shared) @ k.mT).softmax(-1) @ v


def test_what_a_long_chain_costs_is_soon_told(device: torch.device) -> None:
    inputs = draw(64, 64, device, torch.float32)
    with unrun():
        explained = fl.explain(chained, *inputs)
    assert explained.kernels
