"""What PyTorch's attention functions return lies as PyTorch's kernels lay it: heads side by side, perhaps.

Opened up, their results would be contiguous, and what comes later would be refused (`sdpa(...).transpose(1, 2).view(b,
n, -1)` reads what lies so).

Before: `o = sdpa(q, k, v)`. After: `o = sdpa(q, k, v).transpose(-3, -2).contiguous().transpose(-3, -2)`.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

FLEX = torch.ops.higher_order.flex_attention
_MOVES = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze")


def lay_as_pytorch(gm: GraphModule) -> None:
    """Put the layout of results of attention functions into a graph, as TorchDynamo captures it."""
    attention = [n for n in gm.graph.nodes if _is_attention(n) and _has_heads_inside(n.meta.get("example_value"))]
    for node in filter(_is_seen, attention):
        with gm.graph.inserting_before(node.next):
            turned = gm.graph.call_method("transpose", (node, -3, -2))
            laid = gm.graph.call_method("contiguous", (turned,))
            back = gm.graph.call_method("transpose", (laid, -3, -2))
        for made in (turned, laid, back):
            made.meta["stack_trace"] = node.meta.get("stack_trace")
        node.replace_all_uses_with(back, lambda user, turned=turned: user is not turned)
    gm.recompile()


def _is_seen(n: Node) -> bool:
    """Whether it matters how a tensor lies: it is returned, or viewed in another shape. Other operations copy it."""
    moved = (u for u in n.users if getattr(u.target, "__name__", u.target) in _MOVES)
    return any(u.op == "output" or u.target in ("view", "view_as") for u in n.users) or any(map(_is_seen, moved))


def _is_attention(n: Node) -> bool:
    if n.target is operator.getitem:
        source, place = n.args
        return isinstance(source, Node) and source.target is FLEX and bool(place == 0)
    return n.target is torch.nn.functional.scaled_dot_product_attention


def _has_heads_inside(fake: object) -> bool:
    """Whether heads [..., heads, queries, features] lie side by side, and not queries."""
    if not isinstance(fake, torch.Tensor) or fake.dim() < 3:
        return False
    return not fake.is_contiguous() and fake.transpose(-3, -2).is_contiguous()
