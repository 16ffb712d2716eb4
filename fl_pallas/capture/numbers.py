"""Python floats that TorchDynamo passes as tensors, because they change from call to call: an annealed temperature, the
constant of a layer.

Before: `item = t.item(); x = item * 1000; y = scores * x; z = roll(y, int(item))`, t a tensor of one number.
After: `y = scores * number_0; z = roll(y, 3)`: a tensor where that computes the same, and one graph for all; the
number itself elsewhere, and a graph for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from .aten import OpenAttention

# What takes a number: as a tensor of this type; None if as it is.
Users = dict[Node, torch.dtype | None]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a graph.

    Attributes:
      gm: the graph that computes them inside.
      inside: the nodes that do.
      users: for those that others read, who these are.
      of: the graph's inputs → the values of `users`, in order.
    """

    gm: GraphModule
    inside: frozenset[Node]
    users: dict[Node, Users]
    of: Callable[..., tuple[Any, ...]]

    def known(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Those of `values` that a graph has to be made for."""
        return tuple(repr(v) for v, users in zip(values, self.users.values(), strict=True) if None in users.values())

    def tensors(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The inputs that a graph `without` numbers takes behind the others."""
        pairs = zip(values, self.users.values(), strict=True)
        return [torch.tensor(v, dtype=dtype) for v, users in pairs for dtype in _types(users)]

    def without(self, values: Sequence[Any]) -> GraphModule:
        """The graph that takes tensors, with `values` in it where it cannot."""
        graph, given = Graph(), dict(zip(self.users, values, strict=True))
        copies = {n: graph.node_copy(n) for n in self.gm.graph.find_nodes(op="placeholder")}
        pairs = [(number, dtype) for number, users in self.users.items() for dtype in _types(users)]
        inputs = {pair: graph.placeholder(f"number_{k}") for k, pair in enumerate(pairs)}

        def argument(user: Node, a: Node) -> Any:
            if a not in self.inside:
                return copies[a]
            dtype = self.users[a][user]
            return given[a] if dtype is None else inputs[a, dtype]

        for n in self.gm.graph.nodes:
            if n not in copies and n not in self.inside:
                copies[n] = graph.node_copy(n, partial(argument, n))
        return GraphModule(self.gm, graph)


def has_numbers(gm: GraphModule) -> bool:
    """Whether a graph that TorchDynamo captured is given numbers as tensors."""
    return any(map(_is_given, gm.graph.nodes))


def numbers_of(gm: GraphModule, args: Sequence[Any]) -> Numbers:
    """The numbers of a graph that TorchDynamo captured; none of one whose sizes depend on data.

    Args:
      args: what it is called with.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    finder = _Finder(gm, args, mode)
    fakes = (mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)
    try:
        with torch.no_grad(), OpenAttention(), mode:
            finder.run(*fakes)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return Numbers(gm, frozenset(), {}, lambda *_: ())
    computing, copies = Graph(), dict[Node, Node]()
    for n in gm.graph.nodes:
        if n.op == "placeholder" or n in finder.inside:
            copies[n] = computing.node_copy(n, copies.__getitem__)
    computing.output(tuple(copies[n] for n in finder.users))
    computing.eliminate_dead_code()
    return Numbers(gm, frozenset(finder.inside), finder.users, GraphModule(gm, computing).forward)


def _is_given(n: Node) -> bool:
    return n.op == "call_method" and n.target == "item" and n.all_input_nodes[0].op == "placeholder"


def _types(users: Users) -> list[torch.dtype]:
    return [*dict.fromkeys(dtype for dtype in users.values() if dtype is not None)]


class _Finder(Interpreter):
    """Runs a graph on fake tensors and true numbers."""

    def __init__(self, gm: GraphModule, args: Sequence[Any], mode: FakeTensorMode):
        super().__init__(gm)
        self.mode = mode
        given = dict(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True))
        self.values = {n: given[n.all_input_nodes[0]].item() for n in gm.graph.nodes if _is_given(n)}
        self.inside: set[Node] = set()
        self.users: dict[Node, Users] = {}

    def run_node(self, n: Node) -> Any:
        if n in self.values:
            self.inside.add(n)
            return self.values[n]
        out = super().run_node(n)
        numbers = [i for i in n.all_input_nodes if i in self.inside]
        if numbers and len(numbers) == len(n.all_input_nodes) and isinstance(out, (bool, int, float)):
            self.inside.add(n)
            return out
        for number in numbers:
            self.users.setdefault(number, {})[n] = self._tensor_type(n, number, out)
        return out

    def _tensor_type(self, n: Node, number: Node, out: Any) -> torch.dtype | None:
        """The type of a tensor that `n` computes with as it does with `number`; None if there is none."""
        value = self.env[number]
        if not isinstance(value, float):
            return None
        leaves = tree_leaves((out, [self.env[i] for i in n.all_input_nodes]))
        wide = any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in leaves)
        # As PyTorch computes with a number: kernels have no 64 bits on a GPU.
        for dtype in (torch.float64,) if wide else (torch.get_default_dtype(), torch.float64):
            try:
                # Not a constant: whoever asks for its value is refused it.
                self.env[number] = self.mode.from_tensor(torch.tensor(value, dtype=dtype, device="meta").to("cpu"))
                if _kind(super().run_node(n)) == _kind(out):
                    return dtype
            except Exception:  # whatever an operation raises that takes no tensor
                continue
            finally:
                self.env[number] = value
        return None


def _kind(out: Any) -> list[Any]:
    """Of what is computed, all that a later operation may ask but its numbers."""
    leaves = tree_leaves(out)
    return [(t.dtype, t.shape, t.device, t.stride()) if isinstance(t, torch.Tensor) else t for t in leaves]
