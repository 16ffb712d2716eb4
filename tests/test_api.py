"""The public face: what fl.compile takes, what it promises, and what it does when it cannot."""

from __future__ import annotations

import copy
import functools
import math
import os
import pickle
import re
import subprocess
import sys
import threading
import tomllib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fl_pallas as fl
from fl_pallas import api, backend, realise
from fl_pallas.schedule import build, pipeline

from .oracle import check, run_and_check
from .unrun import explain, unrun

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).name


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention."""
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.25) -> Tensor:
    i, j = torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)
    return (q @ k.mT * scale).masked_fill(j > i, -math.inf).softmax(-1) @ v


def sorted_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cannot fuse: the scores are sorted."""
    scores = q @ k.mT
    ordered = torch.sort(scores, dim=-1).values
    return (scores + ordered).softmax(-1) @ v


def only_sorted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, where the scores go nowhere else."""
    return torch.sort(q @ k.mT, dim=-1).values.softmax(-1) @ v


def qkv(n: int = 64, d: int = 16, b: int = 1, dtype: torch.dtype = torch.float32, device: Any = None) -> list[Tensor]:
    return [torch.randn(b, 2, n, d, dtype=dtype, device=device) for _ in range(3)]


def fused(fn: Callable, *args: Any, **kwargs: Any) -> int:
    return explain(fn, *args, **kwargs).kernel_count


@pytest.fixture
def settings() -> Iterator[fl.config.__class__]:
    """fl.config, put back afterwards."""
    kept = {name: getattr(fl.config, name) for name in ("fallback", "road", "interpret", "tune", "cache", "cache_mb")}
    yield fl.config
    for name, value in kept.items():
        setattr(fl.config, name, value)


def fallbacks(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, fl.FallbackWarning)]


# --- forms --------------------------------------------------------------------------------------


def test_call_form() -> None:
    run_and_check(attention, fl.compile(attention), qkv())


def test_decorator_form() -> None:
    @fl.compile
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Doc."""
        return attention(q, k, v)

    assert f.__name__ == "f" and f.__doc__ == "Doc."
    run_and_check(attention, f, qkv())


def test_decorator_with_options() -> None:
    @fl.compile(fallback="error", road="dlpack", interpret=None)
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)

    assert f.__name__ == "f"
    run_and_check(attention, f, qkv())


def test_compiling_twice() -> None:
    run_and_check(attention, fl.compile(fl.compile(attention)), qkv())


@pytest.mark.parametrize(
    "option",
    [{"fallback": "never"}, {"road": "teleport"}, {"interpret": "yes"}, {"interpret": 2}, {"fallback": ""}],
    ids=str,
)
def test_bad_options(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(fl.ConfigError, match=name):
        fl.compile(attention, **option)
    with pytest.raises(fl.ConfigError, match=name):
        fl.compile(**option)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="speed"):
        fl.compile(attention, speed=11)  # type: ignore[call-arg]


def test_lambda_and_closure() -> None:
    scale = torch.tensor(0.3)
    q, k, v = qkv()
    f = fl.compile(lambda a, b: torch.softmax(a @ b.mT * scale, -1) @ v)
    check(lambda a, b, c: torch.softmax(a @ b.mT * 0.3, -1) @ c, [q, k, v], f(q, k))


def test_closure_sees_a_new_value() -> None:
    held = {"scale": 0.5}

    @fl.compile
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * held["scale"], -1) @ v

    x = qkv()
    f(*x)
    held["scale"] = 0.1
    check(lambda q, k, v: torch.softmax(q @ k.mT * 0.1, -1) @ v, x, f(*x))


def test_method() -> None:
    class Model:
        def __init__(self, scale: float):
            self.scale = scale

        @fl.compile
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.mT * self.scale, -1) @ v

    x = qkv()
    for scale in (0.1, 0.4):
        check(lambda q, k, v, s=scale: torch.softmax(q @ k.mT * s, -1) @ v, x, Model(scale).attend(*x))


def test_bound_method() -> None:
    class Model:
        scale = 0.2

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.mT * self.scale, -1) @ v

    run_and_check(Model().attend, fl.compile(Model().attend), qkv())


# --- arguments and results ----------------------------------------------------------------------


def test_keywords_and_defaults() -> None:
    f, x = fl.compile(causal), qkv()
    q, k, v = x
    check(causal, x, f(q, k, v))
    check(causal, x, f(v=v, k=k, q=q))
    check(lambda q, k, v: causal(q, k, v, 0.7), x, f(q, k, v, 0.7))
    check(lambda q, k, v: causal(q, k, v, scale=0.1), x, f(q, k, v, scale=0.1))


def test_nested_arguments_and_results() -> None:
    def f(x: dict[str, Any], more: list) -> dict[str, Any]:
        out = attention(x["q"], x["kv"][0], x["kv"][1])
        return {"out": out, "pair": (out + more[0], [out * 2, None]), "number": 3, "nothing": None, "text": "x"}

    q, k, v = qkv()
    given = {"q": q, "kv": (k, v)}, [torch.ones(()), None]
    with torch.no_grad():
        want = f(*given)
    got = fl.compile(f)(*given)
    assert type(got) is dict and list(got) == list(want)
    assert type(got["pair"]) is tuple and type(got["pair"][1]) is list
    assert got["nothing"] is None and got["pair"][1][1] is None and got["number"] == 3 and got["text"] == "x"
    torch.testing.assert_close(got["out"], want["out"])
    torch.testing.assert_close(got["pair"][0], want["pair"][0])
    torch.testing.assert_close(got["pair"][1][0], want["pair"][1][0])
    assert fused(f, *given) >= 1


def test_named_tuple() -> None:
    from typing import NamedTuple

    class Out(NamedTuple):
        out: Tensor
        largest: Tensor

    def f(q: Tensor, k: Tensor, v: Tensor) -> Out:
        p = torch.softmax(q @ k.mT, -1)
        return Out(p @ v, p.amax(-1))

    x = qkv()
    got, want = fl.compile(f)(*x), f(*x)
    assert type(got) is Out
    torch.testing.assert_close(got.largest, want.largest)


def test_same_output_twice_and_an_input_returned() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = attention(q, k, v)
        return out, q, out

    x = qkv()
    first, q, again = fl.compile(f)(*x)
    torch.testing.assert_close(first, attention(*x))
    assert q is x[0] or q.data_ptr() == x[0].data_ptr()
    assert first.data_ptr() == again.data_ptr()


def test_view_of_an_output() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = attention(q, k, v)
        return out, out.transpose(1, 2).flatten(2)

    run_and_check(f, fl.compile(f), qkv())


