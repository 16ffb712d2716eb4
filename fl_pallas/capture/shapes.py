"""Operations that ask a tensor for its shape alone, `randn_like(scores)`, are told the shape: what PyTorch runs of them
would ask for the scores."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

aten = torch.ops.aten

# What makes the same of a shape, and how many arguments behind the tensor say the shape already.
_LIKE: dict[Any, tuple[Any, int]] = {
    aten.empty_like.default: (aten.empty.memory_format, 0),
    aten.zeros_like.default: (aten.zeros.default, 0),
    aten.ones_like.default: (aten.ones.default, 0),
    aten.full_like.default: (aten.full.default, 0),
    aten.rand_like.default: (aten.rand.default, 0),
    aten.randn_like.default: (aten.randn.default, 0),
    aten.randint_like.default: (aten.randint.default, 0),
    aten.randint_like.low_dtype: (aten.randint.low, 0),
    aten.new_empty.default: (aten.empty.memory_format, 1),
    aten.new_zeros.default: (aten.zeros.default, 1),
    aten.new_ones.default: (aten.ones.default, 1),
    aten.new_full.default: (aten.full.default, 1),
}
_SHAPE_LAST = (aten.randint.default, aten.randint.low)


def by_shape(gm: GraphModule) -> None:
    """Replace operations that read a tensor for its shape, dtype and device by those that are given them.

    Args:
      gm: an ATen graph with every result in `meta["val"]`; results keep their shapes and strides, and random numbers
        are the same.
    """
    for node in list(gm.graph.nodes):
        val = node.meta.get("val")
        if node.target not in _LIKE or not val.is_contiguous():
            continue
        make, said = _LIKE[node.target]
        shape, others = tuple(val.shape), node.args[1 + said :]
        args = (*others, shape) if make in _SHAPE_LAST else (shape, *others)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(make, args, {"dtype": val.dtype, "device": val.device})
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
