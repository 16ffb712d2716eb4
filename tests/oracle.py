"""Is a compiled output as good as PyTorch's? The judge is the same program in float64.

The reference runs the user's function on the *same rounded inputs*, upcast; integers and masks stay as they are.
An output passes when its relative error is at most 1.5 times eager's own, or below a floor for its dtype.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

EAGER_FACTOR = 1.5
FLOORS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-9, torch.float16: 2**-12}
"""The largest relative error that passes whatever eager's is."""
# Root mean square of a reference that is zero but for rounding: the gradient of what softmax takes off again.
ZERO = 1e-14
# Results or gradients of fewer numbers are judged by several draws: in one, the error against eager's is luck.
FEW, DRAWS = 512, 8

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _Float64Mode(TorchDispatchMode):
    """Turns every narrow dtype that an operation names (`.float()`, `dtype=torch.float32`) into float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*map(_widen, args), **{key: _widen(x) for key, x in (kwargs or {}).items()})


def _widen(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


@contextmanager
def float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64Mode():
            yield
    finally:
        torch.set_default_dtype(default)


def reference(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """fn in float64 throughout, casts and constants inside it included."""
    if isinstance(fn, nn.Module):
        fn = copy.deepcopy(fn).double()
    with torch.no_grad(), float64():
        return fn(*(x.double() if x.is_floating_point() else x for x in inputs))


@dataclass(frozen=True)
class Error:
    """One output's verdict: relative errors against float64 over finite entries, and the bound it has to meet."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    compiled: float
    eager: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.compiled <= self.bound

    def __str__(self) -> str:
        return (
            f"{self.name} {list(self.shape)} {self.dtype}: relative error {self.compiled:.3g}, "
            f"eager's {self.eager:.3g}, bound {self.bound:.3g}"
        )


def leaves(out: Any, name: str = "out") -> dict[str, Tensor]:
    """The tensors of a result, by their path in it."""
    if isinstance(out, Tensor):
        return {name: out}
    items = out.items() if isinstance(out, Mapping) else enumerate(out)
    return {path: leaf for key, item in items for path, leaf in leaves(item, f"{name}[{key!r}]").items()}


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| over entries where both are finite; by root mean square where ref is all zero, or as
    near to it as sums in float64 come.
    """
    out, ref = out.double(), ref.double()
    finite = out.isfinite() & ref.isfinite()
    out, ref = out[finite], ref[finite]
    if not ref.numel():
        return 0.0
    one = ref.numel() ** 0.5
    norm = ref.norm().item()
    return (out - ref).norm().item() / (norm if norm > ZERO * one else one)


def errors(fn: Callable[..., Any], inputs: Sequence[Tensor], out: Any) -> list[Error]:
    """The verdict on each output of a compiled run; raises AssertionError where they can't be compared at all."""
    return _judge(*_compared(fn, inputs, out), _floor(inputs))


def _compared(fn: Callable[..., Any], inputs: Sequence[Tensor], out: Any) -> tuple[dict[str, Tensor], ...]:
    """The tensors of `out`, of PyTorch's result, and of the reference."""
    with torch.no_grad():
        eager = fn(*inputs)
    assert type(out) is type(eager), f"returned a {type(out).__name__}, PyTorch a {type(eager).__name__}"
    outs, eagers, refs = leaves(out), leaves(eager), leaves(reference(fn, inputs))
    assert outs.keys() == eagers.keys(), f"returned {list(outs)}, PyTorch {list(eagers)}"
    return outs, eagers, refs


def _pooled(draws: Sequence[tuple[dict[str, Tensor], ...]]) -> list[dict[str, Tensor]]:
    """What `_compared` gives for several draws, as one."""
    return [{name: torch.stack([d[name] for d in group]) for name in group[0]} for group in zip(*draws, strict=True)]


def _floor(inputs: Sequence[Tensor]) -> float:
    """What passes for a result that is not a float: the narrowest input's."""
    return max((FLOORS[x.dtype] for x in inputs if x.dtype in FLOORS), default=FLOORS[torch.float32])


def _judge(
    outs: Mapping[str, Tensor], eagers: Mapping[str, Tensor], refs: Mapping[str, Tensor], floor: float
) -> list[Error]:
    verdicts = []
    for name, ours in outs.items():
        theirs, ref = eagers[name], refs[name]
        for what in ("shape", "dtype", "device"):
            got, want = getattr(ours, what), getattr(theirs, what)
            assert got == want, f"{name}: {what} {got}, PyTorch's {want}"
        for pattern in ("isnan", "isposinf", "isneginf"):
            got, want = getattr(torch, pattern)(ours), getattr(torch, pattern)(theirs)
            assert torch.equal(got, want), (
                f"{name}: {pattern} holds at {int(got.sum())} entries, in PyTorch at {int(want.sum())}; "
                f"first difference at {(got != want).nonzero()[0].tolist()}"
            )
        eager_error = relative_error(theirs, ref)
        bound = max(EAGER_FACTOR * eager_error, FLOORS.get(ours.dtype, floor))
        verdicts.append(Error(name, tuple(ours.shape), ours.dtype, relative_error(ours, ref), eager_error, bound))
    return verdicts


def describe(inputs: Sequence[Tensor]) -> str:
    """Shapes and dtypes of the inputs, in one line."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in inputs)


def reproduction() -> str:
    """The command that runs the present test alone."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    return f"python -m pytest '{test}'" if test else "not run by pytest"


