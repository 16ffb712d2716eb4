"""Regions that are alike and do not wait for each other (heads in a Python loop, chunks of queries): one, of a batch.

Before: `cat([softmax(q0 @ k0.T) @ v0, softmax(q1 @ k1.T) @ v1, ...])`, where each q is a product with a matrix of its
own. After: `o = softmax(q @ k.mT) @ v` of stacked q, k and v, and `cat([o[0], o[1], ...])`; where matrices are smaller
than what is made of them, they are stacked, and q is `x @ w`. So as many kernels run as for one, on a whole GPU.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops

from ..errors import Unsupported
from ..schedule.passes.region import Region
from .aten import retraced, traced
from .order import sort, with_reshapes

aten = torch.ops.aten

# Fewer are left as they are: what two give is mostly put together by a kernel (differential attention).
FEWEST = 3
# A region of more rows fills a GPU by itself: as many as 256 tiles of 128 have.
ROWS = 2**15

# What is stacked may be so many times as large as what is made of it: one query asks for keys once, and the copy of
# several memories would take longer than to read them.
COPIED = 64
# What attends, and has no scores to show.
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
# What is in the names of functions that decide what autograd sees.
_OFF = ("grad_enabled", "inference_mode", "requires_grad", "_data_attr", "set_data", "saved_tensors", "detach_")

_VIEWS = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default, aten.t.default}
    | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.clone.default}
)

_IN_PLACE = frozenset(f"i{name}" for name in "add sub mul truediv floordiv mod pow matmul and or xor".split())

# A node of each part, in their order.
Pack = tuple[Node, ...]


class _Differ(Exception):
    """Parts are not alike."""


@dataclass(frozen=True)
class _Part:
    """What computes a region.

    Attributes:
      nodes: all that lies between its members, views too; in the order of the graph.
      results: the region's.
    """

    nodes: tuple[Node, ...]
    results: tuple[Node, ...]


def repeats(gm: GraphModule) -> bool:
    """Whether a graph of torch functions may have regions that are alike, by a glance at it: it does the same for what
    is of one shape, where none waits for another, and makes more of it than that (or attends)."""
    above: dict[Node, int] = {}
    seeds: dict[Any, int] = defaultdict(int)
    found = Counter[Any]()
    for place, n in enumerate(gm.graph.nodes):
        above[n] = functools.reduce(operator.or_, (above[a] for a in n.all_input_nodes), 0)
        val, *read = (m.meta.get("example_value") for m in (n, *n.all_input_nodes))
        if isinstance(val, torch.Tensor) and (n.target in _ATTENTION or _is_blow_up(n, val, read)):
            key = str(n.target), str(val.shape)
            waits = (above[n] & seeds[key]).bit_count()
            found[key, waits] += 1
            if found[key, waits] == FEWEST:
                return True
            above[n] |= 1 << place
            seeds[key] |= 1 << place
    return False


def _is_blow_up(n: Node, val: torch.Tensor, read: Sequence[Any]) -> bool:
    """Whether a value is larger than what it is made of; where that is of as many dimensions, and no tokens and a
    weight, than one of the two (a few queries by all keys)."""
    given = [v for v in read if isinstance(v, torch.Tensor)]
    if n.target is F.linear or not val.is_floating_point() or len(given) < 2:
        return False
    most = min if len({v.dim() for v in given}) == 1 else max
    return _size(val) > most(map(_size, given))


def _size(t: torch.Tensor) -> int:
    """Elements of a tensor, whose sizes may vary: of this call's; one of a size that data decides."""
    return math.prod(n if isinstance(n, int) else n.node.hint or 1 for n in t.shape)


def keeps_gradients(gm: GraphModule) -> bool:
    """Whether what autograd sees of a graph of torch functions is what it sees of the operations they consist of: it
    turns no gradients off, nor are there functions with a gradient, or a graph, of their own, nor is something written
    to where a tensor may be seen that was detached from it."""
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    if any(n.target in (torch.detach, "detach") for n in calls) and any(map(_writes, calls)):
        return False
    return not any(
        isinstance(n.target, torch._ops.HigherOrderOperator)
        or any(word in str(n.target) for word in _OFF)
        or (getattr(n.target, "__module__", None) or "").startswith("torch._functorch")
        for n in calls
    )


def _writes(n: Node) -> bool:
    """Whether a torch function may write to what it is given, by its name."""
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") or name == "setitem" or name in _IN_PLACE
    return in_place or "out" in n.kwargs or n.kwargs.get("inplace") is True


