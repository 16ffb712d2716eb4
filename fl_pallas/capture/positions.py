"""Where an extremum was found, kept for the backward pass: scores that it computes again may differ in the last bit."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..errors import SourceLoc, Unsupported
from ..schedule.passes.keep import Compared
from .tensor import normal_dims
from .translate import line_of

aten = torch.ops.aten

# Which of them hold where an element is its row's extremum, and which where it is not.
_EQUAL: dict[Any, str] = {aten.eq.Tensor: "", aten.ge.Tensor: "max", aten.le.Tensor: "min"}
_OTHER: dict[Any, str] = {aten.ne.Tensor: "", aten.lt.Tensor: "max", aten.gt.Tensor: "min"}
_EXTREMA: dict[Any, str] = {
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.max.dim: "max",
    aten.min.dim: "min",
}
_SAME_ELEMENTS = (aten.detach.default, aten.alias.default)
_SAME_ROWS = (
    *_SAME_ELEMENTS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.view.default,
    aten._unsafe_view.default, aten.expand.default, operator.getitem,
)  # fmt: skip
# Of several that equal their extremum, how far off they may be when they are computed again; by bits of the type.
_NEAR, _NEAR_SIXTEEN = 1e-5, 2.0**-7


def by_position(joint: GraphModule, compared: Compared, limit: int) -> frozenset[str]:
    """Before: `x == x.amax(d)`. After: `arange == x.argmax(d)`; where several are equal, x is compared, with some room.

    Args:
      joint: an ATen graph of both passes, every result in `meta["val"]`; it is changed.
      compared: whose `x` the backward pass computes again.
      limit: how many elements an `x` has at most that is kept instead.

    Returns: names of what is to be kept, and PyTorch's: of linear size; or compared with its extremum over several
    dimensions, or with that of something else.

    Raises: Unsupported where the latter is larger.
    """
    made: dict[tuple[Node, str, int], tuple[Node, Node, Node]] = {}
    kept: set[str] = set()
    for test in [n for n in joint.graph.nodes if n.name in compared.names]:
        sides = [_made(n) for n in test.args if isinstance(n, Node)]
        small = all(n.meta["val"].numel() <= limit for n in sides)
        found = None if small and test.name in compared.linear else _compared(test)
        if found is None:
            if not small:
                of = "of several dimensions, or of something else (detach it)"
                why = f"the gradient goes to what equals the maximum {of}"
                raise without_gradient(why, (line_of(n) for n in (*sides, test)))
            top, *others = sorted(sides, key=lambda n: n.meta["val"].numel())
            # What kernels reduce to it, they store.
            own = [n for n in others if n.op != "placeholder" and n.name not in compared.reduced]
            kept |= {n.name for n in (top, *own)}
            continue
        x, top, kind, d = found
        with joint.graph.inserting_before(test):
            if (x, kind, d) not in made:
                made[x, kind, d] = _positions(joint, test, x, top, kind, d)
            count, share, is_one = made[x, kind, d]
            there = is_one if test.target in _EQUAL else _call(joint, test, aten.logical_not.default, is_one)
        for user in list(test.users):
            if user.target is aten.sum.dim_IntList and test.target in _EQUAL and _is_count(user, count):
                for divided in [n for n in user.users if n.target is aten.div.Tensor and n.args[0] is not user]:
                    divided.replace_input_with(user, share)
                user.replace_all_uses_with(count)
            else:
                user.replace_input_with(test, there)
    joint.graph.eliminate_dead_code()
    return frozenset(kept)


def without_gradient(why: str, lines: Iterable[SourceLoc | None]) -> Unsupported:
    """What is raised of a maximum, at the first of its lines that is known."""
    where = next((line for line in lines if line is not None), None)
    return Unsupported("a maximum that needs a gradient", why, where)


def _made(node: Node) -> Node:
    """What a tensor was before views of it."""
    made = _through(node, _SAME_ROWS)
    return made if isinstance(made.meta["val"], torch.Tensor) else node  # one of several results


def _compared(test: Node) -> tuple[Node, Node, str, int] | None:
    """What is compared, with which extremum of it, whether that is its max or min, over which dimension; None if it is
    none of that kind."""
    kind = {**_EQUAL, **_OTHER}.get(test.target)
    sides = [n for n in test.args if isinstance(n, Node)]
    for x, top in (sides, sides[::-1]) if len(sides) == 2 and kind is not None else ():
        extremum, source = _through(top, _SAME_ROWS), _through(x, _SAME_ELEMENTS)
        args: Any = extremum.args
        if extremum.target in _EXTREMA and _through(args[0], _SAME_ELEMENTS) is source:
            own = _EXTREMA[extremum.target]
            mirrored = x is not sides[0]
            fits = kind == "" or kind == ({"max": "min", "min": "max"}[own] if mirrored else own)
            shape = list(source.meta["val"].shape)
            dims = normal_dims(args[1] if len(args) > 1 else None, len(shape))
            if len(dims) == 1 and fits:
                (d,) = dims
                # Without its dimension the maximum of a row may stand for that of another.
                if list(top.meta["val"].shape) in ([*shape[:d], 1, *shape[d + 1 :]], shape):
                    return source, top, own, d
    return None


def _through(node: Node, targets: tuple[Any, ...]) -> Node:
    while node.target in targets and isinstance(node.args[0], Node):
        if node.target is operator.getitem and node.args[1] != 0:
            break
        node = node.args[0]
    return node


def _positions(joint: GraphModule, test: Node, x: Node, top: Node, kind: str, d: int) -> tuple[Node, Node, Node]:
    """How many elements equal the extremum; by what their gradient is divided; and which element is one of them."""

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return _call(joint, test, target, *args, **kwargs)

    value = x.meta["val"]
    place = call(aten.argmax.default if kind == "max" else aten.argmin.default, x, d, True)
    count = call(aten.sum.dim_IntList, call(aten.eq.Tensor, x, top), [d], True)
    along = call(aten.arange.default, value.shape[d], device=value.device)
    along = call(aten.view.default, along, [-1, *[1] * (value.dim() - 1 - d)])
    near = _NEAR_SIXTEEN if value.dtype.itemsize == 2 else _NEAR
    room = call(aten.mul.Tensor, call(aten.sign.default, top), -near if kind == "max" else near)
    bound = call(aten.mul.Tensor, top, call(aten.add.Tensor, room, 1))
    less = call(aten.lt.Tensor if kind == "max" else aten.gt.Tensor, x, bound)
    # None where a compiler takes the maximum of scores that it computes once more than it compares with it.
    one = call(aten.lt.Scalar, count, 2)
    is_one = call(aten.where.self, one, call(aten.eq.Tensor, along, place), call(aten.logical_not.default, less))
    share = call(aten._to_copy.default, call(aten.clamp_min.default, count, 1), dtype=value.dtype)
    # NaN equals nothing, and PyTorch divides 0 by 0; here a factor of a whole row might be taken out of a sum.
    share = call(aten.masked_fill.Scalar, share, call(aten.isnan.default, top), math.nan)
    return count, share, is_one


def _is_count(node: Node, count: Node) -> bool:
    shape = count.meta["val"].shape
    dims: Any = node.args[1]
    return [*normal_dims(dims, len(shape))] == count.args[1] and node.meta["val"].shape == shape


def _call(joint: GraphModule, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call that stands where `like` does in the user's source."""
    node = joint.graph.call_function(target, args, kwargs)
    values = map_arg((args, kwargs), lambda n: n.meta["val"])
    with like.meta["val"].fake_mode:
        node.meta.update({**like.meta, "val": target(*values[0], **values[1])})
    return node