def test_numbers_as_arguments() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, width: int, scale: float, flag: bool) -> Tensor:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        scores = (q @ k.mT * scale).masked_fill((i - j).abs() > width, -math.inf)
        return scores.softmax(-1) @ v if flag else scores.sigmoid() @ v

    compiled, x = fl.compile(f), qkv()
    for width, scale, flag in ((5, 0.25, True), (9, 0.25, True), (9, 0.5, True), (2, 0.125, False), (30, 0.3, True)):
        check(lambda q, k, v, a=(width, scale, flag): f(q, k, v, *a), x, compiled(*x, width, scale, flag))


def test_no_output_and_nothing_to_do() -> None:
    assert fl.compile(lambda q: None)(torch.ones(3)) is None
    assert fl.compile(lambda: 3)() == 3
    assert torch.equal(fl.compile(lambda x: x + 1)(torch.ones(3)), torch.full((3,), 2.0))


def test_not_contiguous() -> None:
    views = [
        torch.randn(1, 64, 2, 16).transpose(1, 2),
        torch.randn(1, 2, 128, 32)[:, :, ::2, 3:19],
        torch.randn(1, 1, 64, 16).expand(1, 2, 64, 16),
    ]
    run_and_check(attention, fl.compile(attention), views)


def test_lazily_negated() -> None:
    """The imaginary part of a conjugate shares memory that holds its negative (PyTorch's negative bit)."""
    _, k, v = qkv()
    q = torch.randn(1, 2, 64, 16, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    run_and_check(attention, fl.compile(attention), [q, k, v])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = qkv(dtype=dtype)
    out = run_and_check(attention, fl.compile(attention), x)
    assert out.dtype == dtype
    assert fused(attention, *x) == 1


def test_one_function_many_dtypes() -> None:
    f = fl.compile(attention)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
        run_and_check(attention, f, qkv(dtype=dtype))


def test_autocast() -> None:
    q, k, v = qkv()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = attention(q, k, v), fl.compile(attention)(q, k, v)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)
    inside = fl.compile(f)(q, k, v)
    assert inside.dtype == torch.bfloat16
    torch.testing.assert_close(inside, want, rtol=0.05, atol=0.02)


def test_autocast_does_not_leak_into_later_calls() -> None:
    f, x = fl.compile(attention), qkv()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert f(*x).dtype == torch.bfloat16
    assert f(*x).dtype == torch.float32
    run_and_check(attention, f, x)


def test_inference_mode() -> None:
    f = fl.compile(attention)
    with torch.inference_mode():
        x = qkv()
        torch.testing.assert_close(f(*x), attention(*x))
    y = qkv()
    torch.testing.assert_close(f(*y), attention(*y))


# --- modules ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Self-attention with a parameter, a buffer, an option and a default."""

    offsets: Tensor

    def __init__(self, width: int = 32):
        super().__init__()
        self.proj = nn.Linear(width, 3 * width)
        self.register_buffer("offsets", torch.linspace(0, 1, 2)[:, None, None])
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> Tensor:
        b, s, c = x.shape
        q, k, v = (t.view(b, s, 2, c // 2).transpose(1, 2) for t in self.proj(x).chunk(3, -1))
        i = torch.arange(s, device=x.device)
        scores = q @ k.mT * 0.25 - self.offsets * (i[:, None] - i).abs()
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, c) * gain

    def helper(self) -> str:
        return "helped"


def frozen() -> Layer:
    return Layer().requires_grad_(False).eval()


def test_module() -> None:
    layer = frozen()
    run_and_check(layer, fl.compile(layer), [torch.randn(2, 64, 32)])


def test_module_keywords_and_defaults() -> None:
    layer, x = frozen(), torch.randn(2, 64, 32)
    compiled = fl.compile(layer)
    mask = torch.rand(2, 64) < 0.7
    mask[:, 0] = True
    torch.testing.assert_close(compiled(x, mask), layer(x, mask))
    torch.testing.assert_close(compiled(x=x, mask=mask, gain=2.0), layer(x, mask, gain=2.0))
    torch.testing.assert_close(compiled(x, gain=0.5), layer(x, gain=0.5))
    assert fused(layer, x) == fused(compiled, x) == 1


def test_module_shares_parameters_and_state() -> None:
    layer = frozen()
    compiled = fl.compile(layer)
    assert isinstance(compiled, nn.Module)
    assert [p.data_ptr() for p in compiled.parameters()] == [p.data_ptr() for p in layer.parameters()]
    assert [b.data_ptr() for b in compiled.buffers()] == [b.data_ptr() for b in layer.buffers()]
    assert compiled.helper() == "helped"
    x = torch.randn(1, 64, 32)
    compiled(x)
    with torch.no_grad():
        layer.proj.weight.mul_(0.5)
        layer.offsets.add_(0.1)
    run_and_check(layer, compiled, [x])
    layer.load_state_dict({key: torch.randn_like(t) * 0.1 for key, t in layer.state_dict().items()})
    run_and_check(layer, compiled, [x])


def test_module_state_dict_loads_into_the_original() -> None:
    layer = frozen()
    compiled = fl.compile(layer)
    state = {key.removeprefix("_orig_mod."): t for key, t in compiled.state_dict().items()}
    assert state.keys() == layer.state_dict().keys()
    other = frozen()
    other.load_state_dict(state)
    x = torch.randn(1, 64, 32)
    torch.testing.assert_close(other(x), compiled(x))


def test_module_moves_and_trains() -> None:
    compiled = fl.compile(frozen())
    assert not compiled.training
    assert compiled.train().training
    wide = fl.compile(frozen().double())
    assert wide(torch.randn(1, 64, 32, dtype=torch.float64)).dtype == torch.float64


def test_module_is_copied() -> None:
    """As an average of weights is (torch.optim.swa_utils): the copy computes with its own, and has our errors."""
    compiled, x = fl.compile(frozen()), torch.randn(1, 64, 32)
    before = compiled(x)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        copied.proj.weight.mul_(0.5)
    assert torch.equal(compiled(x), before)
    run_and_check(copied._orig_mod, copied, [x])
    averaged = torch.optim.swa_utils.AveragedModel(compiled)
    averaged.update_parameters(compiled)
    assert torch.equal(averaged(x), before)
    with pytest.raises(fl.InputError):
        copied(torch.randn(1, 64, 31))


def test_module_is_pickled() -> None:
    compiled, x = fl.compile(frozen(), fallback="error"), torch.randn(2, 33, 32)
    assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), compiled(x))


def test_module_inside_a_module() -> None:
    model = nn.Sequential(OrderedDict(a=frozen(), b=nn.Tanh(), c=frozen()))
    x = torch.randn(1, 64, 32)
    run_and_check(model, fl.compile(model), [x])
    part = copy.deepcopy(model)
    part.a = fl.compile(part.a)  # type: ignore[assignment]
    torch.testing.assert_close(part(x), model(x))