def without_repeats(gm: GraphModule) -> GraphModule:
    """The same functional ATen graph with everything computed once, and with copies as operations that have a gradient
    and can be of a batch (PyTorch's own have none, or cannot)."""
    for n in [n for n in gm.graph.nodes if n.target in (aten.copy.default, aten.fill.Tensor)]:
        to, source = (a.meta["val"] for a in n.args[:2])
        made: Any = n.args[1]
        with gm.graph.inserting_before(n), source.fake_mode:
            if to.dtype != source.dtype:
                made = gm.graph.call_function(aten._to_copy.default, (made,), {"dtype": to.dtype})
                made.meta.update({**n.meta, "val": source.to(to.dtype)})
            made = gm.graph.call_function(aten.expand.default, (made, [*to.shape]))
            made.meta.update(n.meta)
        n.replace_all_uses_with(made)
    numbers: dict[Any, Node] = {}
    for n in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, str(n.target), None)
        if isinstance(value, torch.Tensor) and not value.dim() and not isinstance(value, FakeTensor):
            n.replace_all_uses_with(numbers.setdefault((value.dtype, value.device, repr(value.item())), n))
    for n in gm.graph.find_nodes(op="call_function", target=aten.select_scatter.default):
        # (Of a batch PyTorch makes a scatter of this one, by positions.)
        to, source, dim, at = n.args
        with gm.graph.inserting_before(n), source.meta["val"].fake_mode:
            row = gm.graph.call_function(aten.unsqueeze.default, (source, dim))
            row.meta.update({**n.meta, "val": source.meta["val"].unsqueeze(dim)})
        at %= n.meta["val"].shape[dim]
        n.target, n.args = aten.slice_scatter.default, (to, row, dim, at, at + 1)
    gm.graph.eliminate_dead_code()
    ops = (n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    drawn = {op.overloadpacket for op in ops if torch.Tag.nondeterministic_seeded in op.tags}
    found = CSEPass(get_CSE_banned_ops() | drawn)(gm)
    return gm if found is None else found.graph_module


def in_batches(gm: GraphModule, regions: Sequence[Region]) -> bool:
    """Compute regions of `gm` that are alike as one, of a batch; whether there are any.

    Args:
      gm: a functional ATen graph, with every result in `meta["val"]`; not those of what is new.
      regions: what kernels compute of it, by the names of its nodes.
    """
    found = False
    for parts in _families(gm, regions):
        try:
            found |= _put_together(gm, *_in_lockstep(gm, parts))
        except (_Differ, Unsupported):
            continue
    for n in reversed(gm.graph.find_nodes(op="call_function", target=aten.select.int)):
        source, returned = n.args[0], any(user.op == "output" for user in n.users)
        if source.target is aten.stack.default and len(source.args) == 1 and n.args[1] == 0 and not returned:
            n.replace_all_uses_with(source.args[0][n.args[2]])
    gm.graph.eliminate_dead_code()
    # (What draws numbers counts as having an effect.)
    for n in gm.graph.find_nodes(op="call_function", target=aten.randint.low):
        if not n.users:
            gm.graph.erase_node(n)
    gm.recompile()
    return found


def _families(gm: GraphModule, regions: Sequence[Region]) -> Iterator[list[_Part]]:
    """Parts of the graph that may be alike, and do not wait for each other."""
    nodes = {n.name: n for n in gm.graph.nodes}
    # Regions that a node waits for, or that wait for it, as the bits of a number; its own too.
    above, below = (dict.fromkeys(gm.graph.nodes, 0) for _ in range(2))
    # (A mask of positions, that each computes for itself, is nobody's own.)
    owners = Counter(name for region in regions for name in region.members)
    for k, region in enumerate(regions):
        for bits, names in ((above, region.members), (below, region.outputs)):
            for name in (name for name in nodes.keys() & {*names} if owners[name] == 1):
                bits[nodes[name]] |= 1 << k
    for n in gm.graph.nodes:
        for a in n.all_input_nodes:
            above[n] |= above[a]
    for n in reversed(gm.graph.nodes):
        for user in n.users:
            below[n] |= below[user]
    families: dict[Any, dict[int, _Part]] = defaultdict(dict)
    waits: dict[int, int] = {}
    for k, region in enumerate(regions):
        own = tuple(n for n, bits in above.items() if (bits & below[n]) >> k & 1)
        part = _Part(own, tuple(n for n in own if n.name in region.outputs))
        if part.results and max(_rows(n) for n in part.results) <= ROWS:
            for n in own:
                waits[k] = waits.get(k, 0) | above[n] & ~(1 << k)
            families[waits[k].bit_count(), tuple((n.target, _kinds(n)) for n in own)][k] = part
    for parts in families.values():
        if len(parts) >= FEWEST and not any(waits[k] >> other & 1 for k in parts for other in parts):
            yield [*parts.values()]


def _kinds(n: Node) -> tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]:
    """What a tensor is like, or several."""
    val = n.meta.get("val")
    tensors = val if isinstance(val, (tuple, list)) else (val,)
    return tuple((tuple(t.shape), t.dtype, t.device) for t in tensors if isinstance(t, torch.Tensor))