def check(fn: Callable[..., Any], inputs: Sequence[Tensor], out: Any, *, name: str = "") -> None:
    """Assert that `out` is as good as fn(*inputs) in PyTorch."""
    _assert_ok(lambda: errors(fn, inputs, out), fn, inputs, name)


def _by_luck(verdicts: Sequence[Error]) -> bool:
    """Whether something failed, and nothing that is large enough for that to mean much."""
    wrong = [e for e in verdicts if not e.ok]
    return bool(wrong) and all(math.prod(e.shape) < FEW for e in wrong)


def _assert_ok(judge: Callable[[], list[Error]], fn: Callable[..., Any], inputs: Sequence[Tensor], name: str) -> None:
    name = name or getattr(fn, "__name__", type(fn).__name__)
    where = f"variant {name}\ninputs {describe(inputs)}\nreproduce: {reproduction()}"
    try:
        verdicts = judge()
    except AssertionError as failure:
        raise AssertionError(f"{failure}\n{where}") from None
    wrong = [str(e) for e in verdicts if not e.ok]
    assert not wrong, "\n".join([*wrong, where])


def run_and_check(
    fn: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    name: str = "",
    draw: Callable[[int], Sequence[Tensor]] | None = None,
) -> Any:
    """Run `compiled`, check its outputs and that it left its inputs alone; returns the outputs.

    Args:
      draw: inputs by seed, for outputs of so few numbers that one draw says little.
    """
    before = [x.clone() for x in inputs]
    out = compiled(*inputs)
    for index, (x, kept) in enumerate(zip(inputs, before, strict=True)):
        if x.is_floating_point() and x.itemsize == 1:
            x, kept = x.float(), kept.float()  # PyTorch compares no floats of eight bits
        same = torch.equal(x.nan_to_num(), kept.nan_to_num()) and torch.equal(x.isnan(), kept.isnan())
        assert same, f"{name}: input {index} was written to\nreproduce: {reproduction()}"

    def judge() -> list[Error]:
        verdicts = errors(fn, inputs, out)
        if draw is None or not _by_luck(verdicts):
            return verdicts
        draws = [draw(seed) for seed in range(DRAWS)]
        return _judge(*_pooled([_compared(fn, given, compiled(*given)) for given in draws]), _floor(inputs))

    _assert_ok(judge, fn, inputs, name)
    return out


def gradient_errors(
    fn: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Tensor], draws: int = 1
) -> list[Error]:
    """The verdict on the gradient of each float input and parameter, for random incoming gradients.

    Args:
      draws: of incoming gradients; errors are of all gradients together.

    Raises: AssertionError where they can't be compared at all.
    """
    with torch.no_grad():
        results = leaves(fn(*inputs))
    generator = torch.Generator().manual_seed(1)
    exact = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    upcast = [x.double() if x.is_floating_point() else x for x in inputs]
    found = []
    for _ in range(draws):
        # Rounded as the outputs are, so that the reference is given the same numbers.
        tangents = {
            name: torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t) for name, t in results.items()
        }
        outs = _gradients(fn, compiled, inputs, tangents)
        with _narrow_sdpa():
            eagers = _gradients(fn, fn, inputs, tangents)
        with float64():
            refs = _gradients(exact, exact, upcast, {name: t.double() for name, t in tangents.items()})
        if any(t is not None and (t.isnan() > r.isnan()).any() for t, r in zip(eagers.values(), refs.values())):
            # PyTorch's fused kernels are of several minds about rows that see nothing.
            with _narrow_sdpa(), sdpa_kernel(SDPBackend.MATH):
                eagers = _gradients(fn, fn, inputs, tangents)
        for name, theirs in eagers.items():
            ours = outs[name]
            # Compiled code returns zeros where PyTorch can tell that nothing depends on an input.
            alike = ours is not None if theirs is not None else ours is None or not ours.any()
            assert alike, f"{name}: gradient is {'None' if ours is None else 'not None'}, unlike PyTorch's"
        asked = [name for name, theirs in eagers.items() if theirs is not None]
        found.append(tuple({name: group[name] for name in asked} for group in (outs, eagers, refs)))
    return _judge(*_pooled(found), _floor(inputs))  # type: ignore[arg-type]


@contextmanager
def _narrow_sdpa() -> Iterator[None]:
    """Where PyTorch's scaled_dot_product_attention takes plain operations, they are in the dtype that it is given: it
    would take float32 and be judged by the rounding of its result alone, which no fused kernel of PyTorch's meets.
    """
    kept = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(kept)


def _gradients(
    fn: Callable[..., Any], call: Callable[..., Any], inputs: Sequence[Tensor], tangents: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Gradients of fn's inputs and parameters through `call`, by name."""
    given = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    asked = {f"gradient of input {n}": x for n, x in enumerate(given) if x.requires_grad}
    if isinstance(fn, nn.Module):
        asked |= {f"gradient of {name}": p for name, p in fn.named_parameters()}
    outs = {name: t for name, t in leaves(call(*given)).items() if t.requires_grad}
    found = torch.autograd.grad(
        list(outs.values()), list(asked.values()), [tangents[name] for name in outs], allow_unused=True
    )
    return dict(zip(asked, found))


def check_gradients(
    fn: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Tensor], *, name: str = ""
) -> None:
    """Assert that `compiled` differentiates as well as fn does in PyTorch."""

    def judge() -> list[Error]:
        verdicts = gradient_errors(fn, compiled, inputs)
        return gradient_errors(fn, compiled, inputs, DRAWS) if _by_luck(verdicts) else verdicts

    _assert_ok(judge, fn, inputs, name)