def test_module_method_compiled() -> None:
    layer = frozen()
    layer.forward = fl.compile(layer.forward)  # type: ignore[method-assign]
    x = torch.randn(1, 64, 32)
    got = layer(x)
    del layer.forward
    torch.testing.assert_close(got, layer(x))


def test_module_with_hooks() -> None:
    layer = frozen()
    layer.register_forward_hook(lambda m, args, out: out + 1)
    x = torch.randn(1, 64, 32)
    torch.testing.assert_close(fl.compile(layer)(x), layer(x))


# --- torch.compile ------------------------------------------------------------------------------


def test_entry_point_is_declared() -> None:
    with open(ROOT / "pyproject.toml", "rb") as f:
        declared = tomllib.load(f)["project"]["entry-points"]["torch_dynamo_backends"]["fl_pallas"]
    module, _, name = declared.partition(":")
    assert module == "fl_pallas.api"
    assert getattr(api, name) is api.torch_backend


def test_backend_by_hand() -> None:
    run_and_check(attention, torch.compile(attention, backend=api.torch_backend), qkv())


def test_backend_options() -> None:
    f = torch.compile(sorted_attention, backend=api.torch_backend, options={"fallback": "error"})
    with pytest.raises(fl.Unsupported, match="sort"), torch.no_grad():
        f(*qkv(128))


def test_backend_by_name() -> None:
    if not any(e.name == "fl_pallas" for e in metadata.entry_points(group="torch_dynamo_backends")):
        pytest.skip("the package is not installed, so PyTorch does not find its entry point")
    run_and_check(attention, torch.compile(attention, backend="fl_pallas"), qkv())


def test_a_mask_that_pytorch_draws_is_told(unwarned: None) -> None:
    """A kernel may read a random matrix as large as the scores that PyTorch makes: never silently."""

    def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return torch.softmax(scores + torch.randn_like(scores), -1) @ v

    inputs = qkv(128)
    with pytest.warns(fl.FallbackWarning, match="randn.*a kernel reads it.*will be materialised"):
        torch.manual_seed(1)
        out = fl.compile(noisy)(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(out, noisy(*inputs))
    assert fl.explain(noisy, *inputs).kernel_count == 1


def test_a_convolution_in_front_is_not_told(unwarned: None) -> None:
    """Its result holds queries, keys and values, and may be as large as the scores of a short sequence."""

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = torch.conv1d(x, w, padding=1).mT.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT / 4).softmax(-1) @ v

    x, w = torch.randn(2, 32, 33), torch.randn(96, 32, 3) / 10
    out = fl.compile(convolved)(x, w)
    torch.testing.assert_close(out, convolved(x, w))
    explained = fl.explain(convolved, x, w)
    assert explained.kernel_count == 1 and not explained.fallbacks


# --- settings -----------------------------------------------------------------------------------


def test_config_is_checked(settings: Any) -> None:
    for name, value in (("fallback", "no"), ("road", 1), ("interpret", "auto")):
        with pytest.raises(fl.ConfigError, match=f"{name}=.*expected one of"):
            setattr(settings, name, value)
    for name, value in (("tune", -1), ("tune", True), ("cache_mb", 1.5), ("cache", None)):
        with pytest.raises(fl.ConfigError, match=f"{name}=.*expected a"):
            setattr(settings, name, value)
    with pytest.raises(fl.ConfigError, match="no setting is called 'fallbak'"):
        fl.config.merged(fallbak="torch")
    with pytest.raises(fl.ConfigError, match="no setting is called 'colour'"):
        settings.colour = "red"
    settings.tune = "off"
    assert settings.tune == 0 and settings.merged(tune="off").tune == 0


def test_config_is_followed(settings: Any) -> None:
    f = fl.compile(sorted_attention)
    settings.fallback = "error"
    with pytest.raises(fl.Unsupported, match="sort"):
        f(*qkv(128))


def test_an_option_outweighs_config(settings: Any, unwarned: None) -> None:
    settings.fallback = "error"
    with pytest.warns(fl.FallbackWarning, match="sort"):
        fl.compile(sorted_attention, fallback="torch")(*qkv(128))


CONFIG_ALONE = f"""
import sys, types
root = sys.modules["fl_pallas"] = types.ModuleType("fl_pallas")
root.__path__ = [{str(ROOT / "fl_pallas")!r}]
from fl_pallas.config import config
print(config)
"""


def in_a_fresh_process(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FL_")}
    env = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **environment,
    }
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)


def test_environment() -> None:
    done = in_a_fresh_process(
        "import fl_pallas as fl; print(fl.config)", FL_FALLBACK="error", FL_ROAD="dlpack", FL_INTERPRET="1", FL_TUNE="3"
    )
    assert done.stdout.startswith("Config(fallback='error', road='dlpack', interpret=True, tune=3"), done.stderr
    done = in_a_fresh_process(CONFIG_ALONE)
    assert done.stdout.startswith("Config(fallback='torch', road='auto', interpret=None, tune="), done.stderr
    done = in_a_fresh_process(CONFIG_ALONE, FL_INTERPRET="auto", FL_VERIFY="0", FL_TUNE="off")
    assert done.stdout.startswith("Config(fallback='torch', road='auto', interpret=None, tune=0"), done.stderr


PRECISION_SET = """
import torch, fl_pallas as fl
from fl_pallas.bridge.dlpack import float32_products
torch.{0}.fp32_precision = "tf32"
x = torch.randn(3, 8)
attend = lambda x: (x @ x.mT).softmax(-1) @ x
assert torch.allclose(fl.compile(attend, fallback="error")(x), attend(x), rtol=1e-2)
print(float32_products())
"""


@pytest.mark.parametrize("where", ["backends.cuda.matmul", "backends"])
def test_precision_of_products_may_be_set_either_way(where: str) -> None:
    """PyTorch raises where it is asked in the older words (`get_float32_matmul_precision`) for what newer ones set."""
    done = in_a_fresh_process(PRECISION_SET.format(where))
    assert done.stdout.split() == ["high"], done.stderr


@pytest.mark.parametrize(
    "name, value",
    [
        ("FL_FALLBACK", "maybe"),
        ("FL_INTERPRET", "yes"),
        ("FL_ROAD", ""),
        ("FL_TUNE", "-1"),
        ("FL_VERIFY", "auto"),
        ("FL_CACHE_MB", "off"),
    ],
)
def test_bad_environment(name: str, value: str) -> None:
    done = in_a_fresh_process(CONFIG_ALONE, **{name: value})
    assert done.returncode != 0
    assert "ConfigError" in done.stderr and value in done.stderr and "expected" in done.stderr


