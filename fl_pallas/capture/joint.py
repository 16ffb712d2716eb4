"""Forward and backward of a graph as two ATen graphs, by AOTAutograd; what one keeps for the other is decided here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta

from ..schedule.program import Program
from .aten import OpenAttention
from .translate import translate

aten = torch.ops.aten
Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

# Row statistics are nodes of their own, which a backward pass can be handed.
_OPENED = get_decompositions((aten._softmax, aten._log_softmax, aten._safe_softmax, aten.logsumexp))


def differentiable(
    gm: GraphModule,
    inputs: Sequence[Any],
    kept: Callable[[Program], frozenset[str]],
    forward: Compiler,
    backward: Compiler,
) -> Callable[..., Any]:
    """`gm` as a function that PyTorch's autograd can differentiate once.

    Args:
      gm: a graph of torch functions.
      inputs: the tensors and numbers it is called with; their data is not read.
      kept: which values of the forward Program a backward pass reads from memory; others it computes again.
      forward, backward: make a callable of an ATen graph of either pass (its tensors have their fakes in
        `meta["val"]`) and its fake inputs.
    """

    def parted(joint: GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[GraphModule, GraphModule]:
        saved = _saved(joint, num_fwd_outputs, kept)
        return _extract_fwd_bwd_modules(joint, saved, [], num_fwd_outputs=num_fwd_outputs)

    compiler = aot_autograd(
        fw_compiler=_boxed(forward),
        bw_compiler=_boxed(backward),
        inference_compiler=_boxed(forward),
        partition_fn=parted,
        decompositions=_OPENED,
    )
    return compiler(_opened(gm), inputs)


def _boxed(compiler: Compiler) -> Any:
    """A compiler as AOTAutograd wants it: its function takes one list, and empties it, so that inputs can be freed."""

    def compiled(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        run = compiler(gm, inputs)

        def boxed(args: list[Any]) -> Any:
            given = tuple(args)
            args.clear()
            return run(*given)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    return compiled


def _opened(gm: GraphModule) -> GraphModule:
    """`gm` as one call, in which PyTorch's attention functions are opened up and source lines kept."""

    def run(*args: Any) -> Any:
        with preserve_node_meta(), OpenAttention():
            return torch.fx.Interpreter(gm).run(*args)

    graph = torch.fx.Graph()
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = [graph.placeholder(n.name) for n in placeholders]
    result = graph.call_function(run, tuple(inputs))
    outputs = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    graph.output(tuple(graph.call_function(_item, (result, k)) for k in range(len(outputs))))  # type: ignore[arg-type]
    return GraphModule(gm, graph)


def _item(values: Sequence[Any], k: int) -> Any:
    return values[k]


def _saved(joint: GraphModule, outputs: int, kept: Callable[[Program], frozenset[str]]) -> list[Node]:
    """The forward values that the backward pass reads, in the order of the graph."""
    nodes = list(joint.graph.nodes)
    results = nodes[-1].args[0]
    later = {n for n in nodes if n.op == "placeholder" and "tangents" in n.name}
    for n in nodes:
        if later.intersection(n.all_input_nodes):
            later.add(n)
    program = translate(joint)
    names = tuple(n.name for n in results[:outputs] if isinstance(n, Node) and n.name in program.by_name)
    keep = kept(replace(program, outputs=names))
    saved: set[Node] = set()
    stack = [n for n in (*results[outputs:], *later) if isinstance(n, Node)]
    seen: set[Node] = set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n not in later and (n.op == "placeholder" or n.name in keep):
            saved.add(n)
        else:
            stack += n.all_input_nodes
    return [n for n in nodes if n in saved]
