"""Graphs that were put together anew: their nodes in an order in which they can run, and views that may not be any."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..errors import Unsupported


def sort(graph: Graph) -> None:
    """Put every node after what it reads, otherwise keeping the order.

    Raises: Unsupported if no order will do.
    """
    placed: set[Node] = set()
    pending = [n for n in graph.nodes if n.op != "output"]
    cursor = graph._root
    while pending:
        waiting = []
        for n in pending:
            if all(a in placed for a in n.all_input_nodes):
                cursor.append(n)
                cursor = n
                placed.add(n)
            else:
                waiting.append(n)
        if len(waiting) == len(pending):
            raise Unsupported("regions", "they read each other's results")
        pending = waiting


def with_reshapes(graph: Graph) -> None:
    """Views become reshapes: kernels write contiguous tensors, where PyTorch may keep the strides of what it reads, and
    its operations may give other strides than were traced (a sum of what is expanded and what is transposed)."""
    for n in graph.nodes:
        if n.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            n.target = torch.ops.aten.reshape.default
