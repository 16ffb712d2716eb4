"""Writes to inputs (keys put into a cache, statistics kept in a buffer): PyTorch's, between parts that write nothing.
So is control flow that data decides.

Before: `k = rope(x @ w); cache[:, p] = k; y = attend(q, cache)`. After: a graph of what leads to k, one of the write,
and one of y, each of which takes what the others give. So a decoder's layers fuse, and caches are written in place.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .aten import fakes_of
from .control import is_control


@dataclass(frozen=True)
class Part:
    """Some operations of a graph.

    Attributes:
      gm: takes values of the names `takes`, and returns a tuple of those of the names `gives`.
      writes: whether it writes to what it takes, or is control flow; it does nothing else then.
      done: names of values that no later part takes.
    """

    gm: GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    writes: bool
    done: frozenset[str]


def parts_between_writes(gm: GraphModule, args: Sequence[Any]) -> list[Part] | None:
    """The parts of a graph, in an order in which they can run; None if it writes to no input and has no control flow,
    or cannot be parted.

    Args:
      gm: of torch functions, as TorchDynamo captures it.
      args: what it is called with.
    """
    watch = _watched(gm, args)
    if watch is None:
        return None
    stage, writers = _stages(gm, watch)
    if not writers:
        return None
    _put_off(stage, writers, watch)
    groups = [
        [n for n in stage if stage[n] == k and (n in writers) == writes]
        for k in range(max(stage.values()) + 1)
        for writes in (False, True)
    ]
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    # Views of what is written, and numbers, are made where they are asked for.
    groups = [group for group in groups if group]
    if any(n in watch.free for n in output.all_input_nodes):
        groups.append([])
    return _parts(gm, groups, watch, writers, output)


def run_parts(parts: Sequence[Part], calls: Sequence[Callable[..., Any]], gm: GraphModule) -> Callable[..., Any]:
    """The graph `gm` by functions of its parts, `calls`."""
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    (output,) = (n for n in gm.graph.nodes if n.op == "output")

    def run(*args: Any) -> Any:
        known = dict(zip(names, args, strict=True))
        for part, call in zip(parts, calls, strict=True):
            given = call(*map(known.__getitem__, part.takes))
            known.update(zip(part.gives, given, strict=True))
            for name in part.done:
                known.pop(name, None)
        return map_arg(output.args[0], lambda n: known[n.name])

    return run


class _Watch(Interpreter):
    """Runs a graph on fake tensors, and sees whose memory its operations take, give and write to.

    Attributes:
      given: memory of inputs and constants.
      touched, written: memory, by operation.
      sizes: elements of what is a tensor.
      views: operations that give numbers, or views.
      drawn: operations with random numbers.
      free: operations that may be repeated, and are: numbers, views of inputs and of what some operation writes to,
        and what is larger than all that it is made of (a mask of positions, a bias of distances: kernels make it as
        they go).
    """

    def __init__(self, gm: GraphModule):
        # (What is freed might lend its address to other memory.)
        super().__init__(gm, garbage_collect_values=False)
        self.given: set[int] = set()
        self.touched: dict[Node, set[int]] = {}
        self.written: dict[Node, set[int]] = {}
        self.sizes: dict[Node, int] = {}
        self.views: set[Node] = set()
        self.drawn: set[Node] = set()
        self.free: set[Node] = set()
        self.writing = _Writing()

    def run_node(self, n: Node) -> Any:
        self.writing.found, self.writing.drawn = set(), False
        # (What PyTorch allows in control flow writes nothing.)
        with contextlib.nullcontext() if is_control(n) else self.writing:
            out = super().run_node(n)
        taken, made = _memory(self.env[a] for a in n.all_input_nodes), _memory([out])
        self.touched[n], self.written[n] = taken | made, self.writing.found
        leaves = [t for t in tree_leaves(out) if t is not None]
        if isinstance(out, torch.Tensor):
            self.sizes[n] = out.numel()
        if self.writing.drawn:
            self.drawn.add(n)
        if _is_given(n):
            self.given |= made
        elif n.op != "output" and made <= taken and not self.writing.found and (leaves or not taken):
            self.views.add(n)
        return out

    def find_free(self) -> None:
        dirty = set[int]().union(*self.written.values())
        made_of: dict[Node, frozenset[Node]] = {}
        for n in self.touched:
            sources = frozenset().union(*(made_of[a] for a in n.all_input_nodes))
            if n in self.views:
                free = n not in self.sizes or bool(self.touched[n] & dirty) or all(map(_is_given, sources))
            else:
                larger = self.sizes.get(n, 0) > sum(self.sizes.get(a, 0) for a in sources)
                free = larger and n not in self.drawn and not self.touched[n] & dirty and not _is_given(n)
            if free:
                self.free.add(n)
            # (A shape is none of what it is asked of.)
            made_of[n] = frozenset((n,)) if not free else sources if n in self.sizes else frozenset()


class _Writing(TorchDispatchMode):
    """Sees which memory is written to, and whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {a.name: v for a, v in zip(func._schema.arguments, args)} | (kwargs or {})
        written = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        self.found |= _memory(named.get(name) for name in written)
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _is_given(n: Node) -> bool:
    return n.op in ("placeholder", "get_attr")


