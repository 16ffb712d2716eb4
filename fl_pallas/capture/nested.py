"""Regions that a user marks as compiled once (`torch.compiler.nested_compile_region`): part of the graph they are in.

Before: `invoke_subgraph(layer, name, x, w)`, an operation that kernels know nothing of. After: what `layer` computes.
Kernels that are alike are compiled once in any case.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

_REGION = getattr(torch.ops.higher_order, "invoke_subgraph", None)


def inline(gm: GraphModule) -> None:
    """Put regions of a graph, as TorchDynamo captures it, in their places, and those inside of them."""
    while regions := [n for n in gm.graph.nodes if n.op == "call_function" and n.target is _REGION]:
        for n in regions:
            _put(gm, n)
        gm.recompile()


def _put(gm: GraphModule, n: Node) -> None:
    whole: Any
    whole, _, *operands = n.args
    region: Any = gm.get_submodule(whole.target)
    known: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    result: Any = None
    with gm.graph.inserting_before(n):
        for inner in region.graph.nodes:
            if inner.op == "output":
                result = map_arg(inner.args[0], known.__getitem__)
            elif inner.op == "get_attr":
                name = f"{whole.target}_{inner.target}".replace(".", "_")
                setattr(gm, name, operator.attrgetter(inner.target)(region))
                known[inner] = gm.graph.get_attr(name)
            elif inner.op != "placeholder":
                known[inner] = gm.graph.node_copy(inner, known.__getitem__)
    for user in [*n.users]:  # elements of what it returns
        user.replace_all_uses_with(result[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(n)
    if not whole.users:
        gm.graph.erase_node(whole)
