"""Writes to what the graph itself has made, done without writing.

`s = einsum("nlhd,nshd->nlsh", q, k); s.masked_fill_(mask, -inf)` writes through a view of a product, of another order
of dimensions: PyTorch (to 2.13) cannot trace the gradient of that.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = frozenset(
    f"{name}_"
    for name in "masked_fill add sub mul div clamp clamp_min clamp_max exp neg relu sigmoid tanh square sqrt".split()
)


def out_of_place(gm: GraphModule) -> GraphModule | None:
    """The same graph with new tensors in the place of those written to, where nothing else shows their memory later;
    None if there is none.

    Args:
      gm: of torch functions, as TorchDynamo captures it, with every tensor in `meta["example_value"]`.
    """
    made = GraphModule(gm, copy.deepcopy(gm.graph))
    place = {n: k for k, n in enumerate(made.graph.nodes)}
    changed = False
    for n in [*made.graph.nodes]:
        if not _writes(n) or not _is_alone(n, place):
            continue
        written: Any = n.args[0]
        with made.graph.inserting_before(n):
            if n.op == "call_method":
                new = made.graph.call_method(str(n.target)[:-1], n.args, n.kwargs)
            else:
                new = made.graph.call_function(_OPERATORS[n.target], n.args, n.kwargs)
        new.meta, place[new] = n.meta, place[n]
        n.replace_all_uses_with(new)
        written.replace_all_uses_with(new, delete_user_cb=lambda u, at=place[n]: place[u] > at)
        made.graph.erase_node(n)
        changed = True
    if not changed:
        return None
    made.recompile()
    return made


def _writes(n: Node) -> bool:
    """Whether `n` writes floats of the type that they would have without."""
    known = n.target in (_METHODS if n.op == "call_method" else _OPERATORS) and not n.kwargs
    if n.op not in ("call_method", "call_function") or not known or not isinstance(n.args[0], Node):
        return False
    first, *others = (_value(a) for a in n.args if isinstance(a, Node))
    tensors = [v for v in others if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim()]
    return (
        isinstance(first, torch.Tensor) and first.is_floating_point() and all(v.dtype == first.dtype for v in tensors)
    )


def _is_alone(n: Node, place: dict[Node, int]) -> bool:
    """Whether what `n` writes to is no input, nor a view of what is read later."""
    written = n.args[0]
    memory = _memory(written)
    for m in (m for m in place if place[m] < place[n] and memory is not None and _memory(m) == memory):
        if m.op in ("placeholder", "get_attr") or m is not written and any(place[u] > place[n] for u in m.users):
            return False
    return memory is not None


def _value(n: Any) -> Any:
    return n.meta.get("example_value")


def _memory(n: Any) -> int | None:
    value = _value(n)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
