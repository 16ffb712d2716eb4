"""Positions of extrema, and what goes by them: exact, in one pass, with the gradients that PyTorch gives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check_gradients
from tests.unrun import explain


def whole(seed: int, *shape: int, most: int = 2) -> Tensor:
    """Whole numbers, whose products are exact in any order, and equal each other often."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def kernels(fn: Callable, *inputs: Tensor) -> int:
    found = explain(fn, *inputs)
    assert not found.fallbacks, found.fallbacks
    return found.kernel_count


def assert_alike(fn: Callable, inputs: list[Tensor], device: torch.device) -> None:
    """The same as PyTorch's on the CPU, to the bit."""
    moved = [t.to(device) for t in inputs]
    made, wanted = fl.compile(fn, fallback="error")(*moved), fn(*inputs)
    pairs = zip(made, wanted, strict=True) if isinstance(wanted, tuple) else [(made, wanted)]
    for a, b in pairs:
        assert torch.equal(a.cpu().nan_to_num(7), b.nan_to_num(7)) and a.dtype == b.dtype
    assert kernels(fn, *moved) == 1


def masked(q: Tensor, k: Tensor) -> Tensor:
    """Causal, the third row blind: the first of equals is its place."""
    i = torch.arange(k.shape[-2], device=q.device)
    return (q @ k.mT).masked_fill((i > i[:, None]) | (i[:, None] == 2), -math.inf).argmax(-1)


POSITIONS: dict[str, Callable] = {
    "argmax": lambda q, k: (q @ k.mT / 4).argmax(-1),
    "argmin": lambda q, k: (q @ k.mT).argmin(-1, keepdim=True),
    "max": lambda q, k: tuple((q @ k.mT).max(-1)),
    "min": lambda q, k: tuple((q @ k.mT).min(1)),
    "masked": masked,
    "count": lambda q, k: ((s := q @ k.mT) == s.amax(-1, keepdim=True)).sum(-1),
    "at_least": lambda q, k: ((s := q @ k.mT) >= s.amax(-1, keepdim=True)).sum(-1),
    "nearest": lambda q, k: ((q[:, :, None] - k[:, None]) ** 2).sum(-1).argmin(-1),
}


