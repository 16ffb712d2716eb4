"""What several layers add up, and is summed then, is summed for each by itself.

The gradient of a bias that layers share (T5's table) is the sum of those of all layers' scores, which is summed over
the batch then, and into the table. The scores of one layer wait for what is made of a later one's: no kernel adds them
up.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

# Linear in their first argument: those that sum, and those that move or scale it alone.
_SUMS = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.embedding_dense_backward.default}
MOVES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.slice.Tensor, aten.select.int, aten.clone.default, aten._to_copy.default, aten.alias.default,
    aten.neg.default, aten.slice_backward.default, aten.select_backward.default,
}  # fmt: skip
_SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_PUTS = {aten.index_put.default, aten._unsafe_index_put.default}
_ELEMENTWISE = {aten._softmax.default, aten._softmax_backward_data.default}
# Products with a weight: what they lie between are layers.
_LAYERS = {aten.mm.default, aten.addmm.default, aten.linear.default}


def distribute(gm: GraphModule) -> None:
    """Before: `w = sum(s1 + s2)`, where s1 waits for a layer that reads s2. After: `w = sum(s1) + sum(s2)`.

    Args:
      gm: an ATen graph with every result in `meta["val"]`.
    """
    for node in reversed([*gm.graph.nodes]):
        terms = _terms(node)
        if terms is not None and (found := _summed(node)) and _wait(*terms):
            _apart(gm, node, terms, found)


def _terms(node: Node) -> tuple[Node, Node] | None:
    """The two tensors of one shape that a node adds up."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return None
    a, b = node.all_input_nodes if len(node.all_input_nodes) == 2 else (node, node)
    shapes = {tuple(n.meta["val"].shape) for n in (a, b, node) if isinstance(n.meta.get("val"), torch.Tensor)}
    kinds = {n.meta["val"].dtype for n in (a, b, node) if isinstance(n.meta.get("val"), torch.Tensor)}
    return (a, b) if a is not b and len(shapes) == len(kinds) == 1 and next(iter(kinds)).is_floating_point else None


def _summed(node: Node) -> list[Node]:
    """All that is linear in a node, in order, if nothing else reads it, and each way from it ends behind a sum."""
    found: dict[Node, bool] = {node: False}
    zeros: set[Node] = set()
    for user in _after(node):
        read = [n for n in user.all_input_nodes if n in found and n not in zeros]
        if read and _is_zero(user):
            zeros.add(user)  # it takes the shape alone
            found[user] = True
        elif read and user.op == "call_function" and (sums := _is_linear(user, read)) is not None:
            found[user] = sums or found[read[0]]
    ends = [n for n in found if any(u not in found for u in n.users)]
    return [*found][1:] if all(found[n] for n in ends) else []


def _after(node: Node) -> list[Node]:
    every = [*node.graph.nodes]
    return every[every.index(node) + 1 :]


def _is_linear(user: Node, read: list[Node]) -> bool | None:
    """Whether an operation that is linear in the one node it has of `read` sums; None if it is none."""
    if len(read) != 1:
        return None
    (source,) = read
    target, args = user.target, user.args
    if target is aten.where.self:
        return None if args[0] is source or not any(isinstance(a, Node) and _is_zero(a) for a in args[1:]) else False
    if target is aten.masked_fill.Scalar:
        return False if args[0] is source and args[2] == 0 else None
    uses = sum(a is source for a in args)
    if target in _PUTS:
        put, _, values, *accumulate = args
        zeros = isinstance(put, Node) and _is_zero(put)
        return True if values is source and zeros and accumulate == [True] else None
    if uses != 1 or args[0] is not source and target is not aten.mul.Tensor:
        return None
    if target in MOVES or target in _SCALES:
        same = user.meta["val"].dtype == source.meta["val"].dtype
        return False if same or target is aten._to_copy.default and user.meta["val"].is_floating_point() else None
    return True if target in _SUMS else None


def _is_zero(node: Node) -> bool:
    """Whether a tensor is made of nothing but zeros."""
    if node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default):
        return True
    fills: dict[Any, int] = {
        aten.scalar_tensor.default: 0,
        aten.full.default: 1,
        aten.full_like.default: 1,
        aten.new_full.default: 1,
    }
    value: Any = node.args[fills[node.target]] if node.target in fills else None
    return isinstance(value, (int, float)) and value == 0


def _wait(a: Node, b: Node) -> bool:
    """Whether one of two tensors waits for a product with a weight of the scores that the other sums."""
    return any(_reaches(o, y) for x, y in ((a, b), (b, a)) for o in _origins(x) if _is_of_scores(o))


def _origins(node: Node) -> list[Node]:
    """What a tensor is summed from, or only moved."""
    if node.target in _SUMS | MOVES or _terms(node) is not None:
        return [o for n in node.all_input_nodes for o in _origins(n)]
    return [node]


def _is_of_scores(node: Node) -> bool:
    """Whether a tensor is made, element by element, of a product of two tensors that a batch does not share.

    What layers hand on (the gradient of embeddings) is made of products with weights.
    """
    return is_made_of(node, MOVES | _ELEMENTWISE | {aten.copy.default}, lambda n: n.target is aten.bmm.default)


def is_made_of(node: Node, through: Set[Any], wanted: Callable[[Node], bool]) -> bool:
    """Whether a tensor is made, element by element and by the operations of `through`, of one that is `wanted`."""
    stack, seen = [node], {node}
    while stack:
        n = stack.pop()
        if wanted(n):
            return True
        if n.target in through or torch.Tag.pointwise in getattr(n.target, "tags", ()):
            stack += {*n.all_input_nodes} - seen
            seen |= {*n.all_input_nodes}
    return False


def _reaches(source: Node, goal: Node) -> bool:
    before: dict[Node, bool] = {source: False}
    for node in _after(source):
        read = [before[n] for n in node.all_input_nodes if n in before]
        if read:
            before[node] = any(read) or node.target in _LAYERS
        if node is goal:
            return before.get(node, False)
    return False


def _apart(gm: GraphModule, node: Node, terms: tuple[Node, Node], found: list[Node]) -> None:
    """Replace what is made of a sum by the sum of what is made of its terms."""
    made: dict[tuple[Node, Node], Node] = {(node, t): t for t in terms}
    known = {node, *found}
    for old in found:
        with gm.graph.inserting_before(old):
            for t in terms:
                made[old, t] = gm.graph.node_copy(old, lambda n, t=t: made.get((n, t), n))
        if any(u not in known for u in old.users):
            with gm.graph.inserting_before(old):
                total = gm.graph.call_function(aten.add.Tensor, tuple(made[old, t] for t in terms))
            total.meta.update(old.meta)
            old.replace_all_uses_with(total, delete_user_cb=lambda u: u not in known)
    for old in (*reversed(found), node):
        gm.graph.erase_node(old)
