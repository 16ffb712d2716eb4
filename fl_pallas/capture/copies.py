"""What is copied for the layer behind it is read there by all that comes later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def read_copies(gm: GraphModule, chains: Sequence[Sequence[str]]) -> None:
    """Before: `c = o.transpose(1, 2).clone()`, and later reads of `o`. After: these read `c.transpose(1, 2)`.

    Args:
      gm: an ATen graph with every result in `meta["val"]`.
      chains: of names of nodes, views without loss, each of the one before; the last of a chain is the copy, and
        precedes all else that reads one of them, or what the first views.
    """
    nodes = {n.name: n for n in gm.graph.nodes}
    for chain in chains:
        _read_copy(gm, [nodes[name] for name in chain])
    if chains:
        gm.graph.eliminate_dead_code()


def _read_copy(gm: GraphModule, chain: Sequence[Node]) -> None:
    seen = chain[-1]
    for node in reversed(chain):
        source = node.all_input_nodes[0]
        with gm.graph.inserting_after(seen):
            seen = _undone(gm.graph, node, source, seen)
        seen.meta.update(source.meta)
        for user in [u for u in source.users if u is not node]:
            user.replace_input_with(source, seen)


def _undone(graph: torch.fx.Graph, view: Node, source: Node, seen: Node) -> Node:
    """`seen`, which holds what `view` holds, as `source` lies."""
    shape = list(source.meta["val"].shape)
    if view.target is aten.transpose.int:
        return graph.call_function(aten.transpose.int, (seen, *view.args[1:]))
    if view.target is aten.t.default:
        return graph.call_function(aten.t.default, (seen,))
    if view.target is aten.permute.default:
        order: list[int] = [d % len(shape) for d in view.args[1]]  # type: ignore[union-attr]
        return graph.call_function(aten.permute.default, (seen, [order.index(d) for d in range(len(order))]))
    return graph.call_function(aten.reshape.default, (seen, shape))