def _memory(values: Iterable[Any]) -> set[int]:
    leaves = (t for v in values for t in tree_leaves(v))
    return {t.untyped_storage()._cdata for t in leaves if isinstance(t, torch.Tensor)}


def _watched(gm: GraphModule, args: Sequence[Any]) -> _Watch | None:
    mode, fakes = fakes_of(args)
    watch = _Watch(gm)
    try:
        with torch.no_grad(), mode:
            watch.run(*fakes)
    except Exception:  # whatever an operation raises without data: it is PyTorch's graph then, whole
        return None
    watch.find_free()
    return watch


def _stages(gm: GraphModule, watch: _Watch) -> tuple[dict[Node, int], set[Node]]:
    """How many rounds of writes come before each operation, but for free ones; and which write, or are control flow.

    What has memory that is written later to comes before that, and what has it after that comes after.
    """
    stage: dict[Node, int] = {}
    writers: set[Node] = set()
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    after: dict[int, int] = {}
    for n in gm.graph.nodes:
        if _is_given(n) or n.op == "output" or n in watch.free:
            continue
        made_by = _needed([n], watch.free) - {n}
        own = max((stage[a] + (a in writers) for a in made_by if a in stage), default=0)
        touched = watch.touched[n]
        own = max([own, *(after[m] for m in touched if m in after)])
        written = watch.written[n]
        if (whole := _taken_apart(n, watch)) is not None:
            stage[n] = stage[whole]
            if whole in writers:
                writers.add(n)
            continue
        if is_control(n):
            writers.add(n)
        if any(m in watch.given or first.get(m, own) < own for m in written):
            own = max([own, *(last[m] for m in written if m in last)])
            writers.add(n)
            after |= dict.fromkeys(written, own + 1)
        for m in touched:
            first.setdefault(m, own)
            last[m] = max(last.get(m, 0), own)
        stage[n] = own
    return stage, writers


def _put_off(stage: dict[Node, int], writers: set[Node], watch: _Watch) -> None:
    """Have operations wait for what reads them, where nothing is written meanwhile that they have to do with: attention
    to what is written, scores, that are not made of that, are in one part with it."""
    readers: dict[Node, list[int]] = {}
    written: dict[int, list[int]] = {}
    for n, own in stage.items():
        for m in watch.written[n]:
            written.setdefault(m, []).append(own)
    for n in reversed([*stage]):
        if (whole := _taken_apart(n, watch)) is not None:
            readers.setdefault(whole, []).extend(readers.get(n, ()))
            continue
        before = all(k < stage[n] for m in watch.touched[n] for k in written.get(m, ()))
        if before and n not in watch.drawn and n not in writers and n in readers:
            stage[n] = max(stage[n], min(readers[n]))
        for a in _needed([n], watch.free) - {n}:
            readers.setdefault(a, []).append(stage[n])
    for n in stage:
        if (whole := _taken_apart(n, watch)) is not None:
            stage[n] = stage[whole]


def _taken_apart(n: Node, watch: _Watch) -> Node | None:
    """What gives the tuple that an operation takes an element of: the two are in one part."""
    whole = n.args[0] if n.target is operator.getitem else None
    return whole if isinstance(whole, Node) and whole not in watch.sizes and whole not in watch.free else None


def _needed(nodes: Iterable[Node], free: set[Node]) -> set[Node]:
    """Some operations, and what they take: directly, or by free ones."""
    found: set[Node] = set()
    stack = [*nodes]
    own = {*stack}
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            if n in own or n in free:
                stack += n.all_input_nodes
    return found


def _parts(
    gm: GraphModule, groups: list[list[Node]], watch: _Watch, writers: set[Node], output: Node
) -> list[Part] | None:
    asked = [_needed(group, watch.free) - {*group} for group in groups]
    asked[-1] |= _needed(output.all_input_nodes, watch.free) if not groups[-1] else set()
    # Contexts (of autocast, say) are around each part.
    around = {n for n in watch.free if not n.all_input_nodes and n.is_impure()}
    around |= {n for n in watch.free if n.all_input_nodes and around.issuperset(n.all_input_nodes) and n.is_impure()}
    parts: list[Part] = []
    for k, group in enumerate(groups):
        free = around | asked[k] & watch.free
        own = {*group} | free
        given = [n for n in gm.graph.nodes if n in asked[k] - free and n.op != "get_attr"]
        later = {*output.all_input_nodes}.union(*asked[k + 1 :])
        gives = [n for n in gm.graph.nodes if n in own and n in later and (n not in free or not group)]
        if any(n not in watch.sizes and n not in free for n in gives):
            return None
        done = frozenset(n.name for n in {*given, *gives} - later)
        graph = Graph()
        copies: dict[Node, Node] = {}
        for n in given:
            copies[n] = graph.placeholder(n.name)
        for n in gm.graph.nodes:
            if n in own or n.op == "get_attr" and n in asked[k]:
                copies[n] = graph.node_copy(n, copies.__getitem__)
        graph.output(tuple(copies[n] for n in gives))
        names = tuple(n.name for n in given), tuple(n.name for n in gives)
        parts.append(Part(GraphModule(gm, graph), *names, any(n in writers for n in group), done))
    return parts
