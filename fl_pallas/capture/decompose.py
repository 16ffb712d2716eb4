"""PyTorch's own decompositions, traced one operation at a time."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import _vmap_for_bhqkv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import Unsupported
from .dtypes import torch_dtype
from .random import dropped
from .tensor import Spec, Tensor

F = torch.nn.functional
aten = torch.ops.aten


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """What `F.scaled_dot_product_attention` computes, without the float32 copies its own decomposition makes.

    Args:
      q: [..., heads, queries, dim].
      k, v: [..., heads or a divisor of it, keys, dim].
      bias: broadcastable to [..., heads, queries, keys]; bool: where to look; else added to the scores.
      causal: whether query i sees the keys up to i only.
      scale: factor on the scores; None: 1 / √dim.
      dropout: the probability of a weight to count as 0.
    """
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    # Only a bias can hide a whole row, which then counts as 0.
    weights = scores.softmax(-1) if bias is None else torch.ops.aten._safe_softmax(scores, -1)
    return dropped(weights.to(v.dtype), dropout) @ v


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Any,
    block_mask: tuple,
    scale: float,
    options: dict[str, Any],
    of_scores: tuple = (),
    of_masks: tuple = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `flex_attention` computes; of the block mask what it is made of alone: which pairs see each other.

    Args:
      score_mod, block_mask: functions of a score and its place, and of a place (the last of the tuple).
      of_scores, of_masks: tensors that these read.

    Returns: the result, and of each row the logarithm of the sum and the maximum of its scores, in base 2.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    places = [torch.arange(n, device=q.device) for n in scores.shape]
    scored = _vmap_for_bhqkv(score_mod, (0,), (None,) * len(of_scores))
    masked = _vmap_for_bhqkv(block_mask[-1], (), (None,) * len(of_masks))
    with TransformGetItemToIndex():
        scores = scored(scores, *places, *of_scores).masked_fill(~masked(*places, *of_masks), -math.inf)
    out = torch.ops.aten._safe_softmax(scores, -1).to(v.dtype) @ v
    return out, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def encoder_layer(
    x: torch.Tensor,
    width: int,
    heads: int,
    w_qkv: torch.Tensor,
    b_qkv: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
    gelu: bool,
    norm_first: bool,
    eps: float,
    *weights: torch.Tensor | int | None,
) -> torch.Tensor:
    """What `nn.TransformerEncoderLayer` computes in inference, where it is one operation.

    Args:
      x: [batch, queries, width].
      weights: weight and bias of two norms and of two linear layers; then perhaps a mask, true or not zero where
        nobody looks, and its kind: 0 [queries, keys], 1 [batch, keys], 2 [batch, heads, queries, keys].
    """
    w1, b1, w2, b2, w_in, b_in, w_back, b_back, mask, kind = (*weights, None, None)[:10]

    def attended(x: torch.Tensor) -> torch.Tensor:
        qkv = F.linear(x, w_qkv, b_qkv).unflatten(-1, (3, heads, width // heads))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.mT * (width // heads) ** -0.5
        if isinstance(mask, torch.Tensor):
            hidden = mask.to(torch.bool)
            scores = scores.masked_fill(hidden[:, None, None] if kind == 1 else hidden, -math.inf)
        return F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2), w_out, b_out)

    def fed(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, w_in, b_in)  # type: ignore[arg-type]
        # The one operation's GELU is exact on the CPU only.
        bent = F.gelu(inner, approximate="tanh" if x.is_cuda else "none") if gelu else inner.relu()
        return F.linear(bent, w_back, b_back)  # type: ignore[arg-type]

    for part, w, b in ((attended, w1, b1), (fed, w2, b2)):
        if norm_first:
            x = x + part(F.layer_norm(x, (width,), w, b, eps))  # type: ignore[arg-type]
        else:
            x = F.layer_norm(x + part(x), (width,), w, b, eps)  # type: ignore[arg-type]
    return x


FEW = 8
"""Of so many features, differences are as fast as a product, whose least depth is 8 or 16."""
NEAR = 2.0**-18
"""Of two squared norms of 16-bit features, what rounding may leave of a squared distance."""


def euclidean_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What `torch.cdist` computes of many points: PyTorch's own puts norms beside the features of a product.

    Args:
      a: [..., n, features].
      b: [..., m, features].
    """
    if a.shape[-1] <= FEW:
        return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1).sqrt()
    wide = torch.promote_types(a.dtype, torch.float32)
    norms = a.to(wide).square().sum(-1).unsqueeze(-1) + b.to(wide).square().sum(-1).unsqueeze(-2)
    squares = norms - 2 * (a @ b.mT).to(wide)
    if a.dtype.itemsize == 2:
        # The norms of equal points would leave a little, at which the slope of the root is huge: the gradient would be
        # a difference of huge sums, of weights that products round.
        squares = torch.where(squares > norms * NEAR, squares, 0)
    return squares.clamp_min(0).sqrt().to(a.dtype)


@cache
def _table() -> dict[Any, Any]:
    return {**decomposition_table, **core_aten_decompositions(), aten._euclidean_dist.default: euclidean_distance}


def has_decomposition(target: Any) -> bool:
    """Whether PyTorch says what `target` does in simpler operations."""
    return target in _table()


def _own(x: Any) -> Any:
    """Lists of a graph may not be changed; some decompositions change those that they are given."""
    return [*x] if isinstance(x, list) else x


def decomposition(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.fx.Graph, list[Tensor]]:
    """The graph of `target` in simpler operations, and the tensors among its arguments, one per placeholder.

    Raises:
      Unsupported: the decomposition cannot be traced.
    """
    leaves, tree = tree_flatten((args, kwargs))
    inputs = [x for x in leaves if isinstance(x, Tensor)]
    # (1, 1.0 and True are equal.)
    known = tuple(Spec(x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves)
    return _traced(target, tree, known, torch.get_default_dtype()), inputs


@lru_cache(maxsize=256)
def _traced(target: Any, tree: TreeSpec, known: tuple[Any, ...], default: torch.dtype) -> torch.fx.Graph:
    """The graph of a decomposition: of each layer of many the same.

    Args:
      tree: of the arguments.
      known: of each, what a tensor is, or the type and value of what is none.
      default: PyTorch's type of floats.
    """
    body = _table()[target]
    specs = [x for x in known if isinstance(x, Spec)]

    def run(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        a, k = tree_unflatten([next(given) if isinstance(x, Spec) else x[1] for x in known], tree)
        made = body(*map(_own, a), **k)
        # A named tuple would put its own constructor into the graph.
        return tuple(made) if isinstance(made, tuple) else made

    try:
        # AOTAutograd's own fake mode, where gradients are asked for, would refuse these fakes.
        with unset_fake_temporarily():
            with FakeTensorMode():
                fakes = [torch.empty(s.shape, dtype=torch_dtype(s.dtype)) for s in specs]
            graph = make_fx(run, tracing_mode="fake")(*fakes).graph
    except Exception as error:  # a decomposition may fail in any way; PyTorch then runs the operation
        first = str(error).partition("\n")[0]
        raise Unsupported(str(target), f"no rule for {target}, and its decomposition fails: {first}") from error
    for n in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        # A norm of groups looks at contiguous numbers of channels so.
        of, made = n.args[0].meta["val"], n.meta["val"]
        if of.is_contiguous() and made.is_contiguous() and of.numel() == made.numel():
            n.target, n.args = torch.ops.aten.view.default, n.args[:2]
    graph.eliminate_dead_code()
    return graph
