"""Masks that a program makes twice are one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg


def merge_masks(gm: GraphModule) -> None:
    """Before: `a = ~mask`, `b = ~mask`. After: what reads `b` reads `a`.

    Scores are masked before the softmax, and weights behind it: a forward pass that keeps both masks gives the backward
    pass two, and nothing tells it then that what it masks is masked by the same. Floats are left alone, and results,
    which are to have a memory of their own.

    Args:
      gm: an ATen graph with every result in `meta["val"]`.
    """
    (output,) = gm.graph.find_nodes(op="output")
    first: dict[Any, Node] = {}
    for n in gm.graph.nodes:
        if not _is_of_masks(n) or output in n.users:
            continue
        key = (n.target, *(repr(map_arg(some, lambda a: _Named(a.name))) for some in (n.args, n.kwargs)))
        other = first.setdefault(key, n)
        if other is not n:
            n.replace_all_uses_with(other)
    gm.graph.eliminate_dead_code()


class _Named(str):
    """A node in an argument, told from a string that has its name."""

    def __repr__(self) -> str:
        return f"<{self}>"


def _is_of_masks(n: Node) -> bool:
    """Whether a node makes a tensor of booleans or integers by a function of what it reads."""
    val = n.meta.get("val")
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload) or not isinstance(val, torch.Tensor):
        return False
    plain = not n.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in n.target.tags
    return plain and not val.dtype.is_floating_point and not val.dtype.is_complex
