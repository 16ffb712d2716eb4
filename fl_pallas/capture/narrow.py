"""Tensors that are expanded first and then computed with are computed first: `norm(q.expand(..))` is as wide as `q`.

A comparison of all pairs by a function of two tensors (`F.cosine_similarity(q[:, None], k[None])`) expands both sides
and works on each alone. Left so, each side would be as large as all pairs are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten

# Reductions whose dimensions are the argument behind the tensor, and the number of that argument.
_ALONG: dict[Any, int] = {
    aten.linalg_vector_norm.default: 2,
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default), 1),
}

# What is alike along a dimension stays so, wherever that goes.
_SAME = (
    *(aten.detach.default, aten.alias.default, aten.unsqueeze.default),
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.dim, aten.squeeze.dims),
)


def narrow(gm: GraphModule) -> None:
    """Give element-wise operations, and reductions along other dimensions, what was expanded as it was before.

    Args:
      gm: an ATen graph with every result in `meta["val"]`; results keep their shapes and strides.
    """
    before: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, torch.Tensor):
            continue
        if node.target is aten.expand.default:
            source = node.args[0]
            if isinstance(source, Node):
                before[node] = _of_rank(gm, node, before.get(source, source), val)
        elif any(n in before for n in node.all_input_nodes):
            if _is_alike(node, before):
                _recompute(gm, node, val, before)
            elif node.target is aten.sum.dim_IntList:
                _multiply(gm, node, before)
    _expand(gm, before)
    gm.graph.eliminate_dead_code()


def _expand(gm: GraphModule, before: dict[Node, Node]) -> None:
    """Read sums of what was expanded, where they are read as they are, as copies of those of what it was before: the
    gradient of all pairs' mean, which is the same for each."""
    sums: set[Node] = set()
    for node, slim in before.items():
        if node.target not in _ALONG and sums.isdisjoint(node.all_input_nodes):
            continue
        sums.add(node)
        others = [u for u in node.users if u not in before]
        val = node.meta["val"]
        if others and all(isinstance(n, int) for n in val.shape):
            wide = _called(gm, node, aten.expand.default, (slim, list(val.shape)), val)
            copy = _called(gm, node, aten.clone.default, (wide,), val, {"memory_format": torch.contiguous_format})
            if copy.meta["val"].stride() == val.stride():
                node.replace_all_uses_with(copy, delete_user_cb=others.__contains__)


def _of_rank(gm: GraphModule, node: Node, slim: Node, val: Any) -> Node:
    """What is expanded, with as many dimensions as that makes of it."""
    missing = val.dim() - slim.meta["val"].dim()
    if not missing:
        return slim
    shape = [1] * missing + list(slim.meta["val"].shape)
    return _called(gm, node, aten.view.default, (slim, shape), val)


def _multiply(gm: GraphModule, node: Node, before: dict[Node, Node]) -> None:
    """A sum along an expanded dimension is as many times what it sums: the gradient of all pairs' mean."""
    given: Any = node.args
    source, along, *rest = given
    wide, val = source.meta["val"], node.meta["val"]
    dims = [d % wide.dim() for d in along or range(wide.dim())]
    times = math.prod(wide.shape[d] // max(1, before[source].meta["val"].shape[d]) for d in dims)
    if not isinstance(times, int):
        return
    slim = _called(gm, node, aten.sum.dim_IntList, (before[source], dims, *rest), val, node.kwargs)
    product = _called(gm, node, aten.mul.Tensor, (slim, times), val)
    if product.meta["val"].shape == val.shape and product.meta["val"].stride() == val.stride():
        node.replace_all_uses_with(product)
    elif product.meta["val"].dim() == val.dim():
        before[node] = product


def _is_alike(node: Node, before: dict[Node, Node]) -> bool:
    """Whether the operation does the same to what is alike along an expanded dimension."""
    tags = getattr(node.target, "tags", ())
    if node.target in _SAME:
        return True
    if torch.Tag.pointwise in tags:
        return torch.Tag.nondeterministic_seeded not in tags
    if node.target not in _ALONG or len(node.args) <= _ALONG[node.target] or len(node.meta["val"].shape) == 0:
        return False
    (source,) = node.all_input_nodes
    wide, slim = source.meta["val"], before[source].meta["val"]
    if wide.dim() != node.meta["val"].dim():
        return False
    along: Any = node.args[_ALONG[node.target]]
    dims = {d % wide.dim() for d in along}
    return bool(dims) and all(wide.shape[d] == slim.shape[d] for d in dims)


def _recompute(gm: GraphModule, node: Node, val: Any, before: dict[Node, Node]) -> None:
    """The operation on what was expanded; in place of the node, if its result is no smaller."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: before.get(n, n))
    new = _called(gm, node, node.target, args, val, kwargs)
    made = new.meta["val"]
    whole = made.shape == val.shape
    if made.dim() != val.dim() or whole and made.stride() != val.stride():
        return
    if whole:
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    else:
        before[node] = new


def _called(gm: GraphModule, node: Node, operation: Any, args: Any, val: Any, kwargs: Any = None) -> Node:
    """An operation on nodes, ahead of `node`; with its result."""
    given = map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    with val.fake_mode:
        made = operation(*given[0], **given[1])
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(operation, args, kwargs or {})
    new.meta.update({**node.meta, "val": made})
    return new
