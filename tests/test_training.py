"""Training the way PyTorch does it: every manner of asking for gradients, and what PyTorch wraps around a model."""

from __future__ import annotations

import copy
import gc
import math
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fl_pallas as fl
from fl_pallas import api
from fl_pallas.bridge import autograd

from .oracle import check_gradients, leaves
from .programs import BY_NAME
from .training import Block, attention
from .unrun import unrun

ROOT = Path(__file__).parents[1]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def qkv(n: int = 33, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(1, 2, n, 16, dtype=dtype, device=device).requires_grad_() for _ in range(3)]


def gradients(f: Callable[..., Tensor], x: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(f(*x).square().sum(), x)


def same(got: Sequence[Tensor | None], want: Sequence[Tensor | None], **tolerance: float) -> None:
    torch.testing.assert_close(list(got), list(want), **(tolerance or CLOSE))


def with_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its logarithmic normalisers, which v is not in."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def sorted_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cannot fuse: the scores are sorted."""
    scores = q @ k.mT
    return (scores + scores.sort(dim=-1).values).softmax(-1) @ v


# --- ways of asking -----------------------------------------------------------------------------


def is_short(out: Tensor) -> bool:
    """Whether a result is of the shorter function, and not AOTAutograd's."""
    return type(out.grad_fn).__name__ == "StepBackward"


def test_calls_are_short() -> None:
    f, x = fl.compile(attention), qkv()
    assert is_short(f(*x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_short(f(*x))


def test_what_pytorch_does_is_not_cast_twice() -> None:
    """A product in float32, where autocast is off in the function and on around it."""
    weight = torch.randn(16, 16)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v)
        with torch.autocast("cpu", enabled=False):
            return out.float() @ weight

    x = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = fl.compile(f)(*x), f(*x)
    assert is_short(found) and found.dtype == wanted.dtype == torch.float32
    same([found], [wanted], rtol=2e-2, atol=2e-2)
    tangent = torch.randn_like(found)
    same(*(torch.autograd.grad(t, x, tangent) for t in (found, wanted)), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("shared", ["an input", "each other"])
def test_results_that_share_memory_are_aotautograds(shared: str) -> None:
    """Writing to one of them is writing to the other."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = attention(q, k, v)
        return (out, q.view(-1)) if shared == "an input" else (out, out.mT)

    x = qkv()
    g = fl.compile(f)
    found, other = g(*x)
    assert not is_short(found)
    wanted, also = f(*x)
    same([found, other], [wanted, also])
    same(
        torch.autograd.grad((found * 2).sum() + other.sum(), x), torch.autograd.grad((wanted * 2).sum() + also.sum(), x)
    )


def test_results_can_be_written_to() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v).transpose(1, 2).flatten(2)

    x = qkv()
    g = fl.compile(f)
    found, wanted = g(*x).mul_(2).add_(1), f(*x).mul(2).add(1)
    same(torch.autograd.grad(found.square().sum(), x), torch.autograd.grad(wanted.square().sum(), x))


def _gated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = attention(q, k, v)
    return out, out * torch.sigmoid(q)


@pytest.mark.parametrize("f", [attention, _gated, lambda *x: attention(*x).flatten(0, 1)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("short", [False, True])  # without, AOTAutograd's own function is called
@pytest.mark.parametrize("batch", [1, 3])
def test_writing_to_a_result_that_is_kept(
    f: Callable[..., Any], autocast: bool, short: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are right, or there are none: as with PyTorch's own attention."""
    if not short:
        monkeypatch.setattr(autograd, "_shortened", lambda passes: None)
    x = [torch.randn(batch, 2, 33, 16).requires_grad_() for _ in range(3)]
    tangents = torch.randn(2)
    with torch.autocast("cpu", enabled=autocast):
        found, wanted = leaves(fl.compile(f)(*x)), leaves(f(*x))
    next(iter(found.values())).detach().zero_()
    try:
        got = torch.autograd.grad([t.sum() * c for t, c in zip(found.values(), tangents)], x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        close = 1e-1 if autocast else 1e-4
        want = torch.autograd.grad([t.sum() * c for t, c in zip(wanted.values(), tangents)], x)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=close, atol=close)


def test_both_passes_are_compiled() -> None:
    """What the other tests of this file take for granted."""
    graphs = {g.name: g for g in fl.explain(attention, *qkv()).graphs}
    assert graphs["forward"].kernels and graphs["backward"].kernels


def test_backward() -> None:
    x = qkv()
    want = gradients(attention, x)
    fl.compile(attention)(*x).square().sum().backward()
    same([t.grad for t in x], want)


def test_gradients_accumulate() -> None:
    """Two backward passes into the same .grad, of two batches."""
    f, x, other = fl.compile(attention), qkv(), qkv()[0]
    for q in (x[0], other):
        f(q, *x[1:]).square().sum().backward()
    first, second = gradients(attention, x), gradients(attention, [other, *x[1:]])
    same([t.grad for t in x[1:]], [a + b for a, b in zip(first[1:], second[1:])])


@pytest.mark.parametrize("name", ["grouped_rotary", "alibi_normed", "learned_queries", "shared_keys", "token_ids"])
def test_regions_end_at_the_projections(name: str) -> None:
    """Products with weights, norms and sums over heads that share a key stay outside, in both passes."""
    case = BY_NAME[name]
    target = case.target(torch.float32, "cpu")
    if isinstance(target, nn.Module):
        target.requires_grad_(True)
    inputs = [x.requires_grad_(x.is_floating_point()) for x in case.make_inputs(256, torch.float32, "cpu")]
    with unrun():
        explanation = fl.explain(target, *inputs)
    assert not explanation.fallbacks, str(explanation)
    forward, backward = explanation.graphs
    assert len(forward.kernels) == 1 and 2 <= len(backward.kernels) <= 3, str(explanation)


class LowRank(nn.Module):
    """Self-attention whose tokens and output have an update of low rank (LoRA) beside a weight that is frozen."""

    def __init__(self, width: int = 32, rank: int = 4):
        super().__init__()
        self.base, self.out = (nn.Linear(width, n * width).requires_grad_(False) for n in (3, 1))
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.base(x + self.up(self.down(x))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(y) + self.up(self.down(y))


def test_updates_of_low_rank_are_layers() -> None:
    """What leads from few features to many is a product with a weight in both passes, and no blow-up."""
    layer, x = LowRank(), torch.randn(2, 130, 32)
    with unrun():
        explanation = fl.explain(layer, x)
    assert not explanation.fallbacks, str(explanation)
    forward, backward = explanation.graphs
    assert len(forward.kernels) == 1 and len(backward.kernels) <= 3, str(explanation)
    layer.requires_grad_(True)
    check_gradients(layer, fl.compile(layer, fallback="error"), [x])


def l1_kernel(x: Tensor, centres: Tensor, values: Tensor) -> Tensor:
    return (-torch.cdist(x, centres, p=1.0)).softmax(-1) @ values


def l3_kernel(x: Tensor, centres: Tensor, values: Tensor) -> Tensor:
    return (-torch.cdist(x, centres, p=3.0)).softmax(-1) @ values


def log_sigmoid_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.logsigmoid(q @ k.mT).exp() @ v / k.shape[-2]


def celu_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """celu has no rule of ours, PyTorch decomposes it."""
    return F.celu(q @ k.mT) @ v / k.shape[-2]


@pytest.mark.parametrize("attend", [l1_kernel, l3_kernel, log_sigmoid_scores, celu_scores])
def test_pytorchs_own_operations(attend: Callable[..., Tensor]) -> None:
    """Operations whose gradient PyTorch computes by another operation, or by several."""
    x = [torch.randn(1, 70, 6).requires_grad_() for _ in range(3)]
    with unrun():
        assert not fl.explain(attend, *x).fallbacks
    same(gradients(fl.compile(attend), x), gradients(attend, x))


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_what_has_no_derivative_runs_forward() -> None:
    """PyTorch complains only once a gradient is asked for."""
    half = torch.tensor(0.5)

    def stepped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.heaviside(q @ k.mT, half) @ v

    x = qkv()
    with pytest.warns(fl.FallbackWarning, match="heaviside"):
        same([fl.compile(stepped)(*x)], [stepped(*x)])


def test_retained_graph() -> None:
    x = qkv()
    out = fl.compile(attention)(*x)
    tangents = [torch.randn_like(out) for _ in range(2)]
    for t in tangents:
        same(torch.autograd.grad(out, x, t, retain_graph=True), torch.autograd.grad(attention(*x), x, t))


def test_gradients_inside() -> None:
    """TorchDynamo, within a compiled function, looks at what autograd calls."""

    def force(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.autograd.grad(attention(q, k, v).square().sum(), q)[0] / 2

    x = qkv()
    same([fl.compile(force)(*x)], [force(*x)])


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_transforms_inside(trained: bool, mode: type) -> None:
    """Gradients that the function itself takes of what needs none outside of it are not zero."""

    def pulled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, pull = torch.func.vjp(attention, q, k, v)
        return out, *pull(out.detach()), torch.func.grad(lambda q: attention(q, k, v).square().sum())(q)

    x = [t.detach().requires_grad_(trained) for t in qkv()]
    with mode():
        same(fl.compile(pulled)(*x), pulled(*x))


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_gradients_that_are_turned_on_inside() -> None:
    """Forces are evaluated so: PyTorch computes what kernels would compute without gradients."""

    @fl.compile
    def energy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.enable_grad():
            return attention(q, k, v).square().sum()

    x = qkv()
    with torch.no_grad():
        out = energy(*x)
    same(torch.autograd.grad(out, x), torch.autograd.grad(attention(*x).square().sum(), x))


@pytest.mark.parametrize("asked", ["q", "k", "v", "qk", "qv"])
def test_some_inputs_require_gradients(asked: str) -> None:
    x = dict(zip("qkv", (t.detach() for t in qkv())))
    some = [x[name].requires_grad_() for name in asked]
    want = torch.autograd.grad(attention(**x).sum(), some)
    fl.compile(attention)(**x).sum().backward()
    same([t.grad for t in some], want)
    assert all(t.grad is None for t in x.values() if not t.requires_grad)


def test_an_input_that_is_not_used() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, nothing: Tensor) -> Tensor:
        return attention(q, k, v)

    x = [*qkv(), torch.ones(3, requires_grad=True)]
    *got, none = torch.autograd.grad(fl.compile(f)(*x).square().sum(), x, allow_unused=True)
    same(got, gradients(attention, x[:3]))
    assert none is None


def test_an_output_that_is_not_used() -> None:
    """PyTorch's own gradient of v is None here; compiled code cannot know, and returns zeros, as torch.compile does."""
    x = qkv()
    got = torch.autograd.grad(fl.compile(with_sums)(*x)[1].sum(), x, allow_unused=True)
    want = torch.autograd.grad(with_sums(*x)[1].sum(), x, allow_unused=True)
    same(got[:2], want[:2])
    assert want[2] is None and (got[2] is None or not got[2].any())


def test_several_incoming_gradients() -> None:
    x = qkv()
    want = with_sums(*x)
    tangents = [torch.randn_like(t) for t in want]
    same(torch.autograd.grad(fl.compile(with_sums)(*x), x, tangents), torch.autograd.grad(want, x, tangents))


def test_an_expanded_incoming_gradient() -> None:
    """The gradient of a sum is one number, seen through strides of 0."""
    x = qkv()
    same(torch.autograd.grad(fl.compile(attention)(*x).sum(), x), torch.autograd.grad(attention(*x).sum(), x))


def test_detached_inside() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.detach(), v)

    x = qkv()
    got = torch.autograd.grad(fl.compile(f)(*x).sum(), x, allow_unused=True)
    want = torch.autograd.grad(f(*x).sum(), x, allow_unused=True)
    same([got[0], got[2]], [want[0], want[2]])
    assert want[1] is None and (got[1] is None or not got[1].any())


def test_second_derivatives_are_refused() -> None:
    x = qkv()
    first = torch.autograd.grad(fl.compile(attention)(*x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(first[0].sum(), x)


# --- modes --------------------------------------------------------------------------------------


def test_training_after_no_grad_and_back() -> None:
    f, x = fl.compile(attention), qkv()
    want, out = gradients(attention, x), attention(*x).detach()
    for _ in range(2):
        with torch.no_grad():
            plain = f(*x)
        with torch.inference_mode():
            inferred = f(*x)
        assert not plain.requires_grad and inferred.is_inference()
        same([plain, inferred], [out, out])
        same(gradients(f, x), want)


def test_autocast() -> None:
    """Parameters in float32, products in bfloat16: gradients are float32, and as close as PyTorch's own."""
    x = qkv()
    exact = gradients(attention, x)

    def error(f: Callable[..., Tensor]) -> list[float]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = f(*x)
        assert out.dtype == torch.bfloat16
        found = torch.autograd.grad(out.float().square().sum(), x)
        assert all(g.dtype == torch.float32 for g in found)
        return [((g - e).norm() / e.norm()).item() for g, e in zip(found, exact)]

    assert all(ours <= 1.5 * theirs for ours, theirs in zip(error(fl.compile(attention)), error(attention)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    if torch.cuda.is_available():
        torch.cuda.init()  # TorchDynamo does, which a checkpoint's first pass may not
    f, x = fl.compile(attention), qkv()
    checkpoint(lambda q, k, v: f(q * 2, k, v), *x, use_reentrant=reentrant).square().sum().backward()
    same([t.grad for t in x], gradients(lambda q, k, v: attention(q * 2, k, v), x))


def test_anomaly_mode() -> None:
    x = qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch says that the mode is slow
        with torch.autograd.detect_anomaly():
            got = gradients(fl.compile(attention), x)
    same(got, gradients(attention, x))


# --- what comes out -----------------------------------------------------------------------------


def test_gradients_have_the_layout_of_pytorchs() -> None:
    """.grad of transposed, sliced and expanded inputs."""
    memory = torch.randn(1, 40, 2, 16), torch.randn(1, 1, 33, 16), torch.randn(1, 2, 66, 16)

    def strided() -> list[Tensor]:
        views = memory[0][:, 3:36].transpose(1, 2), memory[1].expand(1, 2, 33, 16), memory[2][:, :, ::2]
        return [t.detach().requires_grad_() for t in views]

    got, want = strided(), strided()
    for f, x in ((fl.compile(attention), got), (attention, want)):
        f(*x).square().sum().backward()
    same([t.grad for t in got], [t.grad for t in want])
    assert [t.grad.stride() for t in got] == [t.grad.stride() for t in want]  # type: ignore[union-attr]


def test_gradients_go_through_views() -> None:
    """One packed tensor behind all three inputs."""
    packed = torch.randn(1, 33, 3, 2, 16, requires_grad=True)

    def split(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(*packed.permute(2, 0, 3, 1, 4).unbind(0)).square().sum(), packed)

    same(split(fl.compile(attention)), split(attention))


def test_the_same_tensor_thrice() -> None:
    x = qkv()[0]
    got = torch.autograd.grad(fl.compile(attention)(x, x, x).square().sum(), x)
    same(got, torch.autograd.grad(attention(x, x, x).square().sum(), x))


def test_runs_repeat_and_inputs_stay() -> None:
    f, x = fl.compile(attention), qkv(70)
    before = [t.detach().clone() for t in x]
    first, again = gradients(f, x), gradients(f, x)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert all(torch.equal(a, b) for a, b in zip(before, x))


def test_lengths_vary() -> None:
    f = fl.compile(attention)
    for n in (33, 1, 70, 33):
        x = qkv(n)
        same(gradients(f, x), gradients(attention, x))


def test_types_vary() -> None:
    f = fl.compile(attention)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10), (torch.bfloat16, 0.1)):
        x = qkv(dtype=dtype)
        got = gradients(f, x)
        assert all(g.dtype == dtype for g in got)
        same(got, gradients(attention, x), rtol=tolerance, atol=tolerance)


def test_what_cannot_be_fused_trains_too() -> None:
    f, x = fl.compile(sorted_attention), qkv()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [gradients(f, x) for _ in range(2)]
    for g in got:
        same(g, gradients(sorted_attention, x))
    messages = [str(w.message) for w in caught if issubclass(w.category, fl.FallbackWarning)]
    assert sum(message.startswith("aten.sort") for message in messages) == 1, messages
    assert len(set(messages)) == len(messages), messages


# --- modules ------------------------------------------------------------------------------------


def losses(block: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 5) -> list[float]:
    """Of learning to reverse a fixed sequence, with momentum and weight decay."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 33, 32, generator=generator)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (call(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("form", ["function", "module", "around it"])
def test_losses_follow_pytorchs(form: str) -> None:
    """A compiled function within a module, a compiled module, and one in a module that is not."""
    block = Block()
    other = copy.deepcopy(block)
    want = losses(block, block)
    if form == "function":
        other.attention = fl.compile(attention)
        got = losses(other, other)
    elif form == "module":
        compiled = fl.compile(other)
        got = losses(compiled, compiled)
    else:
        outer = nn.Sequential(fl.compile(other), nn.Identity())
        got = losses(outer, outer)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    assert want[-1] < 0.9 * want[0], "it did not learn: the comparison says nothing"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_torch_compile(backend: str) -> None:
    block = Block(fl.compile(attention))
    x = torch.randn(2, 33, 32)
    torch.compile(block, backend=backend)(x).square().sum().backward()
    got = [p.grad.clone() for p in block.parameters()]  # type: ignore[union-attr]
    block.zero_grad()
    block.attention = attention
    block(x).square().sum().backward()
    same(got, [p.grad for p in block.parameters()])


def test_as_a_backend_of_torch_compile() -> None:
    if "fl_pallas" not in torch.compiler.list_backends():
        pytest.skip("fl_pallas is not installed (pip install -e .): PyTorch does not know the backend's name")
    x = qkv()
    same(gradients(torch.compile(attention, backend="fl_pallas"), x), gradients(attention, x))


@pytest.mark.long
def test_distributed(tmp_path: Path) -> None:
    """DDP and FSDP2 in two processes; each compares its gradients with those of the whole batch in one."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch.distributed is built without gloo here")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FL_CACHE": "off"}
    command = [sys.executable, "-m", "tests.distributed", str(tmp_path / "meeting")]
    running = [
        subprocess.Popen([*command, str(rank)], env=env, cwd=ROOT, text=True, stdout=PIPE, stderr=STDOUT)
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=300)[0] for process in running]
    assert not any(process.returncode for process in running), "\n".join(text[-2000:] for text in texts)


def test_nothing_of_the_first_call_is_held(device: torch.device) -> None:
    """What autograd knows of a parameter would live on with it, on the stream of that call: CUDA graphs could not
    record a step."""
    fn = fl.compile(attention)
    gc.disable()
    try:
        inputs = [torch.randn(2, 2, 40, 16, device=device, requires_grad=True) * 1 for _ in range(3)]
        given = [weakref.ref(x) for x in inputs]
        fn(*inputs).sum().backward()
        del inputs
        assert not any(x() is not None for x in given)
    finally:
        gc.enable()


class Layers(nn.Module):
    """Embeddings, and layers of normalised features, two heads of queries and one of keys; ids and seen [b,s]."""

    def __init__(self, count: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 32)
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(count))
        self.into = nn.ModuleList(nn.Linear(32, n, bias=False) for _ in range(count) for n in (32, 16, 16))

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        x = self.words(ids)
        for n, norm in enumerate(self.norms):
            q, k, v = (f(norm(x)).unflatten(-1, (-1, 16)).transpose(1, 2) for f in self.into[3 * n : 3 * n + 3])
            scores = (q @ k.mT / 4).masked_fill((seen == 0)[:, None, None], -math.inf)
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return x


@pytest.mark.long
@pytest.mark.parametrize("words", [80, 2000])
def test_layers_as_one_function(words: int, device: torch.device) -> None:
    """Nothing but attention fuses, once a layer and pass: neither norms, nor embeddings, nor projections."""
    model = Layers(2, words).to(device)
    explanation = fl.Explanation()
    compiled = api._compiled(model, api.Backend({}, explanation))
    seen = torch.ones(2, 40, dtype=torch.long, device=device)
    seen[1, 30:] = 0
    check_gradients(model, compiled, (torch.randint(0, words, (2, 40), device=device), seen))
    assert [len(g.schedule.regions) for g in explanation.graphs if g.schedule] == [2, 2], str(explanation)
    assert not any(g.fallbacks for g in explanation.graphs), str(explanation)


# --- CUDA graphs --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_graph_of_a_training_step() -> None:
    """Forward, backward and optimizer step, captured once and replayed on new batches."""
    block = Block().cuda()
    other = copy.deepcopy(block)
    other.attention = fl.compile(attention)
    batches = torch.randn(8, 2, 64, 32, device="cuda")

    def trainer(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    static = [batches[0].clone() for _ in range(2)]
    eager, compiled = trainer(block, static[0]), trainer(other, static[1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compiled()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compiled()
    for x in batches[1:]:
        for memory in static:
            memory.copy_(x)
        graph.replay()
        torch.testing.assert_close(loss, eager(), rtol=1e-3, atol=1e-5)
    for a, b in zip(other.parameters(), block.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