@pytest.mark.parametrize("verify", [False, True])
def test_verify(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(pipeline, "verify_program", checked.append)
    monkeypatch.setattr(pipeline, "verify_plan", checked.append)
    monkeypatch.setattr(fl.config, "verify", verify)
    fl.compile(attention)(*qkv())
    assert len(checked) == (3 if verify else 0)  # the program twice, its plan


def test_direct_road_is_refused_plainly() -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the direct road is a road")
    with pytest.raises(fl.Unsupported, match="road"):
        fl.compile(attention, road="direct")(*qkv())


# --- gradients ----------------------------------------------------------------------------------


def gradients(f: Callable, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    f(*leaves).square().sum().backward()
    return [x.grad for x in leaves]  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_gradients_are_right() -> None:
    x = qkv()
    for got, want in zip(gradients(fl.compile(attention), x), gradients(attention, x), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_parameters_are_trained() -> None:
    layer, x = Layer(), torch.randn(2, 64, 32)
    compiled = fl.compile(layer)
    compiled(x).square().sum().backward()
    got = [p.grad.clone() for p in layer.parameters()]  # type: ignore[union-attr]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for a, p in zip(got, layer.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_one_function_with_and_without_gradients() -> None:
    f, x = fl.compile(attention), qkv()
    run_and_check(attention, f, x)
    assert f(*(t.clone().requires_grad_() for t in x)).requires_grad
    with torch.no_grad():
        assert not f(*(t.clone().requires_grad_() for t in x)).requires_grad
    run_and_check(attention, f, x)


def test_a_gradient_warns_or_is_compiled(unwarned: None) -> None:
    """While the backward pass is not compiled, the forward pass says so; no gradient is ever lost in silence."""
    x = [t.requires_grad_() for t in qkv()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fl.compile(attention)(*x)
    assert out.requires_grad
    if not fused(attention, *x):
        assert any("gradient" in message for message in fallbacks(caught))


def test_frozen_input_among_trained_ones() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        q, k, v = qkv()
        v.requires_grad_()
        fl.compile(attention)(q, k, v).sum().backward()
    want = torch.softmax(q @ k.mT / 4, -1).sum(-2)[..., None].expand_as(v)
    torch.testing.assert_close(v.grad, want)


# --- fallbacks ----------------------------------------------------------------------------------


def test_fallback_warns_once_and_says_where(unwarned: None) -> None:
    f = fl.compile(sorted_attention)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run_and_check(sorted_attention, f, qkv(128))
        run_and_check(sorted_attention, fl.compile(sorted_attention), qkv(128))
    (message,) = fallbacks(caught)
    assert "sort" in message and "materialised" in message
    line = sorted_attention.__code__.co_firstlineno + 3
    assert f"{HERE}:{line}" in message and "torch.sort(scores" in message


def test_fallback_warns_once_whatever_the_length(unwarned: None) -> None:
    """The user hears of an operation once, not once per shape."""
    f = fl.compile(sorted_attention)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (100, 128, 160):
            f(*qkv(n))
    assert len(fallbacks(caught)) == 1, fallbacks(caught)


def test_fallback_error() -> None:
    f = fl.compile(sorted_attention, fallback="error")
    for _ in range(2):
        with pytest.raises(fl.Unsupported, match="sort") as caught:
            f(*qkv(128))
    assert caught.value.where is not None and caught.value.where.file.endswith(HERE)
    assert caught.value.where.line == sorted_attention.__code__.co_firstlineno + 3


def test_fallback_error_lets_fused_ones_pass() -> None:
    run_and_check(attention, fl.compile(attention, fallback="error"), qkv(128))


def test_fallback_warning_points_at_the_user(unwarned: None) -> None:
    """The warning's own location is a line of the user's, so that Python's filters can tell whose it is."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fl.compile(sorted_attention)(*qkv(128))
    (warning,) = (w for w in caught if issubclass(w.category, fl.FallbackWarning))
    assert warning.filename.endswith(HERE), warning.filename


def test_blow_up_that_only_an_unknown_operation_reads(unwarned: None) -> None:
    """Scores that nothing else reads are materialised all the same: the user hears of it."""
    explanation = fl.explain(only_sorted, *qkv(128))
    assert any("sort" in f.what for f in explanation.fallbacks), str(explanation)
    with pytest.raises(fl.Unsupported, match="sort"):
        fl.compile(only_sorted, fallback="error")(*qkv(128))


def stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(*torch.stack((q, k, v)).tanh())


def behind_a_memory(x: Tensor, w: Tensor, memory: Tensor) -> Tensor:
    """x [b,n,d], w [d,2d], memory [b,m,d] before the keys and values, of which the gradient is put together."""
    k, v = (torch.cat((memory, t), 1) for t in (x @ w).unflatten(-1, (2, -1)).unbind(-2))
    return attention(x, k, v)


@pytest.mark.parametrize(
    "fn, shapes", ((stacked, [(1, 2, 64, 16)] * 3), (behind_a_memory, [(2, 64, 16), (16, 32), (2, 5, 16)]))
)
def test_what_is_stacked_is_no_blow_up(fn: Callable, shapes: list[tuple[int, ...]]) -> None:
    """Tensors put together are larger than each, and no pairs of anything: nothing is said of them."""
    explanation = fl.explain(fn, *(torch.randn(s, requires_grad=True) for s in shapes))
    assert explanation.kernel_count and not explanation.fallbacks, str(explanation)


def test_part_of_a_graph_falls_back() -> None:
    """What cannot fuse does not keep the rest from fusing."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v), sorted_attention(v, k, q)

    x = qkv(128)
    explanation = fl.explain(f, *x)
    assert explanation.kernel_count == 1 and len(explanation.fallbacks) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        run_and_check(f, fl.compile(f), x)


def test_graph_break() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v)
        if out.sum().item() > 1e9:
            out = out * 2
        return attention(out, k, v)

    run_and_check(f, fl.compile(f), qkv())
    assert fused(f, *qkv()) == 2


def printing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1), -1e9)
    print("between")
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("training", [False, True])
def test_scores_that_a_graph_break_hands_on_are_told(training: bool, unwarned: None) -> None:
    """TorchDynamo cannot trace what stands between the scores and their softmax: two graphs, nothing is fused."""
    x = [t.requires_grad_(training) for t in qkv()]
    with pytest.warns(
        fl.FallbackWarning, match=r"TorchDynamo ends the graph .*test_api.py:\d+: .*materialised.*q @ k.mT"
    ):
        run_and_check(printing, fl.compile(printing), x)
    torch._dynamo.reset()
    with pytest.raises(fl.Unsupported, match="TorchDynamo ends the graph before"):
        fl.compile(printing, fallback="error")(*x)


def test_products_of_a_tensor_with_itself_that_a_graph_break_hands_on_are_told(unwarned: None) -> None:
    """Of a contrastive loss, as many write it, TorchDynamo does not know the shape."""

    def contrastive(x: Tensor) -> Tensor:
        s = x @ x.T / 0.2
        return s[~torch.eye(len(x), dtype=torch.bool, device=x.device)].view(len(x), -1).logsumexp(1).mean()

    with pytest.warns(fl.FallbackWarning, match=r"TorchDynamo ends the graph .*materialised.*x @ x.T"):
        run_and_check(contrastive, fl.compile(contrastive), [torch.randn(64, 16)])


def test_a_graph_break_hands_on_what_is_no_score(unwarned: None) -> None:
    """The layer of a model, and a result: neither is anything that would have been fused with what follows."""

    def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        wide = x @ up
        print("between")
        return torch.relu(wide) @ down

    def after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v)
        print("between")
        return out * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.FallbackWarning)
        fl.compile(layers, fallback="error")(torch.randn(4, 32, 16), torch.randn(16, 64), torch.randn(64, 16))
        run_and_check(after, fl.compile(after, fallback="error"), qkv())


