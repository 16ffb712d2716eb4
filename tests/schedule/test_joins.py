"""Where regions begin and end, for programs whose scores are no products."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fl_pallas as fl
from fl_pallas.schedule.plan import operand_names
from fl_pallas.schedule.text import plan_text
from tests.kernels.test_cubins import compiled, kernels_made
from tests.oracle import check, check_gradients, run_and_check
from tests.programs import BY_NAME
from tests.unrun import explain, unrun


def mean_shift(x: Tensor, width: Tensor) -> Tensor:
    """Two steps of mean shift: the points that the first finishes are queries, keys and values of the second."""
    for _ in range(2):
        weights = torch.exp((x[:, None] - x[None]).square().sum(-1) / (-2 * width * width))
        x = weights @ x / weights.sum(-1, keepdim=True)
    return x


def forces(x: Tensor, width: Tensor) -> Tensor:
    """Two steps along the gradient of a potential, a sum of differences over distances."""
    for _ in range(2):
        d = x[:, None] - x[None]
        x = x - 0.01 * (d * (width + d.square().sum(-1, keepdim=True)).rsqrt()).sum(1)
    return x


@pytest.mark.parametrize("fn", [mean_shift, forces])
def test_layers_of_distances(fn: object, device: torch.device) -> None:
    """A layer is a region, and nothing between them has a value for each pair."""
    x, width = torch.randn(100, 4, device=device), torch.tensor(1.5, device=device)
    run_and_check(fn, fl.compile(fn, fallback="error"), (x, width), name="layers")
    explained = explain(fn, x, width)
    assert explained.kernel_count == 2
    stored = [s.shape for graph in explained.graphs for plan in graph.kernels for s in plan.stores]
    assert stored == [(100, 4), (100, 4)]


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")
def test_gradients_of_layers_of_distances(device: torch.device) -> None:
    inputs = torch.randn(100, 4, device=device), torch.tensor(1.5, device=device)
    check_gradients(mean_shift, fl.compile(mean_shift), inputs)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


def averaged(q: Tensor, k: Tensor) -> Tensor:
    """The weights of all heads, averaged: as large as the scores of one."""
    return (q @ k.mT / 4).softmax(-1).mean(1)


@pytest.mark.parametrize("shape", [(70, 70), (2, 70, 70), (3, 1, 70, 70)])
def test_a_gradient_for_a_bias_alone(shape: tuple[int, ...], device: torch.device) -> None:
    """It has both sides of the scores, but not all of their heads, or of their batch."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 70, 16, generator=generator).to(device) for _ in range(3))
    bias = torch.randn(shape, generator=generator).to(device).requires_grad_()
    found = [g for fn in (fl.compile(biased, fallback="error"), biased) for g in _of_bias(fn, q, k, v, bias)]
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()


