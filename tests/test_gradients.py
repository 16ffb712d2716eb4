"""Gradients of the corpus and of made-up programs, against float64 and eager PyTorch."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from torch import Tensor, nn

import fl_pallas as fl
from fl_pallas import api
from fl_pallas.errors import ScheduleError
from fl_pallas.schedule.expr import reductions
from fl_pallas.schedule.passes import exchange
from fl_pallas.schedule.plan import evaluated_in
from fl_pallas.schedule.program import Program, Value

from .corpus import basic, normalisers, science, scores
from .corpus.case import Draw, Inputs, qkv, qkv_and
from .generated import Spec, specs
from .oracle import check, check_gradients, gradient_errors
from .programs import BY_NAME, FUSED, Case
from .test_programs import dtype_name
from .unrun import unrun
from .wide import wide_inputs

pytestmark = pytest.mark.usefixtures("repeated")

SEQ = 33
"""Longer than most head dims: smaller scores would stay in PyTorch."""
GPU_RUNS = ((torch.float32, SEQ), (torch.bfloat16, 257), (torch.float32, 1024))
"""On a GPU; without --every-case, one of the two lengths in float32, which varies from case to case."""
SHARE = 24
"""One case in so many runs on a CPU; all with --every-case."""

_EXTREMUM = "the gradient goes to what equals a maximum, of as many maxima as there are scores"
LEFT = {
    "max_plus": _EXTREMUM,
    "max_plus_scores": _EXTREMUM,
}
"""Cases that run in PyTorch where gradients are asked for, and why."""
STORED = {
    "value_variance_centred": "few products inside of others are stored",
    "scan_of_a_scan": "scores, which each kernel would compute several times",
}
"""Cases whose backward pass stores what is linear in long sequences."""


REFUSED = {"in_place": "modified by an inplace operation"}
"""Cases that PyTorch itself cannot differentiate, and its words."""


@pytest.fixture(autouse=True)
def no_kernels_of_others() -> Iterator[None]:
    """XLA maps memory for each kernel it compiles, and a process may have 65530 maps."""
    yield
    jax.clear_caches()


def explained(fn: Callable, **options: object) -> tuple[Callable, fl.Explanation]:
    """What fl.compile and fl.explain return, for one compilation."""
    explanation = fl.Explanation()
    return api._compiled(fn, api.Backend(options, explanation)), explanation


def parameters(config: pytest.Config) -> Iterator:
    """(case, dtype, length): every case on a GPU, a share in float32 elsewhere."""
    on_gpu, everything = torch.cuda.is_available(), config.getoption("--every-case")
    for case in FUSED:
        mark = zlib.crc32(case.name.encode())
        if not on_gpu and not everything and mark % SHARE:
            continue
        some = GPU_RUNS if everything else GPU_RUNS[mark >> 8 & 1 :][:2]
        for dtype, n in some if on_gpu else GPU_RUNS[:1]:
            yield pytest.param(case, dtype, n, id=f"{case.name}-{dtype_name(dtype)}-{n}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_gradients:
        metafunc.parametrize("case, dtype, seq", list(parameters(metafunc.config)))


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_gradients(case: Case, dtype: torch.dtype, seq: int, device: torch.device) -> None:
    if case.name in REFUSED:
        _check_refused(case, dtype, seq, device)
        return
    target = case.target(dtype, device)
    if isinstance(target, nn.Module):
        target.requires_grad_(True)
    compiled, explanation = explained(target)
    check_gradients(target, compiled, case.make_inputs(seq, dtype, device), name=case.name)
    graphs = {g.name: g for g in explanation.graphs}
    forward, backward = graphs.get("forward"), graphs.get("backward")
    if forward and backward and forward.kernels and not forward.fallbacks and case.name not in {*LEFT, *STORED}:
        assert not backward.fallbacks, "\n".join(map(str, backward.fallbacks))


@pytest.mark.long
def test_regions_that_read_each_others_results(device: torch.device) -> None:
    """The gradients of two attentions' product wait for each other, but not those of one kernel for another's."""

    def rows_of_a_product(q: Tensor, k: Tensor) -> Tensor:
        first, second = (q @ k.mT).softmax(-1), (k @ q.mT).softmax(-1)
        return (second @ first)[..., 0, :]

    compiled, explanation = explained(rows_of_a_product)
    inputs = tuple(torch.randn(1, 2, 33, 8, device=device) for _ in range(2))
    check_gradients(rows_of_a_product, compiled, inputs)
    assert not any(graph.fallbacks for graph in explanation.graphs)
    assert explanation.graphs[-1].kernels


def test_views_of_other_strides(device: torch.device) -> None:
    """What PyTorch computes as a whole may have other strides than were traced: a view of it raised."""
    case = BY_NAME["performer_linear"]
    inputs = wide_inputs(case, 128, torch.bfloat16, device)
    assert inputs is not None
    check_gradients(case.fn, fl.compile(case.fn), inputs, name=case.name)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
@pytest.mark.parametrize("name", ["value_variance_centred", "cosine", "t5_bias", "learned_queries"])
def test_short(name: str, device: torch.device) -> None:
    """Where PyTorch would compute scores again for the backward pass, rounded, it does so in the forward pass too."""
    case = BY_NAME[name]
    target = case.target(torch.bfloat16, device)
    if isinstance(target, nn.Module):
        target.requires_grad_(True)
    check_gradients(target, fl.compile(target), case.make_inputs(9, torch.bfloat16, device), name=name)


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in FUSED if c.name not in REFUSED])
def test_scheduled(case: Case) -> None:
    """Both passes of every case, where only a share of them runs: plans that verify, and nothing is left to PyTorch."""
    target = case.target(torch.bfloat16, "cpu")
    if isinstance(target, nn.Module):
        target.requires_grad_(True)
    inputs = (x.requires_grad_(x.is_floating_point()) for x in case.make_inputs(257, torch.bfloat16, "cpu"))
    with unrun():
        explanation = fl.explain(target, *inputs)
    for graph in explanation.graphs:
        assert graph.kernels or graph.fallbacks or not graph.schedule or not graph.schedule.regions, str(explanation)
        assert case.name in LEFT or not graph.fallbacks, "\n".join(map(str, graph.fallbacks))


SCALE = 24**-0.5
"""No power of two: a product with it rounds."""
MASKINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "filled, then scaled": lambda s, m, low: s.masked_fill(m, low) * SCALE,
    "scaled, then filled": lambda s, m, low: (s * SCALE).masked_fill(m, low),
    "added, then scaled": lambda s, m, low: (s + m.to(s.dtype) * low) * SCALE,
    "scaled, then data added": lambda s, m, low: s * SCALE + m,
    "data added, then scaled": lambda s, m, low: (s + m) * SCALE,
}


@pytest.mark.parametrize("form, low", [*((form, -1e30) for form in MASKINGS), ("filled, then scaled", -1e9)])
def test_rows_that_see_nothing_but_finite_masks(form: str, low: float, device: torch.device) -> None:
    """All keys count the same then, in both passes: scores that a mask made are equal to the last bit."""
    draw = Draw(40, torch.float32, device, torch.Generator().manual_seed(0))
    q, k, v = (draw.normal(1, 2, 40, 24) for _ in range(3))
    mask = torch.rand(40, 40, generator=torch.Generator().manual_seed(1)).lt(0.5).to(device)
    mask[:5] = True
    given = torch.where(mask, low, 0.0) if "data" in form else mask

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return MASKINGS[form](q @ k.mT, given, low).softmax(-1) @ v

    check(f, (q, k, v), fl.compile(f)(q, k, v))
    check_gradients(f, fl.compile(f), (q, k, v))


@pytest.mark.parametrize("name", ["softmax_by_hand", "softmax_late_division", "sink"])
def test_statistics_are_kept_exactly(name: str, device: torch.device) -> None:
    """A maximum and a sum that PyTorch has in bfloat16: scores are computed again about what they were taken about."""
    compiled, explanation = explained(BY_NAME[name].fn)
    inputs = BY_NAME[name].make_inputs(100, torch.bfloat16, device)
    check_gradients(BY_NAME[name].fn, compiled, inputs, name=name)
    (plan,) = next(g for g in explanation.graphs if g.name == "forward").kernels
    statistics = [s for s in plan.stores if s.shape[-1] == 1]
    assert len(statistics) > 1 and all(s.dtype == "f32" for s in statistics)


def _check_refused(case: Case, dtype: torch.dtype, seq: int, device: torch.device) -> None:
    """The result all the same, and PyTorch's own refusal when a gradient is asked for."""
    inputs = [x.requires_grad_(x.is_floating_point()) for x in case.make_inputs(seq, dtype, device)]
    with pytest.warns(fl.FallbackWarning, match=REFUSED[case.name]):
        out = fl.compile(case.fn)(*inputs)
    check(case.fn, inputs, out, name=case.name)
    with pytest.raises(RuntimeError, match=REFUSED[case.name]):
        out.sum().backward()


