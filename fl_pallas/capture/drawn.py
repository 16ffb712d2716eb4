"""Which random numbers kernels draw: those of a blow-up. PyTorch's own operations draw all others, faster."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from ..schedule.program import Program
from .random import RULES
from .translate import translate

aten, ours = torch.ops.aten, torch.ops.fl_pallas
# Program -> names of the values that are as large as the blow-up of a kernel that computes them.
Inner = Callable[[Program], frozenset[str]]


def give_back(gm: GraphModule, inner: Inner) -> None:
    """Replace the operations of `random.py` that no kernel takes in by PyTorch's own, forward and backward alike.

    Those of a probability that is not known stay.
    """
    seeds = {_seed(n): None for n in gm.graph.nodes if n.target in RULES and not isinstance(n.args[-1], Node)}
    if not seeds:
        return
    kept = inner(translate(gm))
    for seed in seeds:
        if not any(n.name in kept for n in seed.users):
            _replace(gm.graph, seed)


def _seed(n: Node) -> Node:
    return n.args[0 if n.target == ours.uniform.default else 1]  # type: ignore[return-value]


def _replace(graph: Graph, seed: Node) -> None:
    """Replace what is drawn with one seed: numbers, or a dropout and then, further on in the graph, the dropouts of its
    gradient."""
    mask: Node | None = None
    for n in [n for n in graph.nodes if n in seed.users]:
        val, p = n.meta["val"], cast(float, n.args[-1])
        with graph.inserting_before(n):
            if n.target == ours.uniform.default:
                new = _call(graph, n, aten.rand.default, (val.shape,), val, device=val.device, dtype=val.dtype)
            elif mask is None:
                x = n.args[0]
                kept = val.new_empty(val.shape, dtype=torch.bool)
                both = _call(graph, n, aten.native_dropout.default, (x, p, True), (val, kept))
                new, mask = (_call(graph, n, operator.getitem, (both, k), v) for k, v in enumerate((val, kept)))
            else:
                gradient = n.args[0]
                new = _call(graph, n, aten.native_dropout_backward.default, (gradient, mask, 1 / (1 - p)), val)
        n.replace_all_uses_with(new)
        graph.erase_node(n)
    graph.erase_node(seed)


def _call(graph: Graph, like: Node, target: Any, args: tuple[Any, ...], val: Any, **kwargs: Any) -> Node:
    made = graph.call_function(target, args, kwargs)
    made.meta.update({**like.meta, "val": val})
    return made
