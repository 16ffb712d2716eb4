"""Reads and writes at a place that a tensor of no dimensions tells (`cache[:, :, step] = k`), as at lists of one place.

PyTorch would ask such a tensor for its number, which is not known while a graph is captured.

Before: `cache[:, :, step] = k`, `cache[:, :, step]`.
After: `cache[:, :, step.unsqueeze(0)] = k.unsqueeze(-2)`, `cache[:, :, step.unsqueeze(0)].squeeze(-2)`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node


def at_lists(gm: GraphModule) -> None:
    """Have a graph, as TorchDynamo captures it, read and write at lists of one place."""
    changed = False
    for n in [n for n in gm.graph.nodes if n.target in (operator.getitem, operator.setitem)]:
        whole, index, *written = n.args
        index = index if isinstance(index, tuple) else (index,)
        tensors = [k for k, i in enumerate(index) if isinstance(i, Node)]
        if len(tensors) != 1 or not _is_place(index[tensors[0]]) or not isinstance(_value(whole), torch.Tensor):
            continue
        changed = True
        (at,) = tensors
        behind = _dims_behind(index, at, _value(whole).dim())
        with gm.graph.inserting_before(n):
            places = gm.graph.call_method("unsqueeze", (index[at], 0))
            there = (*index[:at], places, *index[at + 1 :])
            if written:
                n.args = (whole, there, _along(gm, written[0], behind))
                continue
            read = gm.graph.call_function(operator.getitem, (whole, there))
            found = gm.graph.call_method("squeeze", (read, -1 - behind))
        for made in (read, found):
            made.meta["stack_trace"] = n.meta.get("stack_trace")
        found.meta["example_value"] = _value(n)
        n.replace_all_uses_with(found)
        gm.graph.erase_node(n)
    if changed:
        gm.recompile()


def _along(gm: GraphModule, written: Any, behind: int) -> Any:
    """What is written, with a dimension of one place before the last `behind`, if it has more."""
    value = _value(written) if isinstance(written, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() <= behind:
        return written
    return gm.graph.call_method("unsqueeze", (written, -1 - behind))


def _value(n: Node) -> Any:
    return n.meta.get("example_value")


def _is_place(n: Node) -> bool:
    value = _value(n)
    return isinstance(value, torch.Tensor) and not value.dim() and value.dtype == torch.int64


def _dims_behind(index: Sequence[Any], at: int, dim: int) -> int:
    """How many dimensions of `x[index]`, x of `dim` dimensions, lie behind the one that index[at] is for."""
    behind = index[at + 1 :]
    kept = sum(i is None or isinstance(i, slice) for i in behind)
    # What no index is for lies where the dots are, or last.
    left = dim - sum(i is not None and i is not Ellipsis for i in index)
    return kept + (left if Ellipsis in behind or Ellipsis not in index else 0)
