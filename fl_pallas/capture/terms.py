"""Products with each of the weights that are added up, for a backward pass to read.

`(p1 - lam * p2) @ v` is one product, and the row sum of each softmax's gradient wants that softmax's own: the forward
kernel has it, for each softmax is summed about a maximum of its own. Without it a loop over all keys is needed.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .distribute import MOVES, is_made_of

aten = torch.ops.aten

_PRODUCTS = {aten.bmm.default, aten.mm.default}
_VIEWS = MOVES | {aten.expand.default}


def offer_terms(gm: GraphModule) -> tuple[str, ...]:
    """Add the product with each term of a sum of weights, which nothing reads yet, behind each product with the sum.

    Args:
      gm: an ATen graph of both passes, with every result in `meta["val"]`; it gains nodes.

    Returns: their names.
    """
    later: set[Node] = set()
    offered: list[str] = []
    for node in [*gm.graph.nodes]:
        if node.name.startswith("tangents") or later.intersection(node.all_input_nodes):
            later.add(node)
        elif node.target in _PRODUCTS:
            for operand in node.all_input_nodes:
                offered += [_product(gm, node, operand, views, term) for views, term in _terms(operand)]
    return tuple(offered)


def _terms(operand: Node) -> list[tuple[list[Node], Node]]:
    """The weights that an operand adds up, if they are several, and the views that lead from their sum to it."""
    *views, total = _seen(operand)
    terms = [n for n in dict.fromkeys(_added(total)) if _is_like(n, total) and is_made_of(n, _VIEWS, _is_share)]
    return [(views[::-1], n) for n in terms] if len(terms) > 1 else []


def _seen(node: Node) -> list[Node]:
    """A node that is a view, what it views, and so on; or a node alone."""
    return [node, *_seen(node.all_input_nodes[0])] if node.target in _VIEWS else [node]


def _added(node: Node) -> list[Node]:
    """What a node adds up, each perhaps multiplied by what is the same for all of a row."""
    args = [a for a in node.args if isinstance(a, Node)]
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.neg.default):
        return [t for a in args for t in _added(a)]
    if node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        own = [a for a in args if _is_like(a, node)]
        if len(own) == 1 and (own[0] is node.args[0] or node.target is aten.mul.Tensor) and not _is_share(node):
            return _added(own[0])
    return [node]


def _is_like(node: Node, other: Node) -> bool:
    """Whether two tensors have one shape and type."""
    a, b = node.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype


def _is_share(node: Node) -> bool:
    """Whether a node divides something by its own sum: the gradient of such a share has a sum of the row in it."""
    if node.target is not aten.div.Tensor or not isinstance(node.args[1], Node):
        return False
    *_, total = _seen(node.args[1])
    return total.target is aten.sum.dim_IntList and total.args[0] is node.args[0]


def _product(gm: GraphModule, node: Node, operand: Node, views: list[Node], term: Node) -> str:
    """The name of a product like `node`, with `term`, seen by `views`, in the place of one of its operands."""
    seen, made = _seen(operand)[-1], term
    with gm.graph.inserting_before(node):
        for view in views:
            made = gm.graph.node_copy(view, lambda n, known={seen: made}: known.get(n, n))
            seen = view
    with gm.graph.inserting_after(node):
        return gm.graph.node_copy(node, lambda n: made if n is operand else n).name
