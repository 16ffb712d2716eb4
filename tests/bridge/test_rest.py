"""What no kernel computes, by Inductor: what it is given, and that its numbers are PyTorch's."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import fl_pallas as fl
from fl_pallas.bridge import rest

from ..oracle import check_gradients, run_and_check


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def rotary(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary attention, gated and normed."""
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    out = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
    return F.gelu(F.layer_norm(out * torch.sigmoid(q), (q.shape[-1],))).transpose(1, 2)


def inputs(dtype: torch.dtype, n: int = 48) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = ((1, 2, n, 16),) * 3 + ((n, 8),) * 2
    return [torch.randn(s, generator=gen).to(dtype) for s in shapes]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of the operations of each stage that Inductor is given, which runs them one by one."""
    seen: list[list[str]] = []

    def eager(gm: GraphModule, _: Sequence[Tensor]) -> Callable:
        seen.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return lambda given: gm.forward(*given)

    monkeypatch.setattr(rest, "_by_inductor", eager)
    return seen


def test_what_is_before_and_after_the_kernels(stages: list[list[str]]) -> None:
    given = inputs(torch.float32)
    run_and_check(rotary, fl.compile(rotary, rest="inductor", fallback="error"), given)
    before, after = stages
    assert "aten.stack.default" in before
    assert "aten.native_layer_norm.default" in after


def test_two_layers_have_three_stages(stages: list[list[str]]) -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        once = rotary(q, k, v, cos, sin).transpose(1, 2)
        return rotary(once, k, v, cos, sin)

    run_and_check(layers, fl.compile(layers, rest="inductor", fallback="error"), inputs(torch.float32))
    assert len(stages) == 3


def test_stages_that_are_alike_are_compiled_once(stages: list[list[str]]) -> None:
    """Not one that computes with another number."""

    def layers(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for eps in (1e-5, 1e-5, 1e-5, 1e-2, 1e-2):
            q = torch.softmax(q @ k.mT / 4, -1) @ v
            q = F.layer_norm(q, (16,), eps=eps)
        return torch.softmax(q @ k.mT / 4, -1) @ v

    given = inputs(torch.float32, 40)
    run_and_check(layers, fl.compile(layers, rest="inductor", fallback="error"), given)
    assert len(stages) == 2


def test_random_numbers_are_pytorchs(stages: list[list[str]]) -> None:
    def noisy(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.softmax(rotated(F.dropout(q, 0.5), cos, sin) @ k.mT, -1) @ v

    given = inputs(torch.float32)
    torch.manual_seed(1)
    out = fl.compile(noisy, rest="inductor")(*given)
    torch.manual_seed(1)
    torch.testing.assert_close(out, noisy(*given))
    assert stages and not any("dropout" in name or "rand" in name for names in stages for name in names)


def test_one_operation_is_eager(stages: list[list[str]]) -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q.flip(-1) @ k.mT, -1) @ v

    run_and_check(scaled, fl.compile(scaled, rest="inductor"), inputs(torch.float32)[:3])
    assert not stages


def test_a_norm_is_several_operations(stages: list[list[str]]) -> None:
    def normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.layer_norm((q @ k.mT).softmax(-1) @ v, (16,))

    given = inputs(torch.float32)[:3]
    run_and_check(normed, fl.compile(normed, rest="inductor", fallback="error"), given)
    assert [[n for n in names if "getitem" not in n] for names in stages] == [["aten.native_layer_norm.default"]]


def test_lengths_that_vary_are_eager(stages: list[list[str]]) -> None:
    compiled = fl.compile(rotary, rest="inductor", dynamic=True)
    for n in (33, 40):
        run_and_check(rotary, compiled, inputs(torch.float32, n))
    assert not stages


def test_auto_is_eager_on_a_cpu(stages: list[list[str]]) -> None:
    run_and_check(rotary, fl.compile(rotary), inputs(torch.float32))
    assert not stages


def test_a_failure_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(gm: GraphModule, _: Sequence[Tensor]) -> Callable:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(rest, "_by_inductor", failing)
    run_and_check(rotary, fl.compile(rotary, rest="inductor"), inputs(torch.float32))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU, and there is no g++")
def test_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = rest._by_inductor

    def seen(gm: GraphModule, examples: Sequence[Tensor]) -> Callable:
        made.append(real(gm, examples))
        return made[-1]

    monkeypatch.setattr(rest, "_by_inductor", seen)
    counters.clear()
    given = inputs(torch.bfloat16)
    check_gradients(rotary, fl.compile(rotary, rest="inductor", fallback="error"), given)
    assert {type(m).__name__ for m in made} == {"CompiledFxGraph"}
    assert "fxgraph_cache_bypass" not in counters["inductor"], "another process finds them on disk"


def max_plus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many maxima as scores, each of which has a gradient: PyTorch's."""
    return F.dropout((q[..., None, :] + k[..., None, :, :]).amax(-1).softmax(-1) @ v, 0.5)