def test_random_numbers() -> None:
    """What no kernel draws stays PyTorch's: the same seed gives the same numbers."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(torch.softmax(q @ k.mT + torch.randn(q.shape[-2], k.shape[-2]), -1) @ v, 0.5)

    x = qkv(128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        compiled = fl.compile(f)
        torch.manual_seed(3)
        got = compiled(*x)
        torch.manual_seed(3)
        torch.testing.assert_close(got, f(*x))
        assert not torch.equal(compiled(*x), got)


# --- shapes -------------------------------------------------------------------------------------


def test_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right at each of ten lengths, for a few captures; what is built per shape is built once."""
    captures, built = [], []
    capture, build = api.Backend.__call__, backend.realised
    monkeypatch.setattr(api.Backend, "__call__", lambda *a: captures.append(a) or capture(*a))
    monkeypatch.setattr(backend, "realised", lambda *a: built.append(a) or build(*a))
    f = fl.compile(attention)
    lengths = (64, 65, 3, 100, 1, 17, 128, 2, 33, 80)
    for n in lengths:
        run_and_check(attention, f, qkv(n))
    assert len(captures) <= 4
    for n in lengths:
        run_and_check(attention, f, qkv(n))
    seen = len(built)
    for n in lengths:
        run_and_check(attention, f, qkv(n))
    assert len(built) == seen <= len(lengths) + len(captures)


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (False, 3), (None, 2)])
def test_dynamic(dynamic: bool | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many captures three lengths take."""
    captures = []
    capture = api.Backend.__call__
    monkeypatch.setattr(api.Backend, "__call__", lambda *a: captures.append(a) or capture(*a))
    f = fl.compile(attention, dynamic=dynamic)
    for n in (64, 33, 100):
        run_and_check(attention, f, qkv(n))
    assert len(captures) == most


def test_growing_cache() -> None:
    """A decoding loop: one more key at each step."""
    f = fl.compile(attention)
    k, v = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    for _ in range(5):
        k, v = (torch.cat([x, torch.randn(1, 2, 1, 16)], 2) for x in (k, v))
        run_and_check(attention, f, [torch.randn(1, 2, 1, 16), k, v])


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(0, 2, 8, 16)] * 3, id="no batch"),
        pytest.param([(1, 2, 0, 16), (1, 2, 8, 16), (1, 2, 8, 16)], id="no queries"),
        pytest.param([(1, 2, 8, 16), (1, 2, 0, 16), (1, 2, 0, 16)], id="no keys"),
        pytest.param([(1, 2, 8, 0), (1, 2, 8, 0), (1, 2, 8, 16)], id="no head dim"),
        pytest.param([(1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 0)], id="no value dim"),
        pytest.param([(1, 2, 0, 16)] * 3, id="no sequence"),
    ],
)
def test_empty(shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(s) for s in shapes]

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 0.25, -1) @ v

    got, want = fl.compile(f)(*inputs), f(*inputs)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_a_batch_of_none_is_no_reason_to_warn() -> None:
    """Positions are as many as ever, and PyTorch makes them: of nothing that is computed."""

    def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        apart = i[:, None] - i
        scores = q @ k.mT - 0.5 ** torch.arange(1, 3)[:, None, None] * apart
        return scores.masked_fill(apart < 0, float("-inf")).softmax(-1) @ v

    f = fl.compile(alibi, fallback="error")
    for b in (2, 0):
        run_and_check(alibi, f, [torch.randn(b, 2, 33, 16) for _ in range(3)])


def test_from_full_to_empty_and_back() -> None:
    f = fl.compile(attention)
    for n in (64, 0, 64, 0, 70):
        x = qkv(n)
        torch.testing.assert_close(f(*x), attention(*x))


# --- bad input ----------------------------------------------------------------------------------


def refused(f: Callable, inputs: list[Tensor]) -> None:
    """Calling raises fl.InputError, and leaves the inputs and the function as they were."""
    before = [x.clone() if x.device.type != "meta" else x for x in inputs]
    with pytest.raises(fl.InputError):
        f(*inputs)
    for x, kept in zip(inputs, before, strict=True):
        assert x.device.type == "meta" or torch.equal(x, kept)
    run_and_check(attention, f, qkv())


@pytest.fixture(params=[False, True], ids=["new", "called"])
def compiled(request: pytest.FixtureRequest) -> Callable:
    """`attention`, before its first call or after a good one."""
    f = fl.compile(attention)
    if request.param:
        f(*qkv())
    return f


def test_shapes_that_do_not_fit(compiled: Callable) -> None:
    q, k, v = qkv()
    refused(compiled, [q, torch.randn(1, 2, 64, 17), v])
    refused(compiled, [q, k, torch.randn(1, 2, 63, 16)])


def test_what_is_said_of_shapes() -> None:
    """PyTorch's own words, the operation, both sizes and the user's line."""
    q, k, v = qkv()
    wrong = torch.randn(1, 2, 64, 17)
    with pytest.raises(RuntimeError) as eager:
        attention(q, wrong, v)
    with pytest.raises(fl.InputError) as said:
        fl.compile(attention)(q, wrong, v)
    text = str(said.value)
    assert str(eager.value) in text and "matmul of (1, 2, 64, 16) and (1, 2, 17, 64)" in text
    assert re.search(r"test_api\.py:\d+ `.*q @ k", text) and "\n" not in text and "Dynamo" not in text


def test_heads_that_do_not_fit() -> None:
    q, _, v = qkv()
    refused(fl.compile(attention), [q, torch.randn(1, 3, 64, 16), v])


def test_dtypes_that_do_not_fit(compiled: Callable) -> None:
    q, k, v = qkv()
    refused(compiled, [q, k.double(), v])
    refused(compiled, [q, k, v.half()])


def test_devices_that_do_not_fit() -> None:
    q, k, v = qkv()
    refused(fl.compile(attention), [q, k.to("meta"), v])


def test_meta_tensors() -> None:
    """All on the meta device: shapes without data, as PyTorch gives them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        out = fl.compile(attention)(*qkv(device="meta"))
    assert out.device.type == "meta" and out.shape == (1, 2, 64, 16)


def test_missing_and_unknown_arguments() -> None:
    f, (q, k, v) = fl.compile(attention), qkv()
    with pytest.raises(TypeError, match="missing|argument"):
        f(q, k)
    with pytest.raises(TypeError, match="unexpected|argument"):
        f(q, k, v, mask=None)
    run_and_check(attention, f, [q, k, v])


def test_the_users_own_error_comes_through() -> None:
    class Refusal(Exception):
        pass

    def f(q: Tensor) -> Tensor:
        if q.shape[-1] == 16:
            raise Refusal("not sixteen")
        return q

    with pytest.raises(Refusal, match="not sixteen"):
        fl.compile(f)(torch.ones(16))


def test_nan_and_infinity_in() -> None:
    q, k, v = qkv()
    q[0, 0, 3] = math.nan
    k[0, 1, 5] = math.inf
    v[0, 0, 7, 2] = -math.inf
    run_and_check(attention, fl.compile(attention), [q, k, v])


# --- mutation -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_writing_to_an_input_is_pytorchs() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        out.copy_(attention(q, k, v))
        q.mul_(2)
        return out + 1

    ours, theirs = qkv(), []
    theirs = [x.clone() for x in ours]
    mine, yours = torch.zeros(1, 2, 64, 16), torch.zeros(1, 2, 64, 16)
    got, want = fl.compile(f)(*ours, mine), f(*theirs, yours)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine, yours)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_key_cache_in_a_module() -> None:
    class Cached(nn.Module):
        keys: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 2, 64, 16))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
            self.keys[:, :, at : at + k.shape[2]] = k
            return attention(q, self.keys, v)

    ours, theirs = Cached(), Cached()
    compiled = fl.compile(ours)
    for at in (0, 8, 16):
        q, v, k = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 2, 8, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v, at), theirs(q, k, v, at))
        torch.testing.assert_close(ours.keys, theirs.keys)


