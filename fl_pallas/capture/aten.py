"""From a Dynamo graph to a functional ATen graph of static shapes, with the user's source lines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.fx.traceback
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from ..errors import FlPallasError, Unsupported
from .decompose import attention, encoder_layer, flex
from .random import OPENED

F = torch.nn.functional
aten = torch.ops.aten


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` in plain PyTorch."""
    return attention(query, key, value, attn_mask, is_causal, scale, dropout_p)


def _opened(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    results: str,
) -> Any:
    """One of PyTorch's attention kernels in plain PyTorch.

    Its further results (a letter each: t a tensor, n a number) serve only a backward, and nothing reads them.
    """
    return attention(q, k, v, bias, causal, scale, dropout), *(q.new_zeros(()) if r == "t" else 0 for r in results)


# What PyTorch's own modules end in, out of reach of the mode below.
_KERNELS = {
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        lambda q, k, v, dropout=0.0, causal=False, *, attn_mask=None, scale=None: _opened(
            q, k, v, attn_mask, dropout, causal, scale, "t"
        )
    ),
    aten._scaled_dot_product_flash_attention.default: (
        lambda q, k, v, dropout=0.0, causal=False, debug_mask=False, *, scale=None: _opened(
            q, k, v, None, dropout, causal, scale, "tttnnttt"
        )
    ),
    aten._scaled_dot_product_efficient_attention.default: (
        lambda q, k, v, bias, lse, dropout=0.0, causal=False, *, scale=None: _opened(
            q, k, v, bias, dropout, causal, scale, "ttt"
        )
    ),
    aten._scaled_dot_product_cudnn_attention.default: (
        lambda q, k, v, bias, lse, dropout=0.0, causal=False, debug_mask=False, *, scale=None: _opened(
            q, k, v, bias, dropout, causal, scale, "tttnnttt"
        )
    ),
}


def _fill_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """`Tensor.fill_diagonal_`, which PyTorch has no functional form of; it returns what it changes."""
    if x.dim() < 2 or (x.dim() > 2 and len({*x.shape}) > 1):
        return x.fill_diagonal_(fill_value, wrap)  # raises
    first, *others = (
        torch.arange(n, device=x.device).view(n, *(1 for _ in x.shape[d + 1 :])) for d, n in enumerate(x.shape)
    )
    if wrap and x.dim() == 2:
        first = first % (x.shape[1] + 1)
    return x.masked_fill_(functools.reduce(torch.logical_and, (first == o for o in others)), fill_value)


# Of as many factors a product is written out.
FACTORS = 4


