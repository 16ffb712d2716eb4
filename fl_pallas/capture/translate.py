"""From an ATen graph to a Program: one pure expression per tensor."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from ..errors import SourceLoc, Unsupported
from ..schedule.build import substitute, wrapped
from ..schedule.doubles import doubles
from ..schedule.expr import Expr, Index, Load, Op, const, index, load, reductions, sources, walk
from ..schedule.in_turn import in_turn
from ..schedule.integer import linear
from ..schedule.passes.closed_forms import in_closed_form
from ..schedule.passes.resolve_views import inlined
from ..schedule.program import BESIDE, Program, Value, left_to_pytorch, reads_of, value_axes
from ..schedule.side_by_side import rejoined, side_by_side
from . import reduction
from .dtypes import short_dtype
from .rules import Result, apply, is_getitem
from .tensor import Indices, Tensor

aten = torch.ops.aten
_FRAME = re.compile(r'File "([^"]*)", line (\d+)[^\n]*(?:\n\s*(?!File ")([^\n]*))?')


def translate(gm: torch.fx.GraphModule, unread: Collection[str] = ()) -> Program:
    """The Program of a functional ATen graph of static shapes.

    Args:
      gm: a graph traced by make_fx with fake tensors; every node has its result in `meta["val"]`.
      unread: names of nodes that count although nothing reads them.

    Returns:
      A value for every tensor node that is read, named as the node. What has no rule is an extern value with its
      reason. A node with several results gives no value; its getitem nodes do.

    Raises:
      Unsupported: a tensor has a size that is not a plain integer, or an operation writes to its argument.
    """
    translation = _Translation(gm, unread)
    for node in gm.graph.nodes:
        translation.visit(node)
    program = rejoined(in_closed_form(Program(tuple(translation.values.values()), translation.outputs)))
    if translation.device.type == "cuda":
        program = left_to_pytorch(program, doubles(program), "kernels compute in float32 on a GPU")
    program = left_to_pytorch(
        program, in_turn(program), "a loop writes it part by part, each part made of those before"
    )
    return left_to_pytorch(program, side_by_side(program), BESIDE)


def kernels_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device of the first tensor on a GPU, else the CPU."""
    found = (t.device for t in tensors if t.dim() and t.device.type != "cpu")
    return next(found, torch.device("cpu"))


