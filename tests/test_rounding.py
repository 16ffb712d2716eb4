"""What PyTorch and kernels both make, or two passes do, is the same to the last bit where that matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fl_pallas as fl
from tests.oracle import check, check_gradients
from tests.unrun import unrun

Gate = Callable[[Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 4).softmax(-1) @ v


GATES: dict[str, Gate] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "linear": lambda x: x * 1.7 + 0.1,
    "exp": torch.exp,
    "normalised": lambda x: F.normalize(x, dim=-1),
}
THRESHOLDS: dict[str, Gate] = {
    "topk": lambda p: p.topk(2, -1).values[..., -1:],
    "sort": lambda p: p.sort(-1).values[..., -3:-2],
    "kthvalue": lambda p: p.kthvalue(5, -1, keepdim=True).values,
    "of_twice": lambda p: (2 * p).topk(2, -1).values[..., -1:] / 2,
}


def draw(*shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("gate", GATES)
def test_the_largest_of_a_gate(gate: str, threshold: str, dtype: torch.dtype, device: torch.device) -> None:
    """PyTorch sorts; what equals the threshold is there, and a kernel that computes it again may find it below."""

    def gated(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        p = GATES[gate](x)
        return attention(q, k, v) * torch.where(p >= THRESHOLDS[threshold](p), p, 0)

    inputs = draw(*[(1, 2, 100, 16)] * 4, dtype=dtype, device=device)
    compiled = fl.compile(gated)
    check(gated, inputs, compiled(*inputs))
    if threshold != "of_twice":
        check_gradients(gated, compiled, inputs)


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms_norm": lambda x, g: F.rms_norm(x, (32,), g),
    "by_hand": lambda x, g: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * g,
    "normalize": lambda x, g: F.normalize(x, dim=-1) * 6 * g,
    "scaled": lambda x, g: (x * 1.3) * g,
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_before_a_head(norm: str, device: torch.device) -> None:
    """In 16 bits: the statistics of the forward pass are of the same logits as the weights of the backward pass."""

    def loss(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        labels = torch.arange(260, device=x.device) % 50
        return F.cross_entropy((NORMS[norm](x, g) @ w.T).flatten(0, 1).float(), labels)

    inputs = draw((2, 130, 32), (50, 32), (32,), dtype=torch.bfloat16, device=device)
    check_gradients(loss, fl.compile(loss, fallback="error"), inputs)


@pytest.mark.parametrize(("dtype", "exponent"), [(torch.float32, "- t1) * "), (torch.bfloat16, " - t1 * ")])
def test_differences_in_32_bits(dtype: torch.dtype, exponent: str) -> None:
    """Of sharp scores x, x c - m c rounds m c alone; in 16 bits x itself is rounded by more."""
    q, k, v = draw(*[(1, 2, 40, 16)] * 3, dtype=dtype, device=torch.device("cpu"))
    with unrun():
        text = fl.explain(attention, q, k, v).ir("plan")
    (line,) = (t for t in text.splitlines() if "exp2(" in t and "old" not in t)
    assert exponent in line


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / 4
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)
    return p @ v, p


def with_a_sink(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As GPT-OSS has it: a logit of zero that takes weight, and the maximum taken off before the softmax."""
    scores = torch.cat([q @ k.mT / 4, q.new_zeros(*q.shape[:-1], 1)], -1)
    p = (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    return p @ v, p


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [by_hand, with_a_sink])
def test_a_maximum_between_kernels(fn: Callable, dtype: torch.dtype, device: torch.device) -> None:
    """Weights that are returned need it before a kernel of their own: in the 32 bits that the row's sum is about."""
    inputs = draw(*[(2, 2, 40, 16)] * 3, dtype=dtype, device=device)
    q, k, v = 2 * inputs[0], 2 * inputs[1], inputs[2]
    compiled = fl.compile(fn)
    check(fn, [q, k, v], compiled(q, k, v))
    check_gradients(fn, compiled, [q, k, v])


def forgetting(x: Tensor, gate: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    """x [b,n,96] holds queries, keys and values of four heads; gate [b,n,4], bias [4]; w [32,32] projects."""
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in x.chunk(3, -1))
    c = F.logsigmoid((gate + bias).float()).cumsum(1).mT
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    scores = (q @ k.mT).float() / 8**0.5 + c[..., :, None] - c[..., None, :]
    return (scores.masked_fill(later, -torch.inf).softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2) @ w


def test_rows_and_columns_of_one_gradient(device: torch.device) -> None:
    """A running sum hears of the scores' gradient at queries less that at keys: what the result's rounding does to both
    cancels, if both take off the same.
    """
    inputs = draw((2, 65, 96), (2, 65, 4), (4,), (32, 32), dtype=torch.bfloat16, device=device)
    check_gradients(forgetting, fl.compile(forgetting), inputs)