def test_intermediates_may_be_written_to() -> None:
    """In place on the user's own scores: no input is touched, and it fuses."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores /= 4
        scores.masked_fill_(torch.ones(64, 64, dtype=torch.bool).triu(1), -math.inf)
        weights = scores.softmax(-1)
        weights[..., 0] *= 0.5
        return weights @ v

    x = qkv()
    run_and_check(f, fl.compile(f), x)
    assert fused(f, *x) == 1


def test_results_can_be_written_to() -> None:
    f, x = fl.compile(attention), qkv()
    want = f(*x).clone()
    f(*x).zero_()
    assert torch.equal(f(*x), want)


# --- threads ------------------------------------------------------------------------------------


def test_threads() -> None:
    f = fl.compile(attention)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            gen = torch.Generator().manual_seed(seed)
            for n in (48, 49 + seed):
                x = [torch.randn(1, 2, n, 16, generator=gen) for _ in range(3)]
                with torch.no_grad():
                    torch.testing.assert_close(f(*x), attention(*x), rtol=1e-4, atol=1e-5)
        except BaseException as failure:  # noqa: BLE001  (handed to the main thread)
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    stuck = torch.fx._symbolic_trace._is_fx_tracing_flag
    torch.fx._symbolic_trace._is_fx_tracing_flag = False
    assert not failures, failures
    assert not stuck, "traces that overlapped left PyTorch believing that it traces still"


def test_a_call_while_another_thread_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """FX's tracing flag belongs to the whole process; a call in another thread must not trip over it."""
    f, x = fl.compile(attention), qkv(40)
    f(*x)
    tracing, called = threading.Event(), threading.Event()
    original = realise.to_aten

    def slow(*args: Any) -> Any:
        monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
        tracing.set()
        called.wait(1.0)
        monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)
        return original(*args)

    monkeypatch.setattr(realise, "to_aten", slow)
    builder = threading.Thread(target=lambda: fl.compile(causal)(*x))
    builder.start()
    assert tracing.wait(60)
    try:
        torch.testing.assert_close(f(*x), attention(*x))
    finally:
        called.set()
        builder.join(60)