class _Translation:
    """The state of one translation: values by node name, and how later nodes read each node."""

    def __init__(self, gm: torch.fx.GraphModule, unread: Collection[str]):
        self.gm, self.unread = gm, unread
        self.values: dict[str, Value] = {}
        self.outputs: tuple[str, ...] = ()
        self.results: dict[Node, Result] = {}
        self.refusals: dict[Node, str] = {}
        # Values a node without value of its own (a tuple, a number) is computed from.
        self.sources: dict[Node, tuple[str, ...]] = {}
        inputs = (_val(gm, n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr"))
        self.device = kernels_device(v for v in inputs if isinstance(v, torch.Tensor))
        # Names of values that are not made of numbers and indices alone.
        self.data: set[str] = set()
        # Those made of numbers and indices, written out.
        self.made: dict[str, Value] = {}
        # Names of those of 32 bits that may have had no room.
        self.wrapped: set[str] = set()

    def visit(self, node: Node) -> None:
        if node.op == "output":
            found = [n.name for n in _nodes(node.args[0])]
            self.outputs = tuple(n for n in found if n in self.values)
        elif node.op in ("placeholder", "get_attr"):
            self._input(node)
        else:
            self._call(node)

    def _input(self, node: Node) -> None:
        val = _val(self.gm, node)
        if isinstance(val, torch.Tensor):
            self._record(node, val, "input", None)

    def _call(self, node: Node) -> None:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise Unsupported(str(node.target), "it writes to its argument: the graph is not functional", line_of(node))
        if not node.users and node.name not in self.unread:
            return
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            _static_shape(val, node)
        what = str(node.args[0].target if is_getitem(node) else node.target)  # type: ignore[union-attr]
        expr: Expr | None = None
        why = ""
        try:
            result = self._result(node, val)
            if isinstance(result, Tensor) and not isinstance(val, torch.Tensor):
                self.results[node] = result
            elif isinstance(result, Tensor):
                expr = result.at(tuple(map(index, value_axes(result.shape))))
            elif result is not None:
                self.results[node] = result
        except Unsupported as refusal:
            why = self.refusals[node] = refusal.why
        if isinstance(val, torch.Tensor):
            self._record(node, val, what, expr, why)
        else:
            self.sources[node] = self._reads(node)

    def _result(self, node: Node, val: Any) -> Result | None:
        """What `node` computes, as tensors over the results of earlier nodes."""
        for n in node.all_input_nodes:
            if n in self.refusals and n not in self.results:
                raise Unsupported(str(node.target), self.refusals[n], line_of(node))
        if isinstance(val, torch.Tensor) and 0 in val.shape:
            raise Unsupported(str(node.target), "empty tensor")
        self._check_devices(node)
        if is_getitem(node):
            source, position = node.args
            piece = self.results[source][position]  # type: ignore[index]
            if piece is None:
                raise Unsupported(str(node.target), f"no rule for result {position} of {source.target}")  # type: ignore[union-attr]
            return piece
        if (literal := _literal(self.gm, node)) is not None:
            return literal
        if node.target is aten._local_scalar_dense.default:
            # A number that TorchDynamo passes as a tensor, so that a new value needs no new graph.
            return self._number(node.args[0])  # type: ignore[arg-type]
        args, kwargs = map_arg((node.args, node.kwargs), self._argument)
        return apply(node.target, val, args, kwargs)

    def _check_devices(self, node: Node) -> None:
        """Raises: Unsupported if `node` reads data that is where kernels do not reach, or brings some there."""
        made = _val(self.gm, node)
        leaves = isinstance(made, torch.Tensor) and made.device != self.device
        for n in node.all_input_nodes:
            val = _val(self.gm, n)
            if n.name in self.data and val.dim() and (leaves or val.device != self.device):
                raise Unsupported(str(node.target), f"it reads a tensor on {val.device}", line_of(node))

    def _number(self, source: Node) -> tuple[Tensor | None, ...] | Tensor:
        held = self.results.get(source)
        if source.op != "placeholder" or not isinstance(held, Tensor) or held.shape:
            raise Unsupported("a number", "a number computed from data")
        return held

    def _argument(self, node: Node) -> Any:
        if node not in self.results:
            raise Unsupported(str(node.target), "a number computed from data")
        return self.results[node]

    def _record(self, node: Node, val: torch.Tensor, op: str, expr: Expr | None, why: str = "") -> None:
        shape = _static_shape(val, node)
        dtype = short_dtype(val.dtype)
        schema = getattr(node.target, "_schema", None)
        if dtype is None:
            # The Program has no name for the type: a byte stands in, and nothing may read the value.
            why = self.refusals[node] = f"element type {val.dtype}"
        else:
            self.refusals.pop(node, None)
            self.results[node] = _progression(expr, shape, dtype) or self._loaded(node.name, shape, dtype, expr)
        if expr is not None and dtype == "i32":
            expr = self._wrapped(node.name, expr)
        reads = self._reads(node) if expr is None else reads_of(expr)
        if expr is None or not self.data.isdisjoint(reads):
            self.data.add(node.name)
        self.values[node.name] = Value(
            node.name,
            value_axes(shape),
            dtype or "u8",
            expr,
            op,
            reads,
            why,
            projection=node.target in reduction.PROJECTIONS,
            turned=not val.is_contiguous(),
            scanned=_scanned(node) if expr is None else None,
            borrowed=expr is None and schema is not None and any(r.alias_info for r in schema.returns),
            where=line_of(node),
        )

    def _loaded(self, name: str, shape: tuple[int, ...], dtype: str, expr: Expr | None) -> Tensor:
        def at(idx: Indices) -> Expr:
            return load(name, idx, dtype)

        if expr is None or dtype != "i64" or not self.data.isdisjoint(sources(expr)):
            return Tensor(shape, dtype, at)
        return Tensor(shape, dtype, at, lambda idx: inlined(at(idx), self.values, self.made))

    def _wrapped(self, name: str, expr: Expr) -> Expr:
        """What 32 bits hold of a product of theirs, and of sums of such (hashes): sums of ids and lengths, which masks
        are made of, and products of matrices are taken to have room."""
        if reductions(expr):
            return expr
        # Positions are multiplied too, by views, in 64 bits.
        products = any(isinstance(n, Op) and n.name in ("mul", "shl") and n.dtype == "i32" for n in walk(expr))
        if not products and self.wrapped.isdisjoint(reads_of(expr)):
            return expr
        held = expr if isinstance(expr, Load) else wrapped(expr, "i32")
        if held is not expr or not products:
            self.wrapped.add(name)
        return held

    def _reads(self, node: Node) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for n in node.all_input_nodes:
            found.update(dict.fromkeys((n.name,) if n.name in self.values else self.sources.get(n, ())))
        return tuple(found)


def _scanned(node: Node) -> int | None:
    """The dimension along which `node` is a running sum of floats; None if it is none."""
    if node.target is not aten.cumsum.default:
        return None
    source, dim = node.args[:2]
    assert isinstance(source, Node) and isinstance(dim, int)
    x = source.meta["val"]
    floats = x.is_floating_point() and node.meta["val"].is_floating_point()
    return dim % x.dim() if floats and x.dim() else None


def _progression(expr: Expr | None, shape: tuple[int, ...], dtype: str) -> Tensor | None:
    """What an `arange` and sums of such are read as: a linear form of the indices, which says where a gradient goes."""
    if expr is None or dtype != "i64" or not all(isinstance(atom, Index) for atom in linear(expr)[0]):
        return None
    axes = value_axes(shape)
    return Tensor(shape, dtype, lambda idx: substitute(expr, dict(zip(axes, idx, strict=True))))


def _nodes(arg: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(arg, found.append)
    return found


def _val(gm: torch.fx.GraphModule, node: Node) -> Any:
    val = node.meta.get("val")
    return operator.attrgetter(str(node.target))(gm) if val is None and node.op == "get_attr" else val


def _literal(gm: torch.fx.GraphModule, node: Node) -> Tensor | None:
    """The constant that a `torch.tensor(number)` of the user's stands for."""
    if node.target is not aten.lift_fresh_copy.default or node.args[0].op != "get_attr":  # type: ignore[union-attr]
        return None
    data = _val(gm, node.args[0])  # type: ignore[arg-type]
    data = getattr(data, "constant", None) if isinstance(data, torch._subclasses.FakeTensor) else data
    if data is None or data.ndim or (dtype := short_dtype(data.dtype)) is None:
        return None
    return Tensor((), dtype, lambda idx: const(data.item(), dtype))


def _static_shape(val: torch.Tensor, node: Node) -> tuple[int, ...]:
    if not all(isinstance(n, int) for n in val.shape):
        raise Unsupported(str(node.target), f"shape {tuple(val.shape)} is not static", line_of(node))
    return tuple(val.shape)


def line_of(node: Node) -> SourceLoc | None:
    """The user's line that led to an operation; None if PyTorch does not say."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return None
    file, line, code = frames[-1]
    return SourceLoc(file, int(line), code.strip())
