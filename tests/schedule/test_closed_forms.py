"""Whether a row sees anything: by positions and lengths it is told without a look at its columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fl_pallas as fl
from fl_pallas.capture.translate import translate
from fl_pallas.schedule.expr import reductions
from fl_pallas.schedule.plan import Accumulator
from fl_pallas.schedule.program import Program
from tests.evaluate import evaluate
from tests.oracle import check_gradients, run_and_check
from tests.unrun import explain

SIZE = 13
Condition = Callable[[Tensor, Tensor, Tensor], Tensor]

# Of rows i [s,1], columns j [s] and lengths n [b,1,1].
TOLD: dict[str, Condition] = {
    "window": lambda i, j, n: (i - j <= 3) & (j <= i),
    "ahead": lambda i, j, n: j >= i + 4,
    "length": lambda i, j, n: (i - j <= 3) & (j < n),
    "row and length": lambda i, j, n: (i - j <= 3) & (j < n) & (n > 3) & (i % 3 > 0),
    "either": lambda i, j, n: ((i - j).abs() < 2) & (j < n) | (j >= n + 2) & (i > 5),
    "neither": lambda i, j, n: ~((i - j > 3) | (j >= n)),
    "blocks": lambda i, j, n: (i // 4 == j // 4 + 1) & (j < i - 5),
    "steps": lambda i, j, n: (i - 2 * j > 3) & (j > 1),
    "one of them": lambda i, j, n: i - 3 * j == 4,
    "sums": lambda i, j, n: (i + j < n) & (j > 2),
}
LEFT: dict[str, Condition] = {
    "every third": lambda i, j, n: (j % 3 == i) & (j < n),
    "in two parts": lambda i, j, n: ((j < i - 2) | (j > i + 2)) & (j < n),
}


def program_of(condition: Condition, whether: Callable[[Tensor], Tensor]) -> tuple[Program, Callable[..., Tensor]]:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        i = torch.arange(SIZE)
        return x * whether(condition(i[:, None], i, n[:, None, None]).expand(3, -1, -1))

    return translate(make_fx(fn, tracing_mode="fake")(torch.ones(3, SIZE), torch.zeros(3, dtype=torch.int64))), fn


@pytest.mark.parametrize("whether", [lambda c: c.any(-1), lambda c: (~c).all(-1)], ids=["any", "all"])
@pytest.mark.parametrize("case", [*TOLD, *LEFT])
def test_the_same_rows(case: str, whether: Callable[[Tensor], Tensor]) -> None:
    program, fn = program_of((TOLD | LEFT)[case], whether)
    looked_at = [r for v in program.values if v.expr is not None for r in reductions(v.expr)]
    assert bool(looked_at) == (case in LEFT)
    for seed in range(8):
        torch.manual_seed(seed)
        n = torch.randint(0, SIZE + 1, (3,))
        x = torch.ones(3, SIZE)
        (found,) = (evaluate(program, {"x_1": x.numpy(), "n_1": n.numpy()})[name] for name in program.outputs)
        assert torch.equal(torch.from_numpy(found).float(), fn(x, n))


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """x-transformers: rows without a key in the window are 0; what is causal is masked apart from that."""
    i = torch.arange(q.shape[-2], device=q.device)
    seen = i[:, None] - i <= 9
    scores = (q @ k.mT).masked_fill(~seen, -3e38).masked_fill(i > i[:, None], -3e38)
    return (scores.softmax(-1) @ v).masked_fill(~seen.any(-1)[:, None], 0)


def with_lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    seen = (i[:, None] - i <= 9) & (i[:, None] >= i) & (i < n[:, None, None, None])
    scores = (q @ k.mT).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).masked_fill(~seen.any(-1)[..., None], 0)


def padded(q: Tensor, k: Tensor, v: Tensor, w: Tensor, pad: Tensor, causal: bool = False) -> Tensor:
    """A window and padding, of which rows may see nothing, and the layer behind it."""
    i = torch.arange(q.shape[-2], device=q.device)
    seen = ~(~pad[:, None, None] | (i[:, None] - i > 9))
    scores = (q @ k.mT).masked_fill(~seen, -3e38)
    scores = scores.masked_fill(i > i[:, None], -3e38) if causal else scores
    out = (scores.softmax(-1) @ v).masked_fill(~seen.any(-1)[..., None], 0)
    return F.layer_norm(out.transpose(1, 2).flatten(2) @ w, w.shape[1:])


def causal(*args: Tensor) -> Tensor:
    return padded(*args, causal=True)


def made(device: torch.device, length: int) -> list[Tensor]:
    return [torch.randn(2, 2, length, 16, device=device) for _ in range(3)]


def test_loops_end_where_the_mask_does() -> None:
    inputs = [x.requires_grad_() for x in made(torch.device("cpu"), 512)]
    explained = explain(windowed, *inputs)
    assert not explained.fallbacks
    steps = [s for p in explained.kernels for loop in p.loops for s in loop.steps if isinstance(s, Accumulator)]
    assert steps and not any(s.kind == "any" for s in steps)
    for plan in explained.kernels:
        assert all(loop.lower is not None and loop.upper is not None for loop in plan.loops), plan.name


def test_gradients(device: torch.device) -> None:
    check_gradients(windowed, fl.compile(windowed, fallback="error"), made(device, 40))


def test_rows_beyond_a_length(device: torch.device) -> None:
    inputs = *made(device, 40), torch.tensor([7, 40], device=device)
    run_and_check(with_lengths, fl.compile(with_lengths, fallback="error"), inputs)


def with_padding(device: torch.device, length: int) -> list[Tensor]:
    pad = torch.rand(2, length, device=device) > 0.2
    pad[0, :12] = False
    return [*made(device, length), torch.randn(32, 32, device=device), pad]


@pytest.mark.parametrize("fn", [padded, causal])
def test_rows_are_asked_once_for_all_heads(fn: object) -> None:
    *floats, pad = with_padding(torch.device("cpu"), 512)
    explained = explain(fn, *(x.requires_grad_() for x in floats), pad)
    assert not explained.fallbacks
    for plan in explained.graphs[-1].kernels:
        steps = [s for loop in plan.loops for s in loop.steps if isinstance(s, Accumulator)]
        asked = [s for s in steps if s.kind == "any"]
        assert not asked or len(asked) == len(steps) and len(plan.grid) < 4, plan.name


@pytest.mark.parametrize("fn", [padded, causal])
def test_gradients_of_padded_rows(fn: object, device: torch.device) -> None:
    check_gradients(fn, fl.compile(fn, fallback="error"), with_padding(device, 40))
