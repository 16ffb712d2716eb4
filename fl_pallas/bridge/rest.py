"""What no kernel computes (rotations, norms, gates around attention), by PyTorch's own compiler.

A graph with kernels in it falls into stages: what runs before the first kernels, between those and the next, and so
on. Inductor makes a function of each stage that has something to fuse; eager PyTorch runs what else there is.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from ..capture.order import sort
from ..errors import Unsupported
from .put import by_sums
from .splice import item

log = logging.getLogger(__name__)
aten = torch.ops.aten
Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# A function of fewer operations is no faster than they are.
LEAST = 2
# What runs as it does in eager PyTorch in any case.
_CALLS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.sort, aten.topk}
# What is several in one; eager PyTorch's kernels are slow where rows are short (64 features: 20 µs for 3).
_NORMS = {
    aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten._fused_rms_norm, aten._fused_rms_norm_backward,
}  # fmt: skip


class _Stage:
    """Operations as one function, which its first call makes: by then it is known how the tensors lie.

    Args:
      gm: the operations.
      name: of the function.
      shared: functions of other stages, by what they compute of what: those of a model's layers are alike.
    """

    def __init__(self, gm: GraphModule, name: str, shared: dict[Any, Function]):
        self.gm, self.shared = gm, shared
        self.made: Function | None = None
        self.__name__ = name  # FX names the callee by it

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.made is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return self.gm.forward(*tensors)  # Inductor times some of its kernels when they are first called
            self.made = self._compiled(tensors)
        return self.made([*tensors])

    def _compiled(self, tensors: Sequence[torch.Tensor]) -> Function:
        try:
            with compile_lock:
                key = (_written(self.gm.graph), *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))
                if key not in self.shared:
                    self.shared[key] = _by_inductor(self.gm, tensors)
                return self.shared[key]
        except Exception as error:  # Inductor may fail in any way; eager PyTorch then runs the operations
            log.info("%s is left to eager PyTorch: %s", self.__name__, error)
            return lambda given: self.gm.forward(*given)


def _written(graph: Graph) -> tuple[Any, ...]:
    """What the operations of a graph are, by whatever names."""
    place = {n: f"%{k}" for k, n in enumerate(graph.nodes)}
    targets = (None if n.op in ("placeholder", "output") else n.target for n in graph.nodes)
    given = (repr(map_arg((n.args, n.kwargs), place.__getitem__)) for n in graph.nodes)
    return tuple(zip(targets, given, strict=True))


def _by_inductor(gm: GraphModule, examples: Sequence[torch.Tensor]) -> Function:
    """A graph as Inductor compiles it, for tensors that lie as the examples."""
    from torch._inductor.decomposition import select_decomp_table

    # Inductor keeps what it made on disk where symbols would have a place, of which there are none here.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    plain = torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast()
    with plain[0], plain[1], plain[2], unset_fake_temporarily(), _as_eager(gm), tracing(TracingContext(mode)):
        with mode:
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in examples]
        simple = make_fx(gm, decomposition_table=by_sums(select_decomp_table()))(*fakes)
        (out,) = (n for n in simple.graph.nodes if n.op == "output")
        # Strides of results are PyTorch's.
        out.meta["user_visible_output_idxs"] = [*range(len(out.args[0]))]
        return _checked(simple, fakes)


def compile_rest(gm: GraphModule) -> GraphModule:
    """`gm` with what is no call of a kernel in functions that Inductor makes, one for each stage.

    Args:
      gm: of ATen operations of fixed sizes, and of calls of kernels.
    """
    graph = gm.graph
    stages = [nodes for nodes in _stages(graph) if sum(map(_work, nodes)) >= LEAST]
    shared: dict[Any, Function] = {}
    for k, nodes in enumerate(stages):
        _replace(gm, nodes, f"rest_{k}", shared)
    sort(graph)
    graph.eliminate_dead_code()
    gm.recompile()
    return gm


class Whole:
    """A graph with no kernels in it, its gradients too, as Inductor compiles it when it is first called.

    Args:
      gm: of torch functions, of fixed sizes.
    """

    def __init__(self, gm: GraphModule):
        self.gm = gm
        self.made: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.made is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return self.gm(*args)
            try:
                with compile_lock:
                    self.made = _whole_by_inductor(self.gm, args)
            except Exception as error:  # as above
                log.info("a graph is left to eager PyTorch: %s", error)
                self.made = self.gm
        return self.made(*args)


def _whole_by_inductor(gm: GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    # What fails does so here, and not in a backward pass.
    with _as_eager(gm), config.patch(force_non_lazy_backward_lowering=True):
        plain, table = GraphModule(gm, _copy(gm.graph)), by_sums(select_decomp_table())
        return compile_fx(plain, [*args], inner_compile=_checked, decompositions=table)  # type: ignore[return-value]


def _checked(gm: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
    """Inductor's function of a graph of ATen operations.

    Raises: Unsupported for what asks a CPU whether floats of 16 bits are equal: Inductor's C++ (2.11) compares them
      before they are rounded, and what is largest would not be found again.
    """
    from torch._inductor.compile_fx import compile_fx_inner  # takes a second

    on_cpu = any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in examples)
    if on_cpu and any(map(_compares_rounded, gm.graph.nodes)):
        raise Unsupported("aten.eq.Tensor", "Inductor would compare numbers before they are rounded")
    return compile_fx_inner(gm, examples, **options)


def _compares_rounded(n: Node) -> bool:
    """Whether a node asks if two tensors of 16-bit floats are equal."""
    found = [a.meta["val"].dtype for a in n.all_input_nodes] if n.target in (aten.eq.Tensor, aten.ne.Tensor) else []
    return any(t.is_floating_point and t.itemsize == 2 for t in found)


@contextlib.contextmanager
def _as_eager(gm: GraphModule) -> Iterator[None]:
    """Inductor with eager PyTorch's random numbers and rounding: both passes have to find the same numbers, where the
    gradient of a maximum goes to what equals it; without its advice about TF32, which is the user's to set; and without
    its patterns where they would take one thing for another.
    """
    from torch._inductor import config

    patterns = config.pattern_matcher and not _is_mistaken(gm)
    told = config.patch(emulate_precision_casts=True, fallback_random=True, pattern_matcher=patterns)
    with told, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        yield


def _is_mistaken(gm: GraphModule) -> bool:
    """Whether a graph takes maxima along another dimension than the last, as a softmax over heads does: between two
    products of matrices Inductor (to 2.13) takes that for attention, and calls SDPA, whose softmax is over keys."""
    for n in (n for n in gm.graph.nodes if "max" in str(n.target)):
        of = n.args[0].meta if n.args and isinstance(n.args[0], Node) else {}
        val = of.get("val", of.get("example_value"))
        last = (-1, val.dim() - 1) if isinstance(val, torch.Tensor) else (-1,)
        dim = n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else None)
        if any(isinstance(d, int) and d not in last for d in (dim if isinstance(dim, (list, tuple)) else (dim,))):
            return True
    return False


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _stages(graph: Graph) -> list[list[Node]]:
    """The operations that Inductor may see; of one stage are those with as many calls of others before them."""
    stage: dict[Node, int] = {}
    stages: dict[int, list[Node]] = {}
    apart: set[Node] = set()
    for n in graph.nodes:
        stage[n] = max((stage[a] + (a in apart) for a in n.all_input_nodes), default=0)
        if n.op == "call_function" and _is_apart(n, apart):
            apart.add(n)
        elif n.op == "call_function":
            stages.setdefault(stage[n], []).append(n)
    return [*stages.values()]


def _is_apart(n: Node, apart: set[Node]) -> bool:
    """Whether Inductor is not to see an operation: a kernel, random numbers, whatever writes; and results of those."""
    target = n.target
    if target in (item, operator.getitem):
        return n.args[0] in apart
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable


def _work(n: Node) -> int:
    """How many operations that Inductor may fuse a node is."""
    target = n.target
    if not isinstance(target, torch._ops.OpOverload) or target.is_view or target.overloadpacket in _CALLS:
        return 0
    return LEAST if target.overloadpacket in _NORMS else 1


def _replace(gm: GraphModule, nodes: Sequence[Node], name: str, shared: dict[Any, Function]) -> None:
    """Replace nodes of a graph by one call."""
    own = {*nodes}
    given = [*dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in own)]
    wanted = [n for n in nodes if any(u not in own for u in n.users)]
    inner = Graph()
    copies = {n: inner.placeholder(n.name) for n in given}
    for n in nodes:
        copies[n] = inner.node_copy(n, copies.__getitem__)
    inner.output(tuple(copies[n] for n in wanted))
    graph = gm.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        call = graph.call_function(_Stage(GraphModule(gm, inner), name, shared), tuple(given))
        for k, n in enumerate(wanted):
            n.replace_all_uses_with(graph.call_function(item, (call, k)), delete_user_cb=lambda u: u not in own)
    for n in reversed(nodes):
        graph.erase_node(n)