def test_captures_beside_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that begins while another thread traces and ends after it would put FX's patches back for good, and
    wrap every later call of a module in the process."""
    new, seen, x, module_call = fl.compile(attention), fl.compile(causal), qkv(40), torch.nn.Module.__call__
    for n in (16, 24):
        seen(*qkv(n))
    tracing, capturing, traced = threading.Event(), threading.Event(), threading.Event()
    capture, trace = api.Backend.__call__, realise.to_aten

    def slow_capture(*args: Any) -> Any:
        capturing.set()
        traced.wait(1.0)
        return capture(*args)

    def slow_trace(*args: Any) -> Any:
        if not tracing.is_set():
            make_fx(lambda t: t + (tracing.set() or capturing.wait(1.0)))(torch.zeros(1))
            traced.set()
        return trace(*args)

    monkeypatch.setattr(api.Backend, "__call__", slow_capture)
    monkeypatch.setattr(realise, "to_aten", slow_trace)
    threads = [threading.Thread(target=f, args=x) for f in (new, seen)]
    with compile_lock:
        for t in threads:
            t.start()  # the first waits for TorchDynamo's lock, the second needs no capture
        tracing.wait(1.0)
    for t in threads:
        t.join(60)
    assert tracing.is_set() and capturing.is_set()
    assert torch.nn.Module.__call__ is module_call and not torch.fx._symbolic_trace._is_fx_tracing_flag


def test_jax_settings_stay() -> None:
    """JAX's 64-bit mode and PyTorch's switches are as the user left them."""
    import jax.numpy as jnp

    before = jnp.arange(3).dtype, torch.is_grad_enabled(), torch.get_default_dtype()
    fl.compile(attention)(*qkv(dtype=torch.float64))
    assert (jnp.arange(3).dtype, torch.is_grad_enabled(), torch.get_default_dtype()) == before


# --- explain ------------------------------------------------------------------------------------


def test_explain_fused() -> None:
    explanation = fl.explain(attention, *qkv(128))
    assert isinstance(explanation, fl.Explanation)
    assert explanation.kernel_count == len(explanation.kernels) == 1
    assert not explanation.fallbacks
    text = str(explanation)
    assert "1 fused kernel" in text and "kernel r0_k0" in text and "for j0 in" in text
    assert re.search(r"fused.*unfused", text, re.S) and "largest intermediate" in text


def test_explain_ir() -> None:
    explanation = fl.explain(attention, *qkv(128))
    everything = explanation.ir()
    stages = re.findall(r"^=== graph 0: (\w+)$", everything, re.M)
    assert {"program", "resolve_views", "grow_regions", "fuse", "plan"} <= set(stages)
    for stage in set(stages):
        alone = explanation.ir(stage)
        assert alone in everything or stages.count(stage) > 1
        assert re.findall(r"^=== graph 0: (\w+)$", alone, re.M) == [stage] * stages.count(stage)
    assert "for j0 in" in explanation.ir("plan") and "softmax" in explanation.ir("program")


def test_explain_of_an_unknown_stage() -> None:
    assert fl.explain(attention, *qkv(128)).ir("no such stage") == ""


def test_explain_fallback_says_where() -> None:
    explanation = fl.explain(sorted_attention, *qkv(128))
    assert explanation.kernel_count == 0
    (fallback,) = explanation.fallbacks
    assert "sort" in fallback.what and fallback.why and fallback.bytes == 2 * 128 * 128 * 4
    assert fallback.where is not None
    assert fallback.where.file == __file__
    assert fallback.where.line == sorted_attention.__code__.co_firstlineno + 3
    assert "torch.sort" in fallback.where.code
    assert "sort" in str(explanation) and "128.0 KiB" in str(explanation)


def test_explain_takes_what_compile_gave() -> None:
    x = qkv(128)
    assert fused(fl.compile(attention), *x) == fused(attention, *x) == 1
    layer = frozen()
    assert fused(fl.compile(layer), torch.randn(2, 64, 32)) == 1


def test_explain_takes_compiled_methods() -> None:
    class Model:
        scale = 0.2

        @fl.compile
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.mT * self.scale, -1) @ v

        @classmethod
        @fl.compile
        def plain(cls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.mT * cls.scale, -1) @ v

    for method in (Model().attend, Model.plain):
        assert fl.explain(method, *qkv()).kernel_count == 1


def test_explain_looks_into_what_is_compiled_inside() -> None:
    inner, x = fl.compile(attention), qkv()
    assert fl.explain(lambda q, k, v: inner(q, k, v) + 1, *x).kernel_count == 1
    assert fl.explain(functools.partial(inner, x[0]), *x[1:]).kernel_count == 1
    layer = fl.compile(frozen())
    assert layer, "a module without a length is true, as PyTorch's are: PyTorch 2.11 asks"
    outer = nn.Sequential(layer, nn.GELU())
    assert fl.explain(outer, torch.randn(2, 33, 32)).kernel_count == 1


@pytest.mark.parametrize("grad", [False, True])
def test_results_that_are_views_lie_as_pytorchs(grad: bool, device: torch.device) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in x.chunk(3, -1))
        out = (q @ k.mT).softmax(-1) @ v
        same = F.scaled_dot_product_attention(q, k, v)
        return out, out.mT, same, same.transpose(1, 2)

    x = torch.randn(2, 40, 96, device=device, requires_grad=grad)
    found, wanted = fl.compile(fn)(x), fn(x)
    assert [o.stride() for o in found] == [o.stride() for o in wanted]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_explain_says_what_kernels_store_between_them() -> None:
    """A gate from all channels of a message, times that message: the gates of all pairs are kept."""

    def messages(h: Tensor, w: Tensor, u: Tensor) -> Tensor:
        m = F.silu(torch.tanh(h[:, None] + h[None]) @ w)
        return (m * torch.sigmoid(m @ u)[..., None]).sum(1)

    n = 300
    explanation = fl.explain(messages, torch.randn(n, 8), torch.randn(8, 40), torch.randn(40))
    stored = [f for f in explanation.fallbacks if f.fused]
    assert explanation.kernel_count == 2 and [f.bytes for f in stored] == [4 * n * n], str(explanation)
    assert "is fused in parts" in str(stored[0])


def exponentials(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Attention free of products: exponentials of w[i, j] + k[j, d], one for each feature."""
    e = torch.exp(w[None, :, :, None] + k[:, None])
    return q.sigmoid() * (e * v[:, None]).sum(2) / e.sum(2)


def test_exponentials_of_a_table() -> None:
    n, d = 64, 8
    inputs = (*(torch.randn(1, n, d) for _ in range(3)), torch.randn(n, n))
    run_and_check(exponentials, fl.compile(exponentials, fallback="error"), inputs)
    assert fl.explain(exponentials, *inputs).kernel_count == 1


def rows_of_a_table_added(x: Tensor, table: Tensor) -> Tensor:
    return torch.relu(x[:, :, None] + table).mean(2)


def test_what_pytorch_puts_together_is_told(unwarned: None) -> None:
    """No kernel takes it: larger than all that is given and returned, it is none the less reported."""
    b, n, m, d = 2, 50, 20, 16
    explanation = fl.explain(rows_of_a_table_added, torch.randn(b, n, d), torch.randn(m, d))
    assert [f.bytes for f in explanation.fallbacks] == [4 * b * n * m * d], str(explanation)


def test_numbers_beyond_float32() -> None:
    """The lowest number of a mask, scaled: infinite, as in PyTorch, and no warning."""

    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        mask = torch.where(i[:, None] >= i, 0.0, torch.finfo(q.dtype).min)
        return ((q @ k.mT + mask) * 1.5).softmax(-1) @ v

    run_and_check(scaled, fl.compile(scaled, fallback="error"), qkv(40))


def test_a_program_too_long_to_plan(monkeypatch: pytest.MonkeyPatch, unwarned: None) -> None:
    monkeypatch.setattr(build, "MAX_STEPS", 2)
    with pytest.warns(fl.FallbackWarning, match="more than 2 steps"):
        run_and_check(causal, fl.compile(causal), qkv(40))
    with pytest.raises(fl.Unsupported, match="more than 2 steps"):
        fl.compile(causal, fallback="error")(*qkv(40))