def test_positions_of_what_rows_are_shifted_by(device: torch.device) -> None:
    """What a row's scores are taken from, inside of a sum, does not move their maximum: it equals one of them."""

    def of_the_nearest(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        s = q @ k.mT
        s = s - s.mean(-1, keepdim=True) + bias
        return (s == s.amax(-1, keepdim=True)).to(v.dtype) @ v

    inputs = [t.to(device) for t in (*torch.randn(3, 2, 40, 16), torch.randn(40))]
    made = fl.compile(of_the_nearest)(*inputs)
    assert torch.allclose(made, of_the_nearest(*inputs), atol=1e-5)


def largest(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """A product with a number, and a sum, that one instruction may do where scores are computed for one reader."""
    s = q @ k.mT * 0.3 + bias
    return s.masked_fill(~(s > 0), -math.inf).amax(-1)


def largest_weight(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    s = q @ k.mT * 0.3 + bias
    w = s.masked_fill(torch.tanh(s) < -0.5, -math.inf).softmax(-1)
    return w @ k / w.amax(-1, keepdim=True)


@pytest.mark.parametrize("fn", [largest, largest_weight])
def test_scores_round_alike_where_they_are_compared(fn: Callable[..., Tensor], device: torch.device) -> None:
    made = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(s, generator=made).to(device) for s in ((2, 24, 8), (2, 24, 8), (24, 24)))
    check_gradients(fn, fl.compile(fn, dynamic=False), inputs)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("n", [3, 100, 257])
def test_positions_are_exact(name: str, n: int, device: torch.device) -> None:
    assert_alike(POSITIONS[name], [whole(0, 2, n, 16), whole(1, 2, n, 16)], device)


def test_a_position_among_many_keys(device: torch.device) -> None:
    """A few queries: the keys are shared out, and parts are merged."""
    q, k = whole(0, 1, 2, 16), whole(1, 1, 5000, 16)
    made = fl.compile(POSITIONS["argmax"], fallback="error")(q.to(device), k.to(device))
    assert torch.equal(made.cpu(), POSITIONS["argmax"](q, k))


def test_the_position_of_nan(device: torch.device) -> None:
    q, k = whole(0, 2, 40, 16), whole(1, 2, 40, 16)
    k[0, 33], k[0, 35], q[1, 3] = math.nan, math.nan, math.nan
    assert_alike(POSITIONS["argmax"], [q, k], device)


SUMS: dict[str, Callable] = {
    "equal": lambda q, k, v: ((s := q @ k.mT) == s.amax(-1, keepdim=True)).to(v.dtype) @ v,
    "shared": lambda q, k, v: (m := ((s := q @ k.mT) >= s.amax(-1, True)).to(v.dtype)) @ v / m.sum(-1, True),
    "others masked": lambda q, k, v: ((s := q @ k.mT) * 0 + 1).masked_fill(s < s.amax(-1, True), 0.0) @ v,
    "most": lambda q, k, v: ((s := (q @ k.mT).softmax(-1)) == s.amax(-1, keepdim=True)).to(v.dtype) @ v,
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_what_equals_the_maximum(name: str, device: torch.device) -> None:
    """Equal weights may differ in the last bit in PyTorch, equal scores do not."""
    inputs = [whole(n, 2, 100, 16, most=2 + n) for n in range(3)]
    exact = SUMS["shared" if name == "shared" else "equal"]
    made = fl.compile(SUMS[name], fallback="error")(*(t.to(device) for t in inputs))
    assert torch.allclose(made.cpu(), exact(*inputs), rtol=1e-6)
    assert kernels(SUMS[name], *(t.to(device) for t in inputs)) == 1


def test_codes_are_looked_up(device: torch.device) -> None:
    """Vector quantisation: positions go on to PyTorch's lookup."""

    def quantised(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        place = ((x * x).sum(-1, keepdim=True) - 2 * x @ codes.T + (codes * codes).sum(-1)).argmin(-1)
        return F.embedding(place, codes), place

    assert_alike(quantised, [whole(0, 100, 16), whole(1, 64, 16)], device)


def of_max(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).amax(-1)


GRADIENTS: dict[str, Callable] = {
    "amax": of_max,
    "amin of columns": lambda q, k: (q @ k.mT).amin(-2),
    "max": lambda q, k: (q @ k.mT).max(-1).values,
    "relu": lambda q, k: torch.relu(q @ k.mT - 20).amax(-1),
    "clamped": lambda q, k: (q @ k.mT).clamp(-1, 1).amin(-1),
    "twice": lambda q, k: (q @ k.mT).amax(-1).amax(-1),
    "the second": lambda q, k: (s := q @ k.mT).masked_fill(s == s.amax(-1, keepdim=True), -99.0).amax(-1),
    "max-plus": lambda q, k: ((q @ k.mT)[..., None] + k[:, None]).amax(-2),
    "both ends": lambda q, k: (s := q @ k.mT).amax(-1) * s.amin(-1),
}


@pytest.mark.parametrize("drawn", ["whole", "normal"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_go_where_pytorchs_do(name: str, drawn: str, device: torch.device) -> None:
    """Equals share the gradient; what is computed again need not equal what it was."""
    q, k = whole(0, 2, 70, 16), whole(1, 2, 70, 16)
    if drawn == "normal":
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(2, 70, 16, generator=generator) for _ in range(2))
        k[:, 40:50] = k[:, :10]
    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.FallbackWarning)
        check_gradients(GRADIENTS[name], fl.compile(GRADIENTS[name]), [q.to(device), k.to(device)])


@pytest.mark.parametrize("largest", [lambda s: s.max(1).values, lambda s: s.amax(1)])
def test_as_many_maxima_as_scores_are_pytorchs(largest: Callable, device: torch.device) -> None:
    """The positions of maxima over heads would be as large as the scores of a head: none are stored."""

    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return largest(q @ k.mT).softmax(-1) @ v

    q, k = (torch.randn(2, 4, 70, 4, device=device) for _ in range(2))
    v = torch.randn(2, 70, 4, device=device)
    with pytest.raises(fl.Unsupported, match="as many maxima as scores"):
        fl.compile(pooled, fallback="error")(*(t.clone().requires_grad_() for t in (q, k, v)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        check_gradients(pooled, fl.compile(pooled), [q, k, v])


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_gradients_of_nan_and_infinity(special: float, device: torch.device) -> None:
    q, k = (t.to(device).requires_grad_() for t in (whole(0, 2, 20, 16).abs() + 1, whole(1, 2, 20, 16)))
    with torch.no_grad():
        k[0, 3] = special
    for made, wanted in zip(
        torch.autograd.grad(fl.compile(of_max, fallback="error")(q, k).sum(), (q, k)),
        torch.autograd.grad(of_max(q, k).sum(), (q, k)),
        strict=True,
    ):
        assert torch.equal(made.isnan(), wanted.isnan()) and torch.equal(made.isinf(), wanted.isinf())


def test_none_that_equals_its_maximum_is_one(device: torch.device) -> None:
    """XLA computes these weights once for their maximum and once more for what is compared with it: where the two
    differ in the last bit, the gradient is that of the position."""

    def largest(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.cat([t.softmax(-1) for t in (q, -q)], -1) @ k.mT
        return (scores / scores.sum(-1, keepdim=True)).amax(-1)

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(1, 2, 33, d, generator=generator).bfloat16().to(device) for d in (16, 32))
    check_gradients(largest, fl.compile(largest), [q, k])


def test_scores_scaled_by_nothing_are_equal(device: torch.device) -> None:
    """A factor that may be 0 stays: all scores of such a row equal their maximum."""

    def share(q: Tensor, k: Tensor, v: Tensor, by: Tensor) -> Tensor:
        s = q @ k.mT * by.relu()
        return (s == s.amax(-1, keepdim=True)).to(v.dtype) @ v

    inputs = [*(whole(n, 2, 50, 16) for n in range(3)), torch.arange(-25.0, 25.0)[:, None]]
    made = fl.compile(share, fallback="error")(*(t.to(device) for t in inputs))
    assert torch.allclose(made.cpu(), share(*inputs))


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k: (q @ k.mT).amax((-1, -2)),
        lambda q, k: (q @ k.mT / 4).softmax(-1).amax((1, 2)),  # of weights near 1, 1 - p would be all error
        lambda q, k: ((s := q[0] @ k[0].mT) * (s == s.amax(-1))).sum(-1) + s.logsumexp(-1),  # another row's maximum
    ],
)
def test_other_maxima_are_pytorchs(fn: Callable, device: torch.device) -> None:
    inputs = [torch.randn(2, 40, 16, device=device) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        check_gradients(fn, fl.compile(fn), inputs)


def gated_twice(q: Tensor, k: Tensor) -> Tensor:
    """Weights that are the difference of two softmaxes: increasing with no score."""
    s = q @ k.mT / 3 * torch.sigmoid(q[..., :1] + k[..., :1].mT)
    return s.softmax(-1) - 0.3 * (-s).softmax(-1)


def test_the_place_is_found_where_the_maximum_is(device: torch.device) -> None:
    """A further loop would compute the weights again, none of them equal to the maximum to the last bit perhaps."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, 37, 8, generator=generator).to(device) for _ in range(2))

    def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        p = gated_twice(q, k)
        return p.argmax(-1), p.amax(-1)

    (graph,) = explain(places, q, k).graphs
    assert [len(p.loops) for p in graph.kernels] == [2]
    found, _ = fl.compile(places)(q, k)
    assert torch.equal(found, gated_twice(q.double(), k.double()).argmax(-1))
    largest = lambda q, k: gated_twice(q, k).amax(-1)  # noqa: E731
    check_gradients(largest, fl.compile(largest), [q, k])