def _prod(x: torch.Tensor, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> torch.Tensor:
    """`torch.prod`; of few factors their product, whose gradient asks for no running products."""
    if dim is None or kwargs or not x.is_floating_point() or x.dim() == 0 or not 0 < x.shape[dim] <= FACTORS:
        return x.prod(**({} if dim is None else {"dim": dim, "keepdim": keepdim}), **kwargs)
    product = functools.reduce(torch.mul, x.unbind(dim))
    return product.unsqueeze(dim) if keepdim else product


def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """`torch.as_strided` by views that say what they read: chunks that overlap are unfolded."""
    first = 0 if storage_offset is None else storage_offset - x.storage_offset()
    dims = sorted((d for d, n in enumerate(size) if n != 1), key=lambda d: stride[d])
    spans = [1]
    for d in dims:
        spans.append((size[d] - 1) * stride[d] + spans[-1])
    inside = 0 <= first and first + spans[-1] <= x.numel()
    if not (x.is_contiguous() and inside) or any(size[d] == 0 or stride[d] <= 0 for d in dims):
        return x.as_strided(size, stride, storage_offset)
    out = x.view(-1).narrow(0, first, spans[-1])
    for n, d in reversed([*enumerate(dims)]):
        # The last dimension goes over what the present one, and those within it, span.
        dense = stride[d] == spans[n]
        out = out.unflatten(-1, (size[d], spans[n])) if dense else out.unfold(-1, spans[n], stride[d])
    out = out.squeeze(-1).permute([dims[::-1].index(d) for d in sorted(dims)])
    return out.reshape(tuple(size))


_OPENED = {
    torch.as_strided: _as_strided,
    torch.Tensor.as_strided: _as_strided,
    F.scaled_dot_product_attention: _attention,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    torch.prod: _prod,
    torch.Tensor.prod: _prod,
    # `mask &= other`, which PyTorch has no functional form of either.
    torch.Tensor.__iand__: torch.Tensor.bitwise_and_,
    torch.Tensor.__ior__: torch.Tensor.bitwise_or_,
    torch.Tensor.__ixor__: torch.Tensor.bitwise_xor_,
    **OPENED,
}
# A mode is told of the call of this one alone, unless it does not ask whether there is a mode.
_MULTI_HEAD = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


class OpenAttention(TorchFunctionMode):
    """While active, calls of `F.scaled_dot_product_attention`, also inside PyTorch's own modules, are opened up, and
    random numbers are functions of a seed."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.multi_head_attention_forward:
            with self:
                return _MULTI_HEAD(*args, **(kwargs or {}))
        return _OPENED.get(func, func)(*args, **(kwargs or {}))


_FLEX = torch.ops.higher_order.flex_attention


class Opener(torch.fx.Interpreter):
    """Runs a graph of torch functions with PyTorch's attention functions opened up, and source lines kept."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta(), OpenAttention():
            return super().run(*args, **kwargs)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # (An operator of higher order: modes are told of its parts alone.)
        return super().call_function(flex if target is _FLEX else target, args, kwargs)


def to_aten(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The ATen graph of `gm` for inputs of these shapes, strides, dtypes and devices.

    Args:
      gm: a graph of torch functions; its nodes' stack traces are kept.
      inputs: the tensors (real or fake) and numbers it is called with. Their data is not read.

    Returns:
      A graph without mutation of intermediates (a mutated input shows as a final `copy_`), whose views
      stay views, with every result in `meta["val"]`.

    Raises: Unsupported where PyTorch cannot trace the graph, which says nothing of whether it can run it.
    """
    mode, fakes = fakes_of(inputs)
    run: Any = Opener(gm).run
    if any(_is_transform(n) for n in gm.graph.nodes):
        # PyTorch makes operations in place functional by a transform of this kind, which must not lie around another.
        # Where gradients are off around it, `torch.func.grad` in the graph would find zeros.
        whole = traced(run, fakes, mode, torch.is_grad_enabled())
        run = functools.partial(retraced, whole)
    out = _trace(run, fakes, mode)
    if any(_writes(n) for n in out.graph.nodes):
        # Composites of PyTorch's own may still write in place after one pass.
        out = _trace(functools.partial(retraced, out), fakes, mode)
    return out


def fakes_of(inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """A mode to compute with fake tensors of fixed sizes in, and these, in place of tensors; numbers as they are."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    return mode, [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]


def _is_transform(node: torch.fx.Node) -> bool:
    """Whether the node enters or leaves a function transform (`torch.vmap`), or is made with one."""
    return node.target is _FLEX or (getattr(node.target, "__module__", None) or "").startswith("torch._functorch")


def _trace(run: Any, fakes: list[Any], mode: FakeTensorMode) -> torch.fx.GraphModule:
    return traced(torch.func.functionalize(run, remove="mutations"), fakes, mode)


def traced(run: Any, fakes: list[Any], mode: FakeTensorMode, gradients: bool = False) -> torch.fx.GraphModule:
    """The ATen graph of a function of fake tensors.

    Raises: Unsupported where PyTorch cannot trace it.
    """
    with mode, torch.set_grad_enabled(gradients):
        try:
            out = make_fx(run, decomposition_table=_KERNELS, tracing_mode="real")(*fakes)
        except (FlPallasError, RecursionError):
            raise
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise Unsupported("the whole graph", f"PyTorch cannot trace it: {type(error).__name__}: {first}") from error
    out.graph.eliminate_dead_code()
    out.recompile()
    return out


def retraced(gm: torch.fx.GraphModule, *args: Any) -> Any:
    """What a graph makes of its arguments; a graph that is traced of it keeps the source lines."""
    with torch.fx.traceback.preserve_node_meta():
        return torch.fx.Interpreter(gm).run(*args)


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def mutates_inputs(gm: torch.fx.GraphModule) -> bool:
    """Whether an ATen graph writes to what it was given (or to anything)."""
    return any(_writes(n) for n in gm.graph.nodes)
