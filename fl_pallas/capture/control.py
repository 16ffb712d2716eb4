"""Control flow that data decides (`torch.cond`, `while_loop`, `scan`, `map`): Python's, about graphs that fuse.

Before: `cond(flag, causal_branch, local_branch, (q, k, v))`, an operation that kernels know nothing of. After: a module
that looks at `flag`, and runs one of the two branches, each of them compiled as any graph is. PyTorch's own operations
do the same where nothing is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

Call = Callable[..., Any]


def is_control(n: Node) -> bool:
    """Whether an operation runs graphs of its own, as often as data says."""
    return isinstance(n.target, torch._ops.HigherOrderOperator) and n.target.__name__ in _FLOWS


def has_control(gm: GraphModule) -> bool:
    """Whether a graph, as TorchDynamo captures it, has such an operation."""
    return any(map(is_control, gm.graph.nodes))


def with_calls(gm: GraphModule, compiled: Callable[[GraphModule], Call]) -> GraphModule:
    """A graph whose control flow is Python's.

    Args:
      gm: of torch functions, as TorchDynamo captures it; it changes.
      compiled: makes what computes an inner graph, with arguments that may have other strides than the first time, and
        need gradients where they did not.
    """
    for n in filter(is_control, [*gm.graph.nodes]):
        flow = _FLOWS[n.target.__name__]
        inner = [a for a in n.args if isinstance(a, Node) and isinstance(_module(gm, a), GraphModule)]
        calls = [compiled(_tupled(_module(gm, a))) for a in inner]
        name = f"{n.name}_calls"
        gm.add_submodule(name, _Flow(flow, calls))
        n.op, n.target, n.args = "call_module", name, tuple(a for a in n.args if a not in inner)
        for a in dict.fromkeys(inner):
            if not a.users:
                gm.graph.erase_node(a)
    gm.recompile()
    return gm


class _Flow(torch.nn.Module):
    """Control flow about the calls that stand in the place of its graphs."""

    def __init__(self, flow: Call, calls: Sequence[Call]):
        super().__init__()
        self.flow, self.calls = flow, calls

    def forward(self, *args: Any) -> Any:
        return self.flow(*self.calls, *args)


def _branch(true: Call, false: Call, flag: Any, operands: Sequence[Any]) -> Any:
    return (true if flag else false)(*operands)


def _while(condition: Call, body: Call, carried: Sequence[Any], others: Sequence[Any]) -> Any:
    carried = tuple(carried)
    while condition(*carried, *others)[0]:
        carried = body(*carried, *others)
    return carried


def _map(body: Call, along: Sequence[Tensor], others: Sequence[Any]) -> Any:
    return _stacked([body(*x, *others) for x in zip(*along)])


def _scan(body: Call, carried: Sequence[Tensor], along: Sequence[Tensor], others: Sequence[Any] = ()) -> Any:
    carried, made = tuple(carried), []
    for x in zip(*along):
        out = body(*carried, *x, *others)
        carried = out[: len(carried)]
        made.append(out[len(carried) :])
    return (*carried, *_stacked(made))


def _stacked(steps: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(made) for made in zip(*steps))


_FLOWS: dict[str, Call] = {"cond": _branch, "while_loop": _while, "map_impl": _map, "scan": _scan}


def _module(gm: GraphModule, n: Node) -> Any:
    return getattr(gm, str(n.target), None) if n.op == "get_attr" else None


def _tupled(gm: GraphModule) -> GraphModule:
    """A graph that returns a tuple, whatever it returned."""
    (output,) = gm.graph.find_nodes(op="output")
    (given,) = output.args
    output.args = (tuple(given) if isinstance(given, (tuple, list)) else (given,),)
    gm.recompile()
    return gm
