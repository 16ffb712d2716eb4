"""Forward and backward of a graph as two ATen graphs, by AOTAutograd; what one keeps for the other is decided here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from ..errors import NoGradient, Unsupported
from ..schedule.build import substitute
from ..schedule.expr import Expr, load, loads
from ..schedule.passes.blow_ups import given_or_returned
from ..schedule.passes.keep import Compared, Kept
from ..schedule.program import KEPT, Program, Value, left_to_pytorch, with_parameters
from .aten import Opener
from .copies import read_copies
from .distribute import distribute
from .drawn import Inner, give_back
from .narrow import narrow
from .positions import by_position, without_gradient
from .same import merge_masks
from .shapes import by_shape
from .terms import offer_terms
from .translate import translate

aten = torch.ops.aten
Compiler = Callable[[GraphModule, Sequence[Any], "Known"], Callable[..., Any]]
# (joint Program, results of its forward, of its backward) -> names of what is zero whatever the numbers are.
Vanishing = Callable[[Program, tuple[str, ...], tuple[str, ...]], frozenset[str]]
# The same, and names of values that nothing reads unless they are kept -> what is kept, or comparisons with an extremum
# that needs a gradient.
Keep = Callable[[Program, tuple[str, ...], tuple[str, ...], tuple[str, ...]], Kept | Compared]

# Row statistics are nodes of their own, which a backward pass can be handed.
_STATISTICS = get_decompositions((aten._softmax, aten._log_softmax, aten._safe_softmax, aten.logsumexp))


def _distance_backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, distance: torch.Tensor
) -> torch.Tensor:
    """Gradient of `a` [..., n, d], of whose p-norm distances [..., n, m] to `b` [..., m, d] `grad` is the gradient."""
    difference = a.unsqueeze(-2) - b.unsqueeze(-3)
    if p == math.inf:
        slope = difference.sign() * (difference.abs() == distance.unsqueeze(-1))
        return (grad.unsqueeze(-1) * slope).sum(-2)
    # Where the distance is 0 so is the gradient.
    factor = grad if p == 1 else torch.where(distance == 0, 0, grad * distance.pow(1 - p))
    slope = difference if p == 2 else difference.sign() * difference.abs().pow(p - 1)
    return (factor.unsqueeze(-1) * slope).sum(-2)


def _aminmax(x: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    dims = [*range(x.dim())] if dim is None else [dim]
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def _zeros_and_scatter(shape: list[int], indices: list[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor that a function of `flex_attention` reads at positions."""
    return aten.index_put(values.new_zeros(shape), indices, values, accumulate=True)


# On CPUs, log_sigmoid hands its backward pass a buffer that is not read; of nll_loss, the backward pass asks for the
# sum of weights alone, and PyTorch would compute all log-probabilities with it.
_OPENED = {
    **_STATISTICS,
    **get_decompositions((aten.log_sigmoid_forward, aten.nll_loss_forward, aten.nll_loss2d_forward)),
    aten._cdist_backward.default: _distance_backward,
    aten.aminmax.default: _aminmax,
    torch.ops.flex_lib.zeros_and_scatter.default: _zeros_and_scatter,
}


# Takes a list, which it empties, so that what it was given can be freed.
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Known:
    """What is known of a pass besides its graph.

    Attributes:
      facts: what some of its inputs are, in terms of others.
      saved: names of the results that only the backward pass reads.
      left: names of values that no kernel is to compute.
      parameters: names of inputs that are parameters, which the fakes of a pass do not tell.
      tokens: names of inputs that the forward pass has made of more than weights.
    """

    facts: tuple[Value, ...] = ()
    saved: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    tokens: frozenset[str] = frozenset()


NOTHING = Known()


@dataclass(frozen=True)
class Pass:
    """One compiled pass of a graph.

    Attributes:
      call: inputs → results.
      inputs, results: name and fake (or number) of each; "" for what is no value of the graph.
    """

    call: Boxed
    inputs: tuple[tuple[str, Any], ...]
    results: tuple[tuple[str, Any], ...]


@dataclass
class Passes:
    """Both passes of a graph.

    The forward pass returns results, and behind them what is saved; the backward pass takes that, and a tangent for
    each result that needs a gradient, and returns a gradient, or None, for each input.

    Attributes:
      inputs, results: how many the graph has. AOTAutograd may give the passes others.
    """

    inputs: int
    results: int
    forward: Pass | None = None
    backward: Pass | None = None