def _rows(n: Node) -> int:
    return max((math.prod(shape[:-1]) for shape, *_ in _kinds(n)), default=0)


def _nbytes(n: Node) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in _kinds(n))


def _in_lockstep(gm: GraphModule, parts: Sequence[_Part]) -> tuple[list[Pack], list[Pack]]:
    """The nodes of parts that do the same, in the order of the first part, and what these read, each its own: those of
    the regions, and above them what is alike as well and made of less.

    Raises: _Differ if the regions are not alike.
    """
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    own = [{*part.nodes} for part in parts]
    inside: list[Pack] = []
    given: list[Pack] = []
    asked: dict[Node, Pack] = {}
    shared = set[Node]()
    # Last first, so that all that reads a node has been seen before it.
    queue: list[tuple[int, Pack]] = []

    def ask(pack: Pack) -> None:
        if (known := asked.get(pack[0])) is None:
            asked[pack[0]] = pack
            heapq.heappush(queue, (-place[pack[0]], pack))
        elif known != pack:
            raise _Differ

    results = {k for part in parts for k, n in enumerate(part.nodes) if n in part.results}
    for k in sorted(results):
        ask(tuple(part.nodes[k] for part in parts))
    computed: set[Node] = set()
    while queue:
        _, pack = heapq.heappop(queue)
        members = [n in mine for n, mine in zip(pack, own, strict=True)]
        read = _read_alike(pack) if computed.isdisjoint(pack) else None
        if any(members) and (read is None or not all(members)):
            raise _Differ
        if read is not None and (any(members) or _grows(pack, read) and all({*n.users} <= computed for n in pack)):
            inside.append(pack)
            computed.update(pack)
            for p in read:
                if len({*p}) > 1:
                    ask(p)
                else:
                    shared.add(p[0])
        else:
            given.append(pack)
    # What is given must wait for nothing that is computed.
    late = {*computed}
    for n in gm.graph.nodes:
        if not late.isdisjoint(n.all_input_nodes):
            late.add(n)
    if not shared.isdisjoint(asked) or not late.isdisjoint(shared.union(*given)):
        raise _Differ
    return [*reversed(inside), *_views_behind(inside, parts)], given


def _views_behind(inside: Sequence[Pack], parts: Sequence[_Part]) -> Iterator[Pack]:
    """Views through which alone what is outside sees results."""
    for pack in [p for p in inside if p[0] in parts[0].results]:
        while all(len(n.users) == 1 for n in pack):
            pack = tuple(user for n in pack for user in n.users)
            if pack[0].target not in _VIEWS or (read := _read_alike(pack)) is None or len(read) > 1:
                break
            yield pack


def _read_alike(pack: Pack) -> list[Pack] | None:
    """What nodes read, if they do the same with it and it is all different, or the same; None if not."""
    first = pack[0]
    if first.op != "call_function" or not _kinds(first) or len({*pack}) < len(pack):
        return None
    if any((n.target, _kinds(n), _said(n)) != (first.target, _kinds(first), _said(first)) for n in pack):
        return None
    read = [*zip(*(n.all_input_nodes for n in pack), strict=True)]
    alike = (len({*p}) in (1, len(p)) and len({_kinds(n) for n in p}) == 1 for p in read)
    return read if all(alike) else None


def _said(n: Node) -> str:
    """The arguments of a node, with the places of those that are nodes."""
    places = {a: k for k, a in enumerate(n.all_input_nodes)}
    return repr(map_arg((n.args, n.kwargs), lambda a: f"%{places[a]}"))


def _grows(pack: Pack, read: Sequence[Pack]) -> bool:
    """Whether what nodes read, each its own, is no larger than what they make of it."""
    own = sum(_nbytes(p[0]) for p in read if len({*p}) > 1)
    return 0 < own <= _nbytes(pack[0])