FILLS = {
    "number": lambda s, seen, fill: torch.where(seen, s, fill),
    "masked_fill": lambda s, seen, fill: s.masked_fill(~seen, fill),
    "row": lambda s, seen, fill: torch.where(seen, s, fill.expand(s.shape[-2], 1)),
    "scaled": lambda s, seen, fill: torch.where(seen, s * 4, fill) / 4,
    "maximum": lambda s, seen, fill: torch.maximum(torch.where(seen, s, -torch.inf), fill),
    "rows": lambda s, seen, fill: s + torch.where(seen[:, :1], 0, fill),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", FILLS)
def test_fills_that_are_tensors(how: str, dtype: torch.dtype, device: torch.device) -> None:
    """The lowest number as a tensor, GPT-2's buffer: where the first tile of a row sees nothing, the difference of two
    of them is 0, and not what rounding leaves of one."""
    documents = torch.arange(100, device=device) // 45
    seen = documents[:, None] == documents
    fill = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)

    def f(q: Tensor, k: Tensor, v: Tensor, fill: Tensor) -> Tensor:
        return FILLS[how](q @ k.mT / 4, seen, fill).softmax(-1) @ v

    q, k, v = (torch.randn(1, 100, 16, dtype=dtype, device=device).requires_grad_() for _ in range(3))
    out = fl.compile(f, fallback="error")(q, k, v, fill)
    wanted = f(q.float(), k.float(), v.float(), fill.float())
    assert (out - wanted).norm() <= 0.02 * wanted.norm()
    tangent = torch.randn_like(out)
    gradients = torch.autograd.grad(out, [q, k, v], tangent)
    expected = torch.autograd.grad(wanted, [q, k, v], tangent.float())
    for mine, true in zip(gradients, expected, strict=True):
        assert (mine - true).norm() <= 0.03 * true.norm()


def alike(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of weights: those of two queries are compared."""
    p = (q @ k.mT / 8**0.5).softmax(-1)
    return (p @ p.mT * 4).softmax(-1) @ v


def clusters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q * 0.37).softmax(-1)
    return (p @ p.mT * 4).softmax(-1) @ v


def features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Efficient attention's feature maps, with a temperature."""
    return ((q * 0.35).softmax(-1) @ (k * 0.35).softmax(-1).mT * 8).softmax(-1) @ v


@pytest.mark.parametrize("fn", [alike, clusters, features])
@pytest.mark.parametrize("scale", [2.0, 8.0])
def test_a_sum_is_of_what_was_rounded(fn: Callable, scale: float, device: torch.device) -> None:
    """PyTorch sums a softmax's row of what it scaled in 16 bits: weights about that sum are of the same."""
    q, k, v = draw(*[(1, 2, 40, 8)] * 3, dtype=torch.float32, device=device)
    inputs = [t.bfloat16() for t in (q * scale, k, v)]
    check(fn, inputs, fl.compile(fn)(*(t.requires_grad_() for t in inputs)))
    check_gradients(fn, fl.compile(fn), [t.detach() for t in inputs])


def bilinear(q: Tensor, k: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """A layer of what a query and a key have together: one kernel rounds it with queries, another with keys."""
    a, c = q[:, :, None].expand(-1, -1, k.shape[-2], -1), k[:, None].expand(-1, q.shape[-2], -1, -1)
    return (torch.cat([a, c, a * c], -1) @ w @ u).softmax(-1) @ k


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore::fl_pallas.FallbackWarning"
)  # the gradient of w takes that of each pair from memory
@pytest.mark.parametrize("seed", range(2))
def test_a_side_of_several(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [((1, 40, 8), 1), ((1, 40, 8), 1), ((24, 8), 0.5), ((8,), 0.5)]
    inputs = [(torch.randn(s, generator=generator) * c).bfloat16().to(device) for s, c in shapes]
    check_gradients(bilinear, fl.compile(bilinear), inputs)


@pytest.mark.parametrize("scale", [8.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_statistic_that_is_returned(dtype: torch.dtype, scale: float, device: torch.device) -> None:
    """The result is rounded; weights that are computed again from scores that are not are about what it was before."""

    def with_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT * scale
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    inputs = draw(*[(1, 2, 70, 8)] * 3, dtype=dtype, device=device)
    check_gradients(with_logsumexp, fl.compile(with_logsumexp), inputs)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_row_sum_of_wide_scores_is_not_taken_from_a_narrow_result(narrow: torch.dtype, device: torch.device) -> None:
    """Gradients of queries and keys have 32 bits, the result, whose product with its own is a row's sum, 16."""

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).to(v.dtype) @ v

    q, k, v = draw((2, 128, 32), (2, 128, 32), (2, 128, 32), dtype=torch.float32, device=device)
    check_gradients(mixed, fl.compile(mixed), (q, k, v.to(narrow)))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_scores_of_inputs_made_wide(narrow: torch.dtype, scale: float, device: torch.device) -> None:
    """As GPT-J and GPT-NeoX take them: the result is kept as kernels have it, in 32 bits."""

    def upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().mT * (scale / 4)
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1).flatten(1)

    inputs = draw(*[(2, 64, 16)] * 3, dtype=narrow, device=device)
    check_gradients(upcast, fl.compile(upcast, fallback="error"), inputs)


def test_a_mask_cut_on_a_rounded_number_is_the_same_in_both_passes(device: torch.device) -> None:
    """sigmoid(-0.0017) is below 0.5, and 0.5 in bfloat16, as a table of features is stored."""

    def cut(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
        hidden = logits.sigmoid() < 0.5
        return (q @ k.mT / 4).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    q, k, v, logits = draw((2, 7, 16), (2, 60, 16), (2, 60, 16), (2, 7, 60), dtype=torch.bfloat16, device=device)
    logits[:, :, ::3] = -0.0017
    # What float64 makes of the numbers, and no rounding of the mask's own.
    check_gradients(lambda *a: cut(*a, logits.to(a[0].dtype)), lambda *a: fl.compile(cut)(*a, logits), (q, k, v))