@pytest.mark.filterwarnings("ignore::fl_pallas.errors.FallbackWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU, and there is no g++")
@pytest.mark.parametrize("fails", [False, True])
def test_a_whole_graph(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Callable] = []
    real = rest._whole_by_inductor

    def seen(gm: GraphModule, args: Sequence[Tensor]) -> Callable:
        made.append(real(gm, args))
        if fails:
            raise RuntimeError("no compiler")
        return made[-1]

    monkeypatch.setattr(rest, "_whole_by_inductor", seen)
    given = [t.requires_grad_() for t in inputs(torch.float32)[:3]]
    results = []
    for fn in (max_plus, fl.compile(max_plus, rest="inductor")):
        torch.manual_seed(1)
        out = fn(*given)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for ours, eager in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, eager)
    assert len(made) == 1


def test_a_graph_without_kernels(stages: list[list[str]]) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.gelu(q * k) + v.sin()

    run_and_check(plain, fl.compile(plain, rest="inductor"), inputs(torch.float32)[:3])
    assert len(stages) == 1


def test_passes_without_kernels_are_not_taken_apart(stages: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor has the graph as it would without us."""
    whole: list[GraphModule] = []

    def eager(gm: GraphModule, _: Sequence[Tensor]) -> Callable:
        whole.append(gm)
        return gm

    monkeypatch.setattr(rest, "_whole_by_inductor", eager)

    def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.elu(q) @ (F.elu(k).mT @ v)

    given = [t.requires_grad_() for t in inputs(torch.float32)[:3]]
    check_gradients(linear, fl.compile(linear, rest="inductor"), given)
    assert len(whole) == 1 and not stages


def largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many maxima as scores: their gradients are PyTorch's."""
    return (q[:, :, :, None] + k[:, :, None]).amax(-1).softmax(-1) @ v


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU, and there is no g++")
def test_a_maximum_is_found_again_by_the_backward_pass() -> None:
    check_gradients(largest, fl.compile(largest, rest="inductor"), inputs(torch.bfloat16, 64)[:3])


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU, and there is no g++")
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_softmax_over_heads_is_no_attention(by_hand: bool) -> None:
    """Inductor's pattern of attention looks at no dimension: by itself it would call SDPA."""

    def over_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        scores = q @ k.mT * 0.25
        if not by_hand:
            return (scores.softmax(1) @ v,)
        powers = (scores - scores.amax(1, keepdim=True)).exp()
        return (powers / powers.sum(1, keepdim=True) @ v,)

    graphs: list[GraphModule] = []

    def kept(gm: GraphModule, _: Sequence[Tensor]) -> GraphModule:
        graphs.append(gm)
        return gm

    inputs = [torch.randn(2, 4, 32, 16) for _ in range(3)]
    with torch.no_grad():
        want = torch.compile(over_heads, backend=kept)(*inputs)
        names = [n.name for n in graphs[0].graph.find_nodes(op="placeholder")]
        given = [inputs["qkv".index(name.strip("_").split("_")[1])] for name in names]
        torch.testing.assert_close(rest.Whole(graphs[0])(*given)[0], want[0])