def _put_together(gm: GraphModule, inside: Sequence[Pack], given: Sequence[Pack]) -> bool:
    """Compute nodes as a batch of those of the first part; whether PyTorch can."""
    members = {n for pack in inside for n in pack}
    results = [pack for pack in inside if any({*n.users} - members for n in pack)]
    copied, made = sum(_nbytes(p[0]) for p in given if not _are_pieces(p)), sum(_nbytes(p[0]) for p in results)
    if copied > COPIED * made:
        return False
    own = {pack[0]: pack for pack in given}
    read = [*dict.fromkeys(a for pack in inside for a in pack[0].all_input_nodes if a not in members)]
    vals = [v for n in read if isinstance(v := n.meta.get("val"), FakeTensor)]
    if len(vals) < len(read) or not all(isinstance(n.meta["val"], FakeTensor) for n, *_ in results):
        return False
    # Views of what is stacked may not be views.
    part = GraphModule(gm, _graph([pack[0] for pack in inside], read, [pack[0] for pack in results]))
    fakes = [v.new_empty((len(inside[0]), *v.shape)) if n in own else v for n, v in zip(read, vals, strict=True)]
    run = torch.vmap(functools.partial(retraced, part), tuple(0 if n in own else None for n in read))
    try:
        with _without_loops():
            batch = traced(run, fakes, vals[0].fake_mode)
    except Unsupported:
        return False
    last = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(last):
        stacked = [_stacked(gm.graph, own[n]) if n in own else n for n in read]
        for pack, whole in zip(results, _inlined(gm, batch, stacked), strict=True):
            _put_back(gm.graph, pack, whole)
    sort(gm.graph)
    return True


@contextlib.contextmanager
def _without_loops() -> Iterator[None]:
    """Operations that `torch.vmap` would do for each member of a batch by itself are errors."""
    functorch: Any = vars(torch._C)["_functorch"]
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def _are_pieces(pack: Pack) -> bool:
    """Whether nodes are parts of one tensor, which are read where they lie."""
    parts = (aten.select.int, aten.slice.Tensor, operator.getitem)
    return all(n.target in parts and n.args[0] is pack[0].args[0] for n in pack)


def _graph(nodes: Sequence[Node], read: Sequence[Node], results: Sequence[Node]) -> Graph:
    """The graph of some nodes, as a function of what they read."""
    graph = Graph()
    known = {n: graph.placeholder(n.name) for n in read}
    for n in nodes:
        known[n] = graph.node_copy(n, known.__getitem__)
    graph.output(tuple(known[n] for n in results))
    with_reshapes(graph)
    return graph


def _stacked(graph: Graph, pack: Pack) -> Node:
    """A batch of what nodes compute."""
    whole = pack[0].args[0] if pack[0].target == aten.select.int else None
    if isinstance(whole, Node) and all(n.args == (whole, 0, k) for k, n in enumerate(pack)):
        if _kinds(whole) and _kinds(whole)[0][0][0] == len(pack):
            return whole
    made = graph.call_function(aten.stack.default, ([*pack],))
    made.meta.update({k: v for k, v in pack[0].meta.items() if k == "stack_trace"})
    return made


def _put_back(graph: Graph, pack: Pack, whole: Node) -> None:
    """A batch in the place of the nodes that it consists of, and of what puts them side by side."""
    users = {user for n in pack for user in n.users}
    last = users.pop()
    if not users and last.target in (aten.cat.default, aten.stack.default) and last.args[0] == [*pack]:
        shape = last.meta["val"].shape
        rank = len(_kinds(pack[0])[0][0])
        dim: Any = last.args[1] if len(last.args) > 1 else 0
        at = dim % (rank + (last.target is aten.stack.default))
        order = [*range(1, rank + 1)]
        order.insert(at, 0)
        made = graph.call_function(aten.permute.default, (whole, order))
        made = graph.call_function(aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
        if last.target is aten.cat.default:
            made = graph.call_function(aten.reshape.default, (made, [*shape]))
        made.meta.update(last.meta)
        last.replace_all_uses_with(made)
        return
    for k, n in enumerate(pack):
        one = graph.call_function(aten.select.int, (whole, 0, k))
        one.meta.update(n.meta)
        n.replace_all_uses_with(one)


def _inlined(gm: GraphModule, batch: GraphModule, given: Sequence[Node]) -> list[Node]:
    """The results of another graph, that takes what is `given`."""
    known = dict(zip(batch.graph.find_nodes(op="placeholder"), given, strict=True))
    for n in batch.graph.nodes:
        if n.op == "get_attr":
            setattr(gm, name := f"{n.target}_of_{given[0].name}", getattr(batch, n.target))
            known[n] = gm.graph.get_attr(name)
        elif n.op == "call_function":
            known[n] = gm.graph.node_copy(n, known.__getitem__)
    (output,) = (n for n in batch.graph.nodes if n.op == "output")
    return [known[n] for n in output.args[0]]
