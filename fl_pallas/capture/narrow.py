"""Tensors that are expanded first and then computed with are computed first: `norm(q.expand(..))` is as wide as `q`.

A comparison of all pairs by a function of two tensors (`F.cosine_similarity(q[:, None], k[None])`) expands both sides
and works on each alone. Left so, each side would be as large as all pairs are.
"""

from __future__ import annotations

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

_SAME = (aten.detach.default, aten.alias.default)


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
            if isinstance(source, Node) and source.meta["val"].dim() == val.dim():
                before[node] = before.get(source, source)
        elif any(n in before for n in node.all_input_nodes) and _is_alike(node, before):
            _recompute(gm, node, val, before)
    gm.graph.eliminate_dead_code()
    gm.recompile()


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
    operation: Any = node.target
    args, kwargs = slim = map_arg((node.args, node.kwargs), lambda n: before.get(n, n))
    given_args, given_kwargs = map_arg(slim, lambda n: n.meta["val"])
    with val.fake_mode:
        made = operation(*given_args, **given_kwargs)
    whole = made.shape == val.shape
    if made.dim() != val.dim() or whole and made.stride() != val.stride():
        return
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(operation, args, kwargs)
    new.meta.update({**node.meta, "val": made})
    if whole:
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    else:
        before[node] = new
