"""The rule tables, and how one operation becomes expressions by them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from ..errors import Unsupported
from ..schedule.expr import Expr
from . import convolution, indexing, pointwise, random, reduction, scatter, view
from .decompose import decomposition, has_decomposition
from .dtypes import short_dtype
from .tensor import At, Indices, Spec, Tensor

RULES: dict[Any, Callable[..., Any]] = {
    **pointwise.RULES,
    **view.RULES,
    **indexing.RULES,
    **scatter.RULES,
    **reduction.RULES,
    **convolution.RULES,
    **random.RULES,
}

aten = torch.ops.aten
_REASONS: dict[Any, str] = {
    **dict.fromkeys((aten.sort, aten.argsort, aten.topk, aten.kthvalue, aten.median), "sorting"),
    **dict.fromkeys((aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp), "a scan"),
}
_TAG_REASONS = {
    torch.Tag.nondeterministic_seeded: "random numbers",
    torch.Tag.data_dependent_output: "a result that depends on data",
    torch.Tag.dynamic_output_shape: "a shape that depends on data",
}

Specs = Spec | tuple[Spec | None, ...]
Result = Tensor | tuple[Tensor | None, ...]


def apply(target: Any, val: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result | None:
    """The result of the operation `target` on tensors, by its rule or by PyTorch's decomposition of it.

    Args:
      target: the operation.
      val: what PyTorch says of its result: a tensor (shape and type), or a tuple of tensors.
      args, kwargs: its arguments, with a `Tensor` for every tensor.

    Returns:
      A tensor, or one per result (None: that result has no rule); None for results that are no tensors.

    Raises:
      Unsupported: nothing says what the operation computes.
    """
    out = _spec(val)
    if out is None:
        return None
    packet = getattr(target, "overloadpacket", None)
    rule = RULES.get(target) or RULES.get(packet) or RULES.get(_of_prim(target))
    if rule is None:
        return _decomposed(target, packet, out, args, kwargs)
    made = rule(out, *args, **kwargs)
    if isinstance(out, Spec):
        return Tensor(out.shape, out.dtype, made)
    return tuple(
        None if at is None or spec is None else Tensor(spec.shape, spec.dtype, at) for spec, at in zip(out, made)
    )


def _of_prim(target: Any) -> Any:
    """The operation of ATen's that does what one of "prims" does, of which some decompositions are made."""
    if getattr(target, "namespace", "") != "prims" or target._opname == "div":  # integers' is another
        return None
    packet = getattr(aten, target._opname, None)
    return packet if packet in RULES else getattr(packet, "default", None)


def _decomposed(target: Any, packet: Any, out: Specs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    if packet in _REASONS:
        raise Unsupported(str(target), _REASONS[packet])
    if not has_decomposition(target):
        tags = getattr(target, "tags", ())
        raise Unsupported(
            str(target), next((why for tag, why in _TAG_REASONS.items() if tag in tags), f"no rule for {target}")
        )
    graph, inputs = decomposition(target, args, kwargs)
    env: dict[Node, Any] = {}

    def read(node: Node) -> Any:
        if env[node] is None:
            raise Unsupported(str(target), f"no rule for a step of {target}")
        return env[node]

    placeholders = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(placeholders)
        elif node.op == "output":
            return _fitting(map_arg(node.args[0], env.__getitem__), out)
        elif is_getitem(node):
            env[node] = read(node.args[0])[node.args[1]]
        elif node.op == "call_function" and node.target is not target:
            inner = map_arg((node.args, node.kwargs), read)
            env[node] = _remembered(apply(node.target, node.meta["val"], *inner))
        else:
            break
    raise Unsupported(str(target), f"no rule for {target}")


def _fitting(made: Any, out: Specs) -> Result:
    """What a decomposition gives, less the results that are not what the operation itself gives.

    Some decompositions return other things, or nothing, in places that only a backward pass reads.
    """
    if isinstance(out, Spec):
        if isinstance(made, Tensor) and made.shape == out.shape:
            return made
        raise Unsupported("decomposition", "its result has another shape")
    pairs = zip_longest(made[: len(out)], out)
    return tuple(m if isinstance(m, Tensor) and s and m.shape == s.shape else None for m, s in pairs)


def _remembered(result: Result | None) -> Any:
    """`result` with each element built once: a decomposition may read one tensor in many places."""
    if isinstance(result, tuple):
        return tuple(map(_remembered, result))
    if result is None:
        return None
    known: dict[Indices, Expr] = {}
    made: At = result.at

    def at(idx: Indices) -> Expr:
        if idx not in known:
            known[idx] = made(idx)
        return known[idx]

    return Tensor(result.shape, result.dtype, at)


def _spec(val: Any) -> Specs | None:
    if isinstance(val, (tuple, list)):
        return tuple(map(_tensor_spec, val))
    spec = _tensor_spec(val)
    if spec is None and isinstance(val, torch.Tensor):
        raise Unsupported("tensor", f"element type {val.dtype}")
    return spec


def _tensor_spec(val: Any) -> Spec | None:
    dtype = short_dtype(val.dtype) if isinstance(val, torch.Tensor) else None
    return None if dtype is None else Spec(tuple(val.shape), dtype)


def is_getitem(node: Node) -> bool:
    """Whether `node` picks one result of an operation that has several."""
    return node.target is operator.getitem