def _of_bias(fn: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(fn(q, k, v, bias).square().sum(), bias)


def test_weights_averaged_over_heads(device: torch.device) -> None:
    q, k = (torch.randn(2, 4, 70, 16, device=device) for _ in range(2))
    run_and_check(averaged, fl.compile(averaged, fallback="error"), (q, k))
    check_gradients(averaged, fl.compile(averaged, fallback="error"), (q, k))
    stored = [s.shape for plan in explain(averaged, q, k).kernels for s in plan.stores]
    assert max(map(math.prod, stored)) == 2 * 70 * 70


def halves_apart(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Differential attention: the weights of every second head are taken off those of the others."""
    weights = (q @ k.mT / 4).softmax(-1).unflatten(1, (-1, 2))
    out = (weights[:, :, 0] - 0.5 * weights[:, :, 1]) @ v
    out = torch.nn.functional.rms_norm(out, out.shape[-1:], eps=1e-5)
    return out.transpose(1, 2).flatten(2) @ w


def test_half_of_the_heads_end_the_region_of_all(device: torch.device) -> None:
    """The layer behind the norm is PyTorch's, though what the norm is taken of reduces fewer weights than there are."""
    shapes = (2, 4, 33, 8), (2, 4, 33, 8), (2, 2, 33, 16), (32, 32)
    inputs = tuple(torch.randn(shape, device=device) for shape in shapes)
    run_and_check(halves_apart, fl.compile(halves_apart, fallback="error"), inputs, name="halves")
    assert explain(halves_apart, *inputs).kernel_count == 1


def latents(x: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """Perceiver: few queries, which a batch shares, and keys and values from one matrix; x [b,n,c], q [h,m,d]."""
    k, v = (t.unflatten(-1, (q.shape[0], -1)).transpose(1, 2) for t in (x @ w).chunk(2, -1))
    scores = torch.einsum("hid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


@pytest.mark.parametrize("m", [20, 32])
def test_keys_of_few_queries_are_a_layers(m: int, device: torch.device) -> None:
    """Scores are no larger than keys and values together: those are PyTorch's all the same, and no kernel stores
    scores."""
    x, w = torch.randn(2, 100, 32, device=device), torch.randn(32, 64, device=device) / 6
    q = torch.randn(2, m, 16, device=device)
    run_and_check(latents, fl.compile(latents, fallback="error"), (x, q, w))
    (plan,) = explain(latents, x, q, w).kernels
    assert [s.shape for s in plan.stores] == [(2, 2, m, 16)]


def normed_features(x: Tensor, w: Tensor) -> Tensor:
    """A norm over queries, keys and values, of more features than there are of what they are made of."""
    packed = torch.nn.functional.layer_norm(x @ w, w.shape[1:])
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in packed.chunk(3, -1))
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("length", [17, 33, 130])
def test_features_that_are_normalised_are_no_scores(length: int, device: torch.device) -> None:
    inputs = torch.randn(2, length, 16, device=device), torch.randn(16, 48, device=device)
    found = explain(normed_features, *inputs)
    read = {name for graph in found.graphs for plan in graph.kernels for name in operand_names(plan)}
    assert found.kernel_count == 1 and read == {"getitem"}


class Attending(nn.Module):
    """A layer without a projection behind its attention."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm, self.packed = nn.LayerNorm(features), nn.Linear(features, 3 * features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(self.norm(x)).chunk(3, -1)
        return (q @ k.mT / 7).softmax(-1) @ v


class Streams(nn.Module):
    """Two streams of tokens, which each layer reads and writes as each token wants (hyper-connections)."""

    def __init__(self, layers: int, features: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending(features) for _ in range(layers))
        self.norm = nn.LayerNorm(features)
        self.mixing, self.writing = nn.Linear(features, 3), nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, None].expand(-1, -1, 2, -1)
        for layer in self.layers:
            known = self.norm(x)
            first, *others = torch.einsum("bnef,bned->fbnd", self.mixing(known).tanh(), x)
            written = torch.einsum("bnd,bne->bned", layer(first), self.writing(known).squeeze(-1))
            x = written + torch.stack(others, 2)
        return x.sum(2)


@pytest.mark.parametrize("length", [16, 131])
def test_all_layers_of_few_tokens_are_fused(length: int) -> None:
    """Scores that are fewer than queries and keys, whichever softmax or norm comes behind."""
    layers = nn.Sequential(*(Attending(48) for _ in range(3)))
    found = explain(layers, torch.randn(2, length, 48, requires_grad=True))
    assert [len(graph.kernels) for graph in found.graphs] == [3, 6]


@pytest.mark.long
def test_streams_of_each_token_are_no_pairs(device: torch.device) -> None:
    torch.manual_seed(0)
    module = Streams(2).to(device)
    x = torch.randn(2, 131, 48, device=device)
    with torch.no_grad():
        assert [len(graph.kernels) for graph in explain(module, x).graphs] == [2]
    forward, _ = explain(module, x.requires_grad_()).graphs
    assert len(forward.kernels) == 2
    check_gradients(module, fl.compile(module), [x.detach()])


def products_of_features(q: Tensor, k: Tensor) -> Tensor:
    return nn.functional.silu(q[:, :, None] * k[:, None]).sum(2)


def nearest(q: Tensor, k: Tensor) -> Tensor:
    return (q.square().sum(-1, keepdim=True) - 2 * q @ k.mT + k.square().sum(-1)[:, None]).argmin(-1)


def gates(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).sigmoid() @ k


def leaves(q: Tensor, k: Tensor) -> Tensor:
    """Of a tree, each level by two branches: how much of each reaches it."""
    branches = torch.stack([k, 1 - k], -1)
    found = branches[:, :, 0]
    for level in range(1, k.shape[-1]):
        found = (found[..., :, None] * branches[:, :, level][..., None, :]).flatten(-2)
    return found.square().sum((-1, -2))


@pytest.mark.parametrize(
    "fn, queries, keys",
    [
        (products_of_features, (16, 8, 32), (16, 300, 32)), (nearest, (100, 32, 3), (100, 8, 3)),
        (gates, (64, 8, 16), (64, 100, 16)), (leaves, (1,), (100, 4, 7)),
    ],
)  # fmt: skip
def test_few_queries_are_no_streams(fn: Callable, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    found = explain(fn, torch.randn(queries), torch.rand(keys))
    assert found.kernel_count and not found.fallbacks


def twice_projected(x: Tensor, narrow: Tensor, w: Tensor) -> Tensor:
    """Queries, keys and values of fewer features: PyTorch multiplies matrices, whose rows are those of a batch."""
    q, k, v = (x @ narrow @ w).chunk(3, -1)
    return (q @ k.mT / 4).softmax(-1) @ v


@pytest.mark.parametrize("length", [11, 64])
def test_layers_after_each_other_are_pytorchs(length: int, device: torch.device) -> None:
    shapes = (2, length, 24), (24, 16), (16, 96)
    inputs = [torch.randn(s, device=device) / s[0] ** 0.5 for s in shapes]
    check_gradients(twice_projected, fl.compile(twice_projected), inputs)
    found = explain(twice_projected, *(t.requires_grad_() for t in inputs))
    assert [len(graph.kernels) for graph in found.graphs] == [1, 2] and not found.fallbacks
    assert not any(s.shape == (2, length, length) for g in found.graphs for p in g.kernels for s in p.stores)


def test_what_is_summed_along_a_shift_has_lost_a_side() -> None:
    """XLNet's scores by position have rows of a batch and queries. A sum over queries, keys being shifted along with
    them, leaves a key's gradient: what is no larger than twice that, kernels may hand on to each other."""
    case = BY_NAME["xlnet"]
    inputs = (x.requires_grad_() for x in case.make_inputs(257, torch.bfloat16, "cpu"))
    with unrun():
        _, backward = fl.explain(case.target(torch.bfloat16, "cpu"), *inputs).graphs
    assert backward.schedule is not None and not backward.fallbacks
    (region,) = backward.schedule.regions
    assert all(backward.schedule.program.by_name[m].numel >= 4 * 257 * 257 for m in region.large)


def of_one_cloud(x: Tensor, y: Tensor) -> Tensor:
    """Distances of a batch of one, as PyTorch's `cdist` is often called."""
    return torch.cdist(x[None], y[None])[0].min(1).values


def nearest(x: Tensor, codes: Tensor) -> Tensor:
    """The code next to each vector of a batch."""
    return codes[torch.cdist(x, codes).argmin(-1)]


def most_alike(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    x, codes = (torch.nn.functional.normalize(t, dim=-1) for t in (x, codes))
    return (x @ codes.T).max(-1)


@pytest.mark.parametrize("fn", [of_one_cloud, nearest, most_alike])
def test_no_distance_is_stored(fn: Callable[..., Tensor], device: torch.device) -> None:
    shape = (70, 3) if fn is of_one_cloud else (2, 33, 3)
    inputs = torch.randn(shape, device=device), torch.randn(100, 3, device=device)
    run_and_check(fn, fl.compile(fn, fallback="error"), inputs)
    assert explain(fn, *inputs).kernel_count == 1


def pooled(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each feature that a layer makes, over tokens; and of each four features."""
    return (x @ w).amax(1), (x @ w).unflatten(-1, (-1, 4)).amax(-1)


def test_layers_are_pytorchs_whatever_is_pooled(device: torch.device) -> None:
    found = explain(pooled, torch.randn(2, 33, 8, device=device), torch.randn(8, 40, device=device))
    assert found.kernel_count == 0 and not found.fallbacks


def test_what_lies_along_rows_or_along_columns_is_no_weight(device: torch.device) -> None:
    """Gradients of a sum that is written element by element: PyTorch makes one side of the product with an axis of
    extent 1, which is no batch's."""
    inputs = torch.randn(33, 4, device=device), torch.randn(33, 4, device=device)
    check_gradients(drawn_apart, fl.compile(drawn_apart, fallback="error"), inputs)


def drawn_apart(x: Tensor, v: Tensor) -> Tensor:
    """A step of Stein's variational gradient."""
    d = x[:, None] - x
    near = torch.exp(d.square().sum(-1) / -2)[..., None]
    return (near * v + near * d).mean(1)


def soft_clusters(x: Tensor, centres: Tensor) -> Tensor:
    return (-((x[:, :, None] - centres) ** 2).sum(-1)).softmax(-1) @ centres


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    return (x[:, :, None] - centres).abs().sum(-1).amin(1)


def log_likelihood(x: Tensor, centres: Tensor) -> Tensor:
    return (-0.5 * ((x[:, :, None] - centres) / 2).square().sum(-1)).logsumexp(-1)


@pytest.mark.parametrize("fn", [soft_clusters, nearest, log_likelihood])
def test_centres_that_a_batch_shares_are_no_layers_weight(fn: Callable[..., Tensor], device: torch.device) -> None:
    inputs = torch.randn(2, 100, 16, device=device), torch.randn(40, 16, device=device)
    check_gradients(fn, fl.compile(fn, fallback="error"), inputs)
    with torch.no_grad():
        assert explain(fn, *inputs).kernel_count == 1


def test_sums_along_a_part_of_the_keys_leave_a_region(device: torch.device) -> None:
    """A bias by rows and one by columns of a grid of keys, each made of queries and a table: its gradient, [queries,
    rows], is no larger than the queries, and the tables' are PyTorch's to make of it. Kernels computed the scores again
    for each distance."""
    case = BY_NAME["decomposed_positions"]
    given = [x.requires_grad_() for x in case.make_inputs(400, torch.bfloat16, device)]
    with unrun():
        (graph,) = [g for g in fl.explain(case.target(torch.bfloat16, device), *given).graphs if g.name == "backward"]
    assert not graph.fallbacks
    side = math.isqrt(given[0].shape[1])
    stored = {s.shape for plan in graph.kernels for s in plan.stores}
    assert {(2, side, side, 1, side), (2, side, side, side, 1)} <= stored
    assert all(a.extent != 2 * side - 1 for plan in graph.kernels if plan.loops for a in plan.grid)


def chosen_keys(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    """Scores that are written to at keys which are data, some of them twice."""
    scores = q @ k.mT / 4
    scores[..., keys] = -math.inf
    return scores.softmax(-1) @ v


def test_scores_written_at_positions_that_are_data(device: torch.device) -> None:
    inputs = *(torch.randn(2, 2, 40, 16, device=device) for _ in range(3)), torch.tensor([0, 7, -1, 7], device=device)
    run_and_check(chosen_keys, fl.compile(chosen_keys, fallback="error"), inputs)
    check_gradients(chosen_keys, fl.compile(chosen_keys, fallback="error"), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_are_data_compile(dtype: torch.dtype) -> None:
    """Whether any of them is an element's is a bool, in Triton IR as well."""
    inputs = [*(torch.randn(2, 2, 40, 16, dtype=dtype).requires_grad_() for _ in range(3)), torch.tensor([0, 7, -1, 7])]
    made = kernels_made(chosen_keys, inputs)
    assert len(made) in (2, 3) and all(compiled(plan, lower, 90).registers for plan, lower in made)


def largest_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    keep = torch.full_like(scores, -math.inf).scatter(-1, scores.topk(4, -1).indices, 0.0)
    return (scores + keep).softmax(-1) @ v


def test_scores_that_pytorch_sorts(device: torch.device) -> None:
    """The kernel takes scores of its own, and the warning says that PyTorch's are stored all the same."""
    inputs = tuple(torch.randn(2, 2, 40, 16, device=device) for _ in range(3))
    with pytest.warns(fl.FallbackWarning, match=r"topk.*25.0 KiB will be materialised"):
        out = fl.compile(largest_scores)(*inputs)
    check(largest_scores, inputs, out)
    explained = explain(largest_scores, *inputs)
    (kernel,) = explained.kernels
    assert [s.shape for s in kernel.stores] == [(2, 2, 40, 16)]


def windows(centres: Tensor, shares: Tensor, v: Tensor) -> Tensor:
    """Graves' windows: each row has several, by its own centres among positions; [b,s,m], shares of each, v [b,s,d]."""
    j = torch.arange(v.shape[-2], device=v.device)
    near = torch.exp(-((j - centres[..., None] * v.shape[-2]) ** 2) / 30)
    w = (shares.softmax(-1)[..., None] * near).sum(-2)
    return (w / (w.sum(-1, keepdim=True) + 1e-3)) @ v


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # the gradient of v takes the weights from memory
def test_sums_of_several_windows_are_not_stored(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(2, 70, 3, generator=generator).to(device)
    inputs = (centres, *(torch.randn(2, 70, n, generator=generator).to(device) for n in (3, 16)))
    explanation = explain(windows, *inputs)
    assert explanation.kernel_count == 1 and not explanation.graphs[0].fallbacks, str(explanation)
    run_and_check(windows, fl.compile(windows), inputs)
    check_gradients(windows, fl.compile(windows), inputs)


class Placed(nn.Module):
    """A layer of attention over a map whose places have features by row and by column (DETR, 2-D ViT)."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.row, self.column = nn.Parameter(torch.randn(rows, 8)), nn.Parameter(torch.randn(columns, 8))
        self.given, self.packed, self.norm = nn.Linear(3, 16), nn.Linear(16, 48), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.row.shape[0], self.column.shape[0]
        by_column, by_row = self.column.expand(rows, -1, -1), self.row[:, None].expand(-1, columns, -1)
        h = self.given(x) + torch.cat([by_column, by_row], -1).flatten(0, 1)
        q, k, v = self.packed(h).chunk(3, -1)
        return self.norm(h + (q @ k.mT / 4).softmax(-1) @ v).tanh().mean()


@pytest.mark.parametrize("sides", [(8, 9), (24, 24)])
def test_places_of_a_map_are_no_pairs(sides: tuple[int, int]) -> None:
    """What is added to the tokens that a layer makes: attention alone is a region (it took minutes to plan more)."""
    with unrun():
        explained = fl.explain(Placed(*sides), torch.randn(2, sides[0] * sides[1], 3))
    assert [len(graph.kernels) for graph in explained.graphs] == [1, 2] and not explained.fallbacks, str(explained)


@pytest.mark.parametrize("batch", [2, 3])
def test_heads_flattened_into_a_batch(batch: int) -> None:
    """Projections by convolutions: heads with their features are one dimension, and go to the batch. A head's member of
    the batch is known, whatever features it has; two members are no two cases of each feature."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.reshape(batch * 4, 16, -1).mT for t in (q, k, v))
        return ((q @ k.mT / 4).softmax(-1) @ v).mT.reshape(batch, 64, -1)

    inputs = [torch.randn(batch, 64, 70).requires_grad_() for _ in range(3)]
    with unrun():
        explained = fl.explain(attention, *inputs)
    texts = [plan_text(plan) for graph in explained.graphs for plan in graph.kernels]
    assert len(texts) == 3 and not any("x0 * 16" in text or "< 64" in text for text in texts)
    check_gradients(attention, fl.compile(attention, fallback="error"), inputs)


class Beside(nn.Module):
    """Attention over channels (XCiT), whose queries and keys are normalised over tokens, before one over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48, bias=False), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.mT for t in self.first(x).chunk(3, -1))
        q, k = (nn.functional.normalize(t, dim=-1) for t in (q, k))
        x = x + ((q @ k.mT).softmax(-1) @ v).mT
        q, k, v = self.second(x).chunk(3, -1)
        return x + (q @ k.mT / 4).softmax(-1) @ v


@pytest.mark.long
def test_a_region_that_is_pytorchs_leaves_the_others() -> None:
    module = Beside()
    x = torch.randn(2, 100, 16).requires_grad_()
    with unrun():
        forward, _ = fl.explain(module, x).graphs
    assert forward.kernels
    check_gradients(module, fl.compile(module), [x])


def axial(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Attention along rows and along columns of a grid, added: x [b,i,j,d], w [h,d,e]."""

    def attended(order: str) -> Tensor:
        q, k, v = (torch.einsum(f"bijd,hde->{order}", x, w) for w in (wq, wk, wv))
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    return attended("bihje").transpose(1, 3) + attended("bjhie")


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_along_two_axes_is_made_once(dtype: torch.dtype, device: torch.device) -> None:
    """Both results are kept: the second kernel adds the first one's, and neither is computed again. What they hand on
    to the layers in front lies as those read it."""
    shapes = (2, 40, 40, 16), *[(4, 16, 16)] * 3
    given = [(0.3 * torch.randn(s, dtype=dtype, device=device)).requires_grad_() for s in shapes]
    forward, backward = explain(axial, *given).graphs
    # In 16 bits a kernel of 40 rows has the gradients of both sides.
    assert len(forward.kernels) == 2 and len(backward.kernels) == (4 if dtype == torch.float32 else 2)
    gradients = [s.shape for p in backward.kernels for s in p.stores if math.prod(s.shape) == 2 * 40 * 40 * 4 * 16]
    assert len(gradients) == 6 and all(shape[-2:] == (4, 16) for shape in gradients)
    check_gradients(axial, fl.compile(axial), given)


class Narrow(nn.Module):
    """Layers whose heads have fewer features than the stream, or share their keys, between norms (Gemma)."""

    def __init__(self, width: int, heads: int, groups: int, features: int, last: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.last = heads, groups, last
        sizes = [(width, heads * features), *[(width, groups * features)] * 2, (heads * features, width)]
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in sizes) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def norm(t: Tensor) -> Tensor:
            return F.rms_norm(t, t.shape[-1:])

        for into_q, into_k, into_v, out in self.layers:
            y = norm(x)
            into = (into_q, self.heads), (into_k, self.groups), (into_v, self.groups)
            q, k, v = (layer(y).unflatten(-1, (n, -1)).transpose(1, 2) for layer, n in into)
            o = F.scaled_dot_product_attention(norm(q), norm(k), v, is_causal=True, enable_gqa=True)
            o = out(o.transpose(1, 2).flatten(2))
            x = x + (norm(o) if self.last else o)
        return x


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "heads", "groups", "features", "last"),
    [(128, 4, 4, 16, False), (32, 4, 1, 16, True), (80, 4, 1, 32, False)],
)
def test_layers_that_widen_are_no_blow_ups(width: int, heads: int, groups: int, features: int, last: bool) -> None:
    with unrun(), warnings.catch_warnings():
        warnings.simplefilter("error", fl.FallbackWarning)
        graphs = fl.explain(Narrow(width, heads, groups, features, last), torch.randn(1, 131, width)).graphs
    assert [len(g.kernels) for g in graphs] == [3, 6]


class Hawkes(nn.Module):
    """A point process: what follows what, by exponentials that decay with time, of two embeddings of each event."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Embedding(20, 8), nn.Embedding(20, 8)

    def forward(self, events: Tensor, at: Tensor) -> Tensor:
        rate = self.before(events) @ self.behind(events).mT
        return torch.exp(-rate * (at[:, :, None] - at[:, None]).abs()).sum(-1)


@pytest.mark.filterwarnings("ignore::fl_pallas.FallbackWarning")  # embeddings' gradients, which PyTorch adds up
def test_rows_that_tokens_pick_are_no_weights(device: torch.device) -> None:
    """Products of embeddings are of tokens, and fused in both passes."""
    torch.manual_seed(0)
    layer = Hawkes().to(device)
    inputs = torch.randint(0, 20, (2, 50), device=device), torch.rand(2, 50, device=device)
    forward, backward = explain(layer, *inputs).graphs
    assert forward.kernels and backward.kernels
    assert not any("bmm" in name for name, _ in forward.left)
    check_gradients(layer, fl.compile(layer), inputs)