def test_a_program_too_deep_to_plan(monkeypatch: pytest.MonkeyPatch, unwarned: None) -> None:
    def deep(*args: Any, **kwargs: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr(realise, "schedule", deep)
    with pytest.warns(fl.FallbackWarning, match="too long to be written"):
        run_and_check(causal, fl.compile(causal), qkv(40))


def test_fifty_steps() -> None:
    """Sums that each build on the last nest deeper than Python's limit: planned in one kernel all the same."""

    def halved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = q @ k.mT
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        for _ in range(50):
            middle = (low + high) / 2
            over = (x > middle).sum(-1, keepdim=True) > 4
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        return (x >= low).to(x.dtype) @ v

    with torch.no_grad(), unrun():
        explanation = fl.explain(halved, *qkv(40))
    assert explanation.kernel_count == 1 and len(explanation.ir("fuse")) < 20_000
    assert sys.getrecursionlimit() < backend.DEPTH


def test_additive_masks_have_an_interior() -> None:
    def additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        return (q @ k.mT + torch.where(i[:, None] >= i, 0.0, -torch.inf)).softmax(-1) @ v

    (kernel,) = fl.explain(additive, *(torch.randn(1, 1, 257, 16) for _ in range(3))).kernels
    assert kernel.loops[0].interior is not None


def test_padding_mask_of_a_whole_row_at_the_lowest_number() -> None:
    """A mask given as data, with a row that sees nothing: PyTorch spreads it over all keys."""

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 100, 100), lowest).triu(1)
    mask[:, :, :, :3] = lowest
    run_and_check(masked, fl.compile(masked), (*(torch.randn(1, 2, 100, 16) for _ in range(3)), mask))


def test_explain_neither_warns_nor_raises(settings: Any, unwarned: None) -> None:
    settings.fallback = "error"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.explain(sorted_attention, *qkv(128))


def test_explain_does_not_use_up_the_warning(unwarned: None) -> None:
    """Asking beforehand does not silence the warning of the real run."""
    fl.explain(sorted_attention, *qkv(128))
    with pytest.warns(fl.FallbackWarning, match="sort"):
        fl.compile(sorted_attention)(*qkv(128))


def test_explain_with_gradients() -> None:
    explanation = fl.explain(attention, *(t.requires_grad_() for t in qkv(128)))
    assert explanation.kernel_count or any("gradient" in f.why for f in explanation.fallbacks)


def test_explain_keywords_and_text_of_markup() -> None:
    """Brackets in IR text are no markup of the report's."""
    q, k, v = qkv(128)
    text = str(fl.explain(causal, q, k, v=v, scale=0.5))
    assert re.search(r"m0\[x\d, x\d\] = max\(m0\.old", text)


def test_explain_fallback_text_of_markup() -> None:
    text = str(fl.explain(sorted_attention, *qkv(128)))
    assert "ordered = torch.sort(scores, dim=-1).values" in " ".join(text.split())


def test_public_names() -> None:
    assert set(fl.__all__) <= set(dir(fl))
    for error in (fl.ConfigError, fl.InputError, fl.Unsupported):
        assert issubclass(error, fl.FlPallasError)


def test_positions_of_a_gather_are_computed_inside() -> None:
    """As large as the scores, and a load inside of the index of another load; a kernel stores what is gathered from."""

    def gathered(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        position = (i[:, None] - i + 16).clamp(0, 31)
        by_position = torch.gather(q @ table.mT, -1, position.expand(*q.shape[:-1], -1))
        return (q @ k.mT + by_position).softmax(-1) @ v

    (graph,) = fl.explain(gathered, *qkv(100), torch.randn(32, 16)).graphs
    table, _ = graph.kernels
    assert [s.shape[-2:] for s in table.stores] == [(100, 32)]
    assert not any("clamp" in name for name, _ in graph.left)


@pytest.mark.parametrize("kind", ["function", "module"])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "dual"])
def test_transforms(kind: str, transform: str, unwarned: None, device: torch.device) -> None:
    """They see through PyTorch's own operations alone: it computes, and says so; plain calls after it are fused."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 4).softmax(-1) @ v

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v)

    def transformed(fn: Callable[..., Tensor]) -> Tensor:
        if transform == "grad":
            return torch.func.grad(lambda x: fn(x, k, v).sum())(q)
        if transform == "vmap":
            return torch.func.vmap(fn)(q, k, v)
        if transform == "jvp":
            return torch.func.jvp(lambda x: fn(x, k, v), (q,), (k,))[1]
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(fn(forward_ad.make_dual(q, k), k, v)).tangent
            assert tangent is not None
            return tangent.clone()

    q, k, v = (torch.randn(2, 40, 16, device=device) for _ in range(3))
    compiled = fl.compile(attention if kind == "function" else Attention())
    with pytest.warns(fl.FallbackWarning, match="transforms"):
        found = transformed(compiled)
    torch.testing.assert_close(found, transformed(attention))
    assert fl.explain(compiled, q, k, v).kernel_count == 1
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    strict = fl.compile(attention if kind == "function" else Attention(), fallback="error")
    with pytest.raises(fl.Unsupported, match="transforms"):
        transformed(copy.deepcopy(strict))


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x)
        return (q @ q.mT).softmax(-1) @ q


@pytest.mark.parametrize(
    "fn, shape, operation, code",
    [
        (OneLayer(), (2, 50, 30), "linear", "q = self.layer(x)"),
        (lambda q: torch.cat([q, q[:1]], 1) @ q.mT, (2, 50, 16), "cat", "torch.cat"),
        (lambda q: F.layer_norm(q @ q.mT, (7,)) @ q, (2, 50, 16), "layer_norm", "F.layer_norm"),
    ],
)
def test_refused_arguments_are_told_by_operation_and_line(
    fn: Callable, shape: tuple[int, ...], operation: str, code: str
) -> None:
    with pytest.raises(fl.InputError) as said:
        fl.compile(fn)(torch.randn(shape))
    assert f"; {operation} of (" in str(said.value) and code in str(said.value) and "test_api.py" in str(said.value)


def test_what_torch_compiled_already(device: torch.device) -> None:
    module, x = OneLayer().to(device), torch.randn(2, 50, 32, device=device)
    torch.testing.assert_close(fl.compile(torch.compile(module))(x), module(x), rtol=1e-4, atol=1e-5)


def to_a_power(x: Tensor, t: float) -> Tensor:
    return (x @ x.T * t).softmax(-1) @ x / (1 + t**2)


def test_numbers_that_only_torch_dynamo_refuses(unwarned: None) -> None:
    """To it they are symbols from their second value on, and no power of a negative one is known."""
    x, compiled = torch.randn(40, 16), fl.compile(to_a_power)
    for t in (0.25, 0.3):
        torch.testing.assert_close(compiled(x, t), to_a_power(x, t))
    with pytest.warns(fl.FallbackWarning, match="TorchDynamo cannot trace it for these arguments"):
        torch.testing.assert_close(compiled(x, -0.5), to_a_power(x, -0.5))