# --- what went wrong once ----------------------------------------------------------------------


def largest_and_own(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The largest weight of each row, and that of its own position."""
    p = (q @ k.mT / 4).softmax(-1)
    return p.amax(-1), p.diagonal(dim1=-2, dim2=-1)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_maximum_of_what_kernels_store(device: torch.device) -> None:
    """Scores that a kernel stores need not equal the maximum that another takes: its position is kept."""
    x = [torch.randn(1, 2, 100, 16, device=device) for _ in range(2)]
    check_gradients(largest_and_own, fl.compile(largest_and_own), x)


def scaled_by_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of a head, over positions and features."""
    return ((q / q.abs().amax((-2, -1), keepdim=True)) @ k.mT).softmax(-1) @ v


def scaled_by_the_largest_gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of what 16 bits round, at every step in PyTorch, and not in a kernel."""
    x = q * 0.3 * k.tanh()
    return (x / x.amax((-2, -1), keepdim=True) @ k.mT).softmax(-1) @ v


def largest_of_the_result(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT / 4).softmax(-1) @ v * q.sigmoid() * 0.3).amax((-2, -1))


def largest_features_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What equals the values of `max`, which has positions besides."""
    return ((q * (q == q.max(-1, keepdim=True).values)) @ k.mT).softmax(-1) @ v


def keys_to_their_range(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    least, most = k.aminmax(dim=-1, keepdim=True)
    return (q @ ((k - least) / (most - least)).mT).softmax(-1) @ v


def scores_to_their_range(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT / 4
    least, most = s.aminmax(dim=-1, keepdim=True)
    return ((s - least) / (most - least)).softmax(-1) @ v


def _ranges_have_gradients() -> bool:
    try:
        torch.zeros(2, requires_grad=True).aminmax().min.backward()
    except RuntimeError:
        return False
    return True


of_ranges = pytest.mark.skipif(not _ranges_have_gradients(), reason="this PyTorch has no gradient of aminmax")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize(
    "fn",
    [
        scaled_by_the_largest,
        scaled_by_the_largest_gated,
        largest_of_the_result,
        largest_features_alone,
        pytest.param(keys_to_their_range, marks=of_ranges),
        pytest.param(scores_to_their_range, marks=of_ranges),
    ],
)
def test_a_maximum_of_linear_size_leaves_the_rest_fused(
    fn: Callable[..., Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """What it is of is no larger than the inputs: it is PyTorch's, and kept with its maximum."""
    x = [torch.randn(1, 2, 70, 16, device=device, dtype=dtype) for _ in range(3)]
    check_gradients(fn, fl.compile(fn, fallback="error"), x)


def sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 8).softmax(-1) @ v


def test_sharp_scores(device: torch.device) -> None:
    """Scores of a hundred: a row's logarithm added to its maximum would lose what float32 has of it."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(8, 2, 40, 16, device=device) for _ in range(3))
    for e in gradient_errors(sharp, fl.compile(sharp), (q, k, v)):
        assert e.compiled < max(2 * e.eager, 2e-6), str(e)


def neighbours(h: Tensor, keys: Tensor, values: Tensor, words: Tensor) -> Tensor:
    """kNN-LM: words by what follows the neighbours of a context, and by a layer."""
    near = (h @ keys.mT).softmax(-1) @ values
    return (0.3 * near + 0.7 * (h @ words.mT).softmax(-1)).log()


@pytest.mark.long
def test_a_short_product_is_kept(device: torch.device) -> None:
    """PyTorch would compute it for the backward pass: it is kept, and the scores beside it are not stored."""
    n, d, words = 200, 8, 11
    x = [torch.randn(s, d, device=device) for s in (n, 2 * n, words)]
    values = torch.rand(2 * n, words, device=device)
    check_gradients(neighbours, fl.compile(neighbours, fallback="error"), [x[0], x[1], values, x[2]])


def selected_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """NSA's selected branch: each query reads the blocks that score highest, later keys masked by a finite number."""
    heads, (n, d) = torch.arange(q.shape[0], device=q.device)[:, None, None], q.shape[1:]
    k, v = (t.unflatten(1, (-1, 8)) for t in (k, v))
    top = (q @ k.mean(2).mT).topk(2, -1).indices
    keys, values = (t[heads, top].flatten(2, 3) for t in (k, v))
    at = (top[..., None] * 8 + torch.arange(8, device=q.device)).flatten(2)
    scores = torch.einsum("hid,hijd->hij", q, keys) * d**-0.5
    scores = scores.masked_fill(at > torch.arange(n, device=q.device)[:, None], -1e9)
    return torch.einsum("hij,hijd->hid", scores.softmax(-1), values)


def test_what_only_pytorch_computed_is_not_computed_again(device: torch.device) -> None:
    """PyTorch rounds scores and masks to 16 bits: what kernels compute again would not fit its maxima."""
    x = [torch.randn(2, 64, 16, device=device).bfloat16() for _ in range(3)]
    check_gradients(selected_blocks, fl.compile(selected_blocks), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_euclidean_distances(dtype: torch.dtype, device: torch.device) -> None:
    """`torch.cdist` of more than 25 points is a product of another kind; a point is no distance from itself.

    (To the last bit where products are exact: else the root shows what each rounding leaves of that distance.)
    """

    def attend(x: Tensor, v: Tensor) -> Tensor:
        return (-torch.cdist(x, x)).softmax(-1) @ v

    x = [(3 * torch.randn(1, 70, 16, device=device)).round().to(dtype) for _ in range(2)]
    check_gradients(attend, fl.compile(attend, fallback="error"), x)


def test_a_division_by_nothing_stays_under_its_test(device: torch.device) -> None:
    """A lifted structured loss: where a distance is 0 its gradient is 0, in each of the sums that it is parted into."""

    def lifted(x: Tensor, label: Tensor) -> Tensor:
        far, same = torch.cdist(x, x), label[:, None] == label
        other = (1 - far).masked_fill(same, -torch.inf).logsumexp(-1)
        positive = same & ~torch.eye(len(x), dtype=torch.bool, device=x.device)
        both = torch.relu(other[:, None].logaddexp(other) + far).square() * positive
        return both.sum() / positive.sum()

    x = (3 * torch.randn(70, 16, device=device)).round()
    check_gradients(lifted, fl.compile(lifted, fallback="error"), [x, torch.arange(70, device=device) % 5])


@pytest.mark.long
def test_sums_of_one_half_are_not_those_of_the_other(device: torch.device) -> None:
    """Complex values by their halves: each of four sums is known to the backward pass, and another goes by its own."""

    def turned(q: Tensor, k: Tensor, v: Tensor, phase: Tensor) -> Tensor:
        weights, by = (q @ k.mT / 4).softmax(-1), phase[..., :, None] - phase[..., None, :]
        (a, b), c, s = v.chunk(2, -1), weights * by.cos(), weights * by.sin()
        return torch.cat([c @ a - s @ b, s @ a + c @ b], -1)

    x = [torch.randn(2, 2, 70, 16, device=device) for _ in range(3)]
    check_gradients(turned, fl.compile(turned, fallback="error"), [*x, torch.randn(2, 2, 70, device=device)])


def rounded_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.round() @ k.round().mT / 4).clamp(-2, 2).softmax(-1) @ v


def test_what_is_zero_asks_for_no_scores(device: torch.device) -> None:
    """PyTorch makes the gradient of what was rounded of a gradient, for its shape: nothing else needs that."""
    x = [torch.randn(1, 2, 70, 16, device=device, requires_grad=True) for _ in range(3)]
    compiled, explanation = explained(rounded_sides, fallback="error")
    check_gradients(rounded_sides, compiled, x)
    _, backward = explanation.graphs
    assert len(backward.kernels) == 1 and not backward.fallbacks
    assert not any("bmm" in name for name, _ in backward.left)


def sandwich(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sandwich: a bias that is the sum of cosines of distances."""
    i = torch.arange(q.shape[-2], device=q.device).float()
    waves = 10000 ** (-torch.arange(4, device=q.device) / 4)
    return (q @ k.mT + torch.cos((i[:, None, None] - i[:, None]) * waves).sum(-1)).softmax(-1) @ v


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("training", [False, True])
def test_what_is_stored_of_positions_is_told(training: bool, device: torch.device) -> None:
    """The cosines of all pairs; in training the bias, which the backward pass reads."""
    n = 200
    q, k, v = (torch.randn(1, 2, n, 16, device=device, requires_grad=training) for _ in range(3))
    size = n * n * 4 * (1 if training else 4) / 1024
    with pytest.warns(fl.FallbackWarning, match=f"{size:.1f} KiB"):
        fl.compile(sandwich)(q, k, v)


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias of slopes by distances, mixed over heads."""
    i = torch.arange(q.shape[-2], device=q.device)
    slopes, mix = q.new_tensor([0.1, 0.2]) + 0 * q[0, :, 0, 0], q.new_ones(2, 2) + 0 * k[0, :, 0, :2]
    return (q @ k.mT + torch.einsum("hij,hg->gij", -slopes[:, None, None] * (i[:, None] - i).abs(), mix)).softmax(
        -1
    ) @ v


def test_a_bias_of_few_heads_is_mixed_in_the_kernel(device: torch.device) -> None:
    """It is larger than all that is given."""
    inputs = [torch.randn(1, 2, 200, 16, device=device) for _ in range(3)]
    check(mixed, inputs, fl.compile(mixed, fallback="error")(*inputs))
    assert fl.explain(mixed, *inputs).kernel_count == 1


def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of keys, times those of their blocks of ten."""
    s = q @ k.mT / 4
    blocks = s.unflatten(-1, (-1, 10)).logsumexp(-1).softmax(-1)
    return (s.softmax(-1) * blocks.repeat_interleave(10, -1)) @ v


@pytest.mark.usefixtures("unwarned")
def test_what_a_kernel_stores_for_pytorch_is_told(device: torch.device) -> None:
    """The gradient of a pair of keys, of which PyTorch adds up the features of either."""

    def simplicial(q: Tensor, k1: Tensor, k2: Tensor) -> Tensor:
        return torch.einsum("hid,hjd,hkd->hijk", q, k1, k2).flatten(-2).logsumexp(-1)

    inputs = (torch.randn(2, 40, 8, device=device, requires_grad=True) for _ in range(3))
    with unrun():
        backward = fl.explain(simplicial, *inputs).graphs[-1]
    assert backward.kernels and any("a kernel stores" in str(f) for f in backward.fallbacks)


@pytest.mark.long
def test_what_a_kernel_stores_for_another_is_told(device: torch.device) -> None:
    """The gradient of the scores, larger than all that is given."""
    n = 70
    q, k, v = (torch.randn(2, 2, n, 16, device=device, requires_grad=True) for _ in range(3))
    with pytest.warns(fl.FallbackWarning, match=f"{2 * 2 * n * n * 4 / 1024:.1f} KiB"):
        fl.compile(by_blocks)(q, k, v).sum().backward()


def residual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q + (q @ k.mT).softmax(-1) @ v
    return q + (q @ k.mT).softmax(-1) @ v


def attention_free(w: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """AFT: its sums over keys have both sides of the join, rows and features, and are no larger than the result."""
    e = (w[..., None] + k[:, None]).exp()
    return (e * v[:, None]).sum(2) / e.sum(2)


def test_sums_that_results_are_made_of_are_kept(device: torch.device) -> None:
    """Each kernel of the backward pass would make them again for each of its tiles."""
    inputs = [torch.randn(s, device=device).requires_grad_() for s in ((1, 70, 70), (2, 70, 24), (2, 70, 24))]
    check_gradients(attention_free, fl.compile(attention_free), inputs)
    with unrun():
        *_, backward = fl.explain(attention_free, *inputs).graphs
    updates = [e for plan in backward.kernels for loop in plan.loops for e in evaluated_in(loop, plan.stores)]
    assert updates and all(r.axis.extent == 24 for e in updates for r in reductions(e))


def test_what_pytorch_would_compute_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were an operand of one kernel written out as what is inside of another, it would be told, or the plan refused."""

    def everything(groups: object, program: Program) -> dict[str, Value]:
        return {v.name: v for v in program.values if v.expr is not None and not reductions(v.expr)}

    monkeypatch.setattr(exchange, "_written_out", everything)
    inputs = [torch.randn(1, 2, 200, 16, requires_grad=True) for _ in range(3)]
    with unrun():
        with pytest.raises(ScheduleError, match="which its region does not read"):
            fl.explain(residual, *inputs)
        monkeypatch.setattr(fl.config, "verify", False)
        (said,) = fl.explain(residual, *inputs).fallbacks
    assert "computes it again" in said.why and said.bytes == 2 * 200 * 200 * 4


# --- finite differences -------------------------------------------------------------------------


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2])
    distance = i[:, None] - i
    return _masked(q, k, v, (distance >= 0) & (distance < 3))


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2])
    return _masked(q, k, v, (i <= i[:, None]) | (i < 2))


def sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """sinks [h], a logit that joins the softmax."""
    logits = sinks[:, None, None].expand(*q.shape[:-1], 1)
    return torch.cat([q @ k.mT / math.sqrt(q.shape[-1]), logits], -1).softmax(-1)[..., :-1] @ v


def documents(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
    return _masked(q, k, v, (doc[:, :, None] == doc[:, None])[:, None])


def _masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ v


@dataclass(frozen=True)
class Small:
    """A program at a size where finite differences are quick.

    Attributes:
      frozen: which of the inputs get no gradient: masks of 0 and 1, which scores as far as AlphaFold's do not vary by.
    """

    fn: Callable[..., Tensor]
    inputs: Inputs
    frozen: tuple[int, ...] = ()


def _evoformer(g: Draw) -> tuple[Tensor, ...]:
    q, k, v, gate = (g.normal(1, 2, 1, g.seq, 4) for _ in range(4))
    return q, k, v, g.bools(1, 2, g.seq).double(), g.normal(1, 1, g.seq, g.seq), gate


def _triangle(g: Draw) -> tuple[Tensor, ...]:
    q, k, v, gate = (g.normal(g.seq, g.seq, 1, 2) for _ in range(4))
    return q, k, v, g.normal(g.seq, g.seq, 1), g.bools(g.seq, g.seq).double(), gate


def _points(g: Draw) -> tuple[Tensor, ...]:
    q, k, v = (g.normal(g.seq, 1, 4) for _ in range(3))
    return q, k, v, g.normal(g.seq, 1, 2, 3), g.normal(g.seq, 1, 2, 3), g.normal(1)


def _differential(g: Draw) -> tuple[Tensor, ...]:
    return *(g.normal(1, 1, g.seq, 4) for _ in range(5)), g.values(0.35)[0]


def _rope(g: Draw) -> tuple[Tensor, ...]:
    return *qkv(d=4, h=1)(g), g.normal(g.seq, 4), g.normal(g.seq, 4)


def _with(make: Callable[[Draw], Tensor], h: int = 1) -> Inputs:
    return qkv_and(make, h=h, d=4)


SMALL = {
    "vanilla": Small(basic.vanilla, qkv(d=4, h=1)),
    "causal": Small(basic.causal_where, qkv(d=4, h=1)),
    "gqa": Small(basic.gqa_repeat, qkv(d=4, h=4, kv_heads=2)),
    "alibi": Small(scores.alibi, _with(lambda g: g.values(0.5, 0.25), h=2)),
    "softcap": Small(scores.softcap, qkv(d=4, h=1)),
    "window": Small(window, qkv(d=4, h=1)),
    "prefix": Small(prefix, qkv(d=4, h=1)),
    "documents": Small(documents, _with(lambda g: g.ints(0, 2, 1, g.seq))),
    "sink": Small(sink, _with(lambda g: g.normal(2), h=2)),
    "sigmoid": Small(normalisers.sigmoid, qkv(d=4, h=1)),
    "differential": Small(science.differential, _differential),
    "evoformer": Small(science.evoformer_row, _evoformer, frozen=(3,)),
    "triangle": Small(science.triangle_starting, _triangle, frozen=(4,)),
    "ipa": Small(science.ipa_scores, _points),
    "rope": Small(scores.rope, _rope),
    "retention": Small(normalisers.retention_power, _with(lambda g: g.values(0.9, 0.8), h=2)),
}


@pytest.mark.parametrize("name", SMALL)
def test_finite_differences(name: str) -> None:
    """Every input's gradient in float64, in Pallas interpret mode."""
    small = SMALL[name]
    drawn = small.inputs(Draw(5, torch.float64, torch.device("cpu"), torch.Generator().manual_seed(0)))
    x = [t.requires_grad_(t.is_floating_point() and n not in small.frozen) for n, t in enumerate(drawn)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)  # what is this small need not be fused whole
        compiled, explanation = explained(small.fn, interpret=True)
        assert torch.autograd.gradcheck(compiled, x)
    assert all(g.kernels for g in explanation.graphs), str(explanation)


# --- programs that hypothesis makes up ----------------------------------------------------------


def differentiable(spec: Spec) -> bool:
    """Not those whose gradients are known to be wrong (_TIES), or refused (two sums of unequal widths)."""
    ties = spec.normaliser == "by hand" or "max" in spec.extras
    return not ties and "second sum" not in spec.extras


@settings(max_examples=7, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(spec=specs().filter(differentiable))
def test_generated(spec: Spec, device: torch.device) -> None:
    note(str(spec))
    program = spec.build()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.FallbackWarning)
        check_gradients(program, fl.compile(program), spec.inputs(torch.float32, device), name=str(spec))