def differentiable(
    gm: GraphModule,
    inputs: Sequence[Any],
    vanishing: Vanishing,
    keep: Keep,
    inner: Inner,
    forward: Compiler,
    backward: Compiler,
    left: frozenset[str] = frozenset(),
) -> tuple[Callable[..., Any], Passes]:
    """`gm` as a function that PyTorch's autograd can differentiate once, and the two passes that it calls.

    Args:
      gm: a graph of torch functions.
      inputs: the tensors and numbers it is called with; their data is not read.
      vanishing: which gradients are known to be zero.
      keep: which values of the forward pass the backward pass reads from memory; others it computes again.
      inner: which values of the forward pass kernels compute, and do not store for their size.
      forward, backward: make a callable of an ATen graph of either pass (its tensors have their fakes in
        `meta["val"]`), its fake inputs and what is known of them.
      left: names of values of the forward pass that no kernel is to compute; they are kept.
    """
    facts: list[Value] = []
    returned = 0
    parameters = tokens = frozenset[str]()
    # Not the inputs themselves: AOTAutograd's cycles would hold them, and what autograd knows of them, for long.
    known = are_parameters(inputs)

    def parted(joint: GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> tuple[GraphModule, GraphModule]:
        nonlocal returned, left, parameters, tokens
        returned, parameters = num_fwd_outputs, parameters_of(joint, known)

        def read(unread: Collection[str] = ()) -> Program:
            return with_parameters(left_to_pytorch(translate(joint, unread), left, KEPT), parameters)

        # All that follows goes by the graph: its code is not made anew.
        with unset_fake_temporarily():
            merge_masks(joint)
            _set_to_zero(joint, _zero(joint))
            by_shape(joint)
            narrow(joint)
            distribute(joint)
            results, _ = _outputs(joint, num_fwd_outputs)

            def drawn(p: Program) -> frozenset[str]:
                p = replace(p, outputs=tuple(n for n in results if n in p.by_name))
                return inner(with_parameters(p, parameters))

            give_back(joint, drawn)
            program = read()
            if zeros := vanishing(program, *_results(joint, num_fwd_outputs, program)):
                _set_to_zero(joint, zeros)
                program = read()
            if offered := offer_terms(joint):
                program = read(offered)
            asked = frozenset[str]()
            while not isinstance(kept := keep(program, *_results(joint, num_fwd_outputs, program), offered), Kept):
                if kept.names <= asked:
                    lines = (program.by_name[n].where for n in sorted(kept.names))
                    raise without_gradient("the gradient goes to what equals it", lines)
                asked |= kept.names
                results, _ = _results(joint, num_fwd_outputs, program)
                left |= by_position(joint, kept, given_or_returned(replace(program, outputs=results)))
                offered = offer_terms(joint)
                program = read(offered)
        _need(joint, num_fwd_outputs, kept.names & {*offered})
        read_copies(joint, [[v.name for v in chain] for chain in kept.copies])
        wide = _widen(joint, kept.exact)
        facts.extend(_widened(f, wide) for f in kept.facts)
        _need(joint, num_fwd_outputs, {f.name for f in facts})
        tokens = kept.tokens
        names = {wide.get(name, name) for name in kept.names}
        # A node may want an input of which its values make no use.
        wanted = (n for n in joint.graph.nodes if n.name in names or n.op == "placeholder")
        saved = [n for n in wanted if not n.name.startswith("tangents")]
        return _extract_fwd_bwd_modules(joint, saved, [], num_fwd_outputs=num_fwd_outputs)

    passes = Passes(len(inputs), len(_results_of(gm)))

    def forward_pass(gm: GraphModule, args: Sequence[Any]) -> Boxed:
        results, saved = map(frozenset, _outputs(gm, returned))
        _keep_all()
        passes.forward = _pass(
            gm, lambda: forward(gm, args, Known(saved=saved - results, left=left, parameters=parameters))
        )
        return _with_own_memory(passes.forward.call, returned, _written())

    def backward_pass(gm: GraphModule, args: Sequence[Any]) -> Boxed:
        gm = _without_needs(gm)
        told = Known(tuple(facts), left=left, parameters=parameters, tokens=tokens)
        passes.backward = _pass(gm, lambda: backward(gm, args, told))
        return passes.backward.call

    compiler = aot_autograd(
        fw_compiler=forward_pass,  # type: ignore[arg-type]
        bw_compiler=backward_pass,  # type: ignore[arg-type]
        partition_fn=parted,
        decompositions=_OPENED,
    )
    # A second backward pass (retain_graph) reads what is kept again: its memory is not given away. Both passes are
    # compiled at once, so that the first call is like all others (a checkpoint compares what two calls save).
    patched = config.patch(donated_buffer=False, force_non_lazy_backward_lowering=True)
    with patched, tracing(TracingContext(None)):  # in which AOTAutograd leaves word of what is written to
        try:
            return compiler(_opened(gm), inputs), passes
        except (RuntimeError, ValueError, IndexError) as error:
            # PyTorch itself refuses only once a gradient is asked for, or in other words.
            kind = NoGradient if "modified by an inplace operation" in str(error) else Unsupported
            raise kind("the graph", f"its gradient cannot be traced: {error}") from error


def are_parameters(inputs: Sequence[Any]) -> list[bool]:
    """Whether each of the inputs is a parameter."""
    return [isinstance(x, torch.nn.Parameter) for x in inputs]


def parameters_of(gm: GraphModule, known: Sequence[bool]) -> frozenset[str]:
    """Names of the inputs, but for tangents, that are `known` to be parameters; none where AOTAutograd gives the graph
    others."""
    given = [n.name for n in gm.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
    if len(given) != len(known):
        return frozenset()
    return frozenset(n for n, is_one in zip(given, known) if is_one)


def _pass(gm: GraphModule, compiled: Callable[[], Callable[..., Any]]) -> Pass:
    """A pass, compiled as AOTAutograd wants it; the graph may be another one then."""
    inputs, results = (
        tuple((n.name, n.meta.get("val")) if isinstance(n, Node) else ("", n) for n in nodes)
        for nodes in (gm.graph.find_nodes(op="placeholder"), _results_of(gm))
    )
    run = compiled()

    def boxed(args: list[Any]) -> Any:
        given = tuple(args)
        args.clear()
        return run(*given)

    return Pass(_marked(boxed), inputs, results)


def _marked(boxed: Boxed) -> Boxed:
    """As AOTAutograd knows a function that empties the list it is given."""
    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _with_own_memory(call: Boxed, returned: int, written: Sequence[int]) -> Boxed:
    """A forward pass none of whose results is memory that is saved: AOTAutograd would not notice that a write to it, in
    place, changes what the backward pass reads. Nor is an input saved that it writes to itself afterwards, or that
    autograd saves for nobody, as it was made under inference_mode.

    Args:
      returned: how many of what `call` returns are results; what is saved comes behind them.
      written: places of the inputs that are written to.
    """

    def memory(t: Any) -> int | None:
        return t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else None

    def boxed(args: list[Any]) -> Any:
        changing = {memory(args[n]) for n in written}
        given = {memory(a) for a in args}
        made = call(args)
        saved = {memory(t) for t in made[returned:]} - {None}
        own = (_copied(t) if memory(t) in saved else _whole(t, given) for t in made[:returned])
        kept = (_copied(t) if memory(t) in changing or _is_inference(t) else t for t in made[returned:])
        return (*own, *kept)

    return _marked(boxed)


def _whole(t: Any, given: Collection[int | None]) -> Any:
    """`t`, no view of what nobody else sees, which autograd would let nobody write to; views of what is given stay."""
    if not isinstance(t, torch.Tensor) or not t._is_view() or t.untyped_storage()._cdata in given:
        return t
    return t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _is_inference(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_inference()


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy that lies as `t` does, also where that leaves gaps; a tensor as any where elements share memory."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size > 1 and stride <= reach:
            return t.clone()
        reach += (size - 1) * stride
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _keep_all() -> None:
    """Tell AOTAutograd that no saved tensor is given away: where it has not looked for such, it says that there are
    some as soon as a graph is to be retained."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _written() -> tuple[int, ...]:
    """Places of the inputs that the graph which AOTAutograd is compiling writes to."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return tuple(metadata.mutated_inp_runtime_indices) if metadata else ()


def _opened(gm: GraphModule) -> GraphModule:
    """`gm` as one call, in which PyTorch's attention functions are opened up and source lines kept."""

    run = Opener(gm).run
    graph = torch.fx.Graph()
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = [graph.placeholder(n.name) for n in placeholders]
    result = graph.call_function(run, tuple(inputs))
    outputs = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    graph.output(tuple(graph.call_function(operator.getitem, (result, k)) for k in range(len(outputs))))  # type: ignore[arg-type]
    return GraphModule(gm, graph)


def _outputs(joint: GraphModule, forward: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the tensors that the forward and that the backward pass returns."""
    names = tuple(n.name if isinstance(n, Node) else "" for n in _results_of(joint))
    return names[:forward], names[forward:]


def _results_of(gm: GraphModule) -> tuple[Any, ...]:
    results: Any = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return tuple(results)


def _results(joint: GraphModule, forward: int, program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`_outputs`, less what is no value of the Program."""
    results, gradients = _outputs(joint, forward)
    return tuple(n for n in results if n in program.by_name), tuple(n for n in gradients if n in program.by_name)


def _zero(joint: GraphModule) -> frozenset[str]:
    """Names of what reads tensors for their shapes alone: zeros, as the gradient of what was rounded is, and what is
    empty (the part of a head that is not rotated, where all of it is)."""
    made = joint.graph.find_nodes(op="call_function", target=aten.zeros_like.default)
    return frozenset(n.name for n in (*made, *filter(_is_empty, joint.graph.nodes)))


def _is_empty(node: Node) -> bool:
    """Whether a node computes a tensor of no elements from others."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return node.op == "call_function" and bool(node.all_input_nodes) and any(type(n) is int and n == 0 for n in shape)


def _set_to_zero(joint: GraphModule, names: frozenset[str]) -> None:
    """Put zeros in the place of tensors, and leave out what only they needed."""
    for node in [n for n in joint.graph.nodes if n.name in names]:
        value = node.meta["val"]
        with joint.graph.inserting_before(node):
            kind = {"dtype": value.dtype, "device": value.device}
            zeros = joint.graph.call_function(aten.full.default, (list(value.shape), 0.0), kind)
        zeros.meta.update(node.meta)
        node.replace_all_uses_with(zeros)
    joint.graph.eliminate_dead_code()


def _widen(joint: GraphModule, names: frozenset[str]) -> dict[str, str]:
    """Put a float32 tensor between each of these and its users; their names, by those of what they stand for."""
    made: dict[str, str] = {}
    for node in [n for n in joint.graph.nodes if n.name in names]:
        value, users = node.meta["val"], list(node.users)
        with joint.graph.inserting_after(node):
            wide = joint.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float32})
        with joint.graph.inserting_after(wide):
            narrow = joint.graph.call_function(aten._to_copy.default, (wide,), {"dtype": value.dtype})
        with value.fake_mode:
            wide.meta.update({**node.meta, "val": value.float()})
        narrow.meta.update(node.meta)
        for user in users:
            user.replace_input_with(node, narrow)
        made[node.name] = wide.name
    return made


def _widened(fact: Value, wide: Mapping[str, str]) -> Value:
    """A fact in terms of those float32 tensors, or about one."""
    assert fact.expr is not None
    found: dict[Any, Expr] = {n: load(wide[n.source], n.index, "f32") for n in loads(fact.expr) if n.source in wide}
    fact = replace(fact, expr=substitute(fact.expr, {}, found))
    return replace(fact, name=wide[fact.name], dtype="f32") if fact.name in wide else fact


def _need(joint: GraphModule, forward: int, names: Set[str]) -> None:
    """Let the backward pass read these values, which AOTAutograd would not hand to it otherwise."""
    last = next(n for n in joint.graph.nodes if n.op == "output")
    results: Any = list(last.args[0])
    place = next((k for k in range(forward, len(results)) if isinstance(results[k], Node)), None)
    if names and place is not None:
        with joint.graph.inserting_before(last):
            needed = (n for n in joint.graph.nodes if n.name in names)
            results[place] = joint.graph.call_function(_needing, (results[place], *needed))
        results[place].meta.update(results[place].args[0].meta)
        last.args = (tuple(results),)


def _needing(value: Any, *needed: Any) -> Any:
    return value


def _without_needs(gm: GraphModule) -> GraphModule:
    for n in gm.graph.find_nodes(op="call_function", target=_needing):
        n.replace_all_uses_with(n.args[0])
        gm.graph.erase_node(n)
    # What the forward pass drew is not drawn again, although PyTorch takes drawing for an effect.
    gm.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    gm.recompile()
    return gm
