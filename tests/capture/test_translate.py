"""Every family of ATen operations, translated and evaluated against PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fl_pallas.capture import translate
from fl_pallas.capture.aten import to_aten
from fl_pallas.errors import Unsupported
from fl_pallas.schedule.expr import Reduce, free_axes, reductions
from fl_pallas.schedule.program import Program, reads_of
from fl_pallas.schedule.text import expr_text, program_text
from tests.evaluate import evaluate


def trace(f: Callable, *args: torch.Tensor) -> torch.fx.GraphModule:
    # One pass leaves the mutations that PyTorch's own composite operations make.
    once = make_fx(torch.func.functionalize(lambda *a: f(*a), remove="mutations"), tracing_mode="fake")(*args)
    return make_fx(torch.func.functionalize(once, remove="mutations"), tracing_mode="fake")(*args)


def program_of(f: Callable, *args: torch.Tensor) -> Program:
    program = translate(trace(f, *args))
    for v in program.values:
        if v.expr is not None:
            assert v.reads == reads_of(v.expr)
            assert free_axes(v.expr) <= set(v.axes), expr_text(v.expr)
    return program


def check(f: Callable, *args: torch.Tensor) -> Program:
    """Translates f, requires that every value is computed, and compares the results."""
    gm = trace(f, *args)
    program = program_of(f, *args)
    externs = [(v.op, v.why) for v in program.values if v.expr is None and v.op != "input"]
    assert not externs, externs
    given = iter(args)
    feeds = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            data = next(given) if node.op == "placeholder" else getattr(gm, node.target)
            if node.name in program.by_name:
                feeds[node.name] = data.numpy()
    values = {**feeds, **evaluate(program, feeds)}
    expected = f(*args)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    assert len(program.outputs) == len(expected)
    for name, want in zip(program.outputs, expected):
        assert program.by_name[name].shape == tuple(want.shape)
        np.testing.assert_allclose(values[name], want.numpy(), rtol=1e-9, atol=1e-12, err_msg=program_text(program))
    return program


def x64(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64)


X, Y = x64(3, 4), x64(3, 4) + 0.1
ROW = x64(4) - 0.2
INT = torch.tensor([[5, -7, 3, 9], [-4, 0, 8, -1], [2, 6, -3, 1]])
BOOL = X > 0
SPECIAL = torch.tensor(
    [[math.inf, -math.inf, math.nan, 0.0], [1.5, -2.5, 0.5, -0.5], [-1.0, 3.0, 2.0, 30.0]], dtype=torch.float64
)
T3 = x64(2, 3, 4)
T4 = x64(2, 3, 4, 6)

UNARY = {
    name: getattr(torch, name)
    for name in (
        "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan tanh sigmoid erf floor ceil trunc "
        "round neg abs sign sgn reciprocal square frac relu sinh cosh asinh acosh atanh isnan isinf isfinite "
        "nan_to_num positive"
    ).split()
} | {
    name: getattr(F, name)
    for name in (
        "silu relu6 elu selu celu leaky_relu gelu softplus hardtanh logsigmoid mish hardswish hardsigmoid softsign "
        "tanhshrink softshrink hardshrink"
    ).split()
}

POINTWISE = {
    "add": lambda: (lambda a, b: a + b, X, ROW),
    "add_alpha": lambda: (lambda a, b: torch.add(a, b, alpha=2.5), X, ROW),
    "add_scalar": lambda: (lambda a: 1 + a * 2 - 3, X),
    "sub_alpha": lambda: (lambda a, b: torch.sub(a, b, alpha=2), X, Y),
    "rsub": lambda: (lambda a: 1.0 - a, X),
    "mul_int": lambda: (lambda a, b: a * b, X, INT),
    "div": lambda: (lambda a, b: a / b, X, Y),
    "div_int": lambda: (lambda a: a.double() / 4, INT),
    "div_floor": lambda: (lambda a, b: torch.div(a, b, rounding_mode="floor"), X, Y),
    "div_trunc": lambda: (lambda a, b: torch.div(a, b, rounding_mode="trunc"), X, Y),
    "int_floor": lambda: (lambda a: (a // 3, a // -2, torch.div(a, 3, rounding_mode="trunc")), INT),
    "int_trunc": lambda: (lambda a: torch.div(a, -2, rounding_mode="trunc"), INT),
    "int_mod": lambda: (lambda a: (a % 3, a % -4, torch.fmod(a, 3), torch.fmod(a, -3)), INT),
    "float_mod": lambda: (lambda a, b: (a % b, torch.fmod(a, b), a // b), X, Y),
    "int_div_tensor": lambda: (lambda a, b: a // b, INT, INT + 20),
    "pow": lambda: (lambda a: (a**2, a**3, a**4, a**-1, a**-2, a**5, a**1, a**0), X),
    "atan2": lambda: (lambda a, b: torch.atan2(a, b), X, Y),
    "pow_half": lambda: (lambda a: (a**0.5, a**-0.5, a**1.7), X.abs() + 0.1),
    "pow_tensor": lambda: (lambda a, b: (a**b, 2.0**b), X.abs(), Y),
    "pow_int": lambda: (lambda a: (a**2, a**3), INT),
    "clamp": lambda: (
        lambda a: (a.clamp(-0.5, 0.5), a.clamp(min=0), a.clamp(max=0.2), a.clamp_min(0.1), a.clamp_max(0)),
        X,
    ),
    "clamp_tensor": lambda: (lambda a, b: (torch.clamp(a, min=b), torch.clamp(a, b, b + 1)), X, ROW),
    "min_max": lambda: (
        lambda a, b: (torch.minimum(a, b), torch.maximum(a, b), torch.max(a, b), torch.fmax(a, b)),
        X,
        Y,
    ),
    "logical": lambda: (lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b), a.logical_not()), INT, BOOL),
    "bitwise_bool": lambda: (lambda a, b: (a & b, a | b, a ^ b, ~a), BOOL, Y > 0),
    "bitwise_int": lambda: (lambda a: (a & 6, a | 3, a ^ 5, ~a), INT),
    "shift": lambda: (lambda a: (a << 2, a >> 1), INT),
    "bool_arithmetic": lambda: (lambda a, b: (a + b, a * b, a.double() * 3, a + 1), BOOL, Y > 0),
    "compare": lambda: (lambda a, b: (a < b, a <= b, a > b, a >= b, a == b, a != b), X, Y),
    "compare_scalar": lambda: (lambda a: (a < 3, a >= 0.5, a == 2, a != 5), INT),
    "where": lambda: (
        lambda a, b: (torch.where(a > 0, a, b), torch.where(a > 0, a, -math.inf), torch.where(a > 0, 0.0, b)),
        X,
        Y,
    ),
    "where_literal": lambda: (lambda a: torch.where(a > 0, a, torch.tensor(-math.inf, dtype=torch.float64)), X),
    "masked_fill": lambda: (lambda a, m: (a.masked_fill(m, -math.inf), a.masked_fill(~m, 3)), X, BOOL),
    "gelu_tanh": lambda: (lambda a: F.gelu(a, approximate="tanh"), X),
    "elu_alpha": lambda: (
        lambda a: (F.elu(a, 0.5), F.leaky_relu(a, 0.2), F.softplus(a, 2.0, 1.0), F.threshold(a, 0.1, 7.0)),
        X,
    ),
    "hardtanh": lambda: (lambda a: F.hardtanh(a, -0.3, 0.4), X),
    "prelu": lambda: (lambda a, w: F.prelu(a, w), X, ROW),
    "glu": lambda: (lambda a: F.glu(a, dim=-1), X),
    "lerp": lambda: (lambda a, b: (torch.lerp(a, b, 0.3), torch.lerp(a, b, a)), X, Y),
    "addc": lambda: (lambda a, b: (torch.addcmul(a, a, b, value=2), torch.addcdiv(a, a, b, value=0.5)), X, Y),
    "logaddexp": lambda: (lambda a, b: (torch.logaddexp(a, b), torch.hypot(a, b)), X, Y),
    "logaddexp_inf": lambda: (lambda a: torch.logaddexp(a, a), SPECIAL),
    "xlogy": lambda: (lambda a, b: (torch.xlogy(a, b), torch.special.xlog1py(a, b)), X.relu(), Y.abs()),
    "casts": lambda: (
        lambda a: (a.to(torch.int32), a.bool(), a.to(torch.int64) * 2, a.bool().to(torch.float64)),
        X * 3,
    ),
    "special": lambda: (
        lambda a: (a.isnan(), a.isinf(), a.isfinite(), a.nan_to_num(), a.nan_to_num(1.0, 2.0, 3.0)),
        SPECIAL,
    ),
    "special_relu": lambda: (lambda a: (a.relu(), a.clamp(-1, 1), torch.sign(a.nan_to_num(0))), SPECIAL),
    "silu_composed": lambda: (lambda a: a * torch.sigmoid(a) + F.logsigmoid(a), X),
    "tanh_cap": lambda: (lambda a: 30.0 * torch.tanh(a / 30.0), X),
    "deg2rad": lambda: (lambda a: (torch.deg2rad(a), torch.special.expit(a), torch.logit(a.sigmoid())), X),
    "heaviside": lambda: (lambda a, b: (torch.heaviside(a, b), torch.special.entr(a.abs())), X, Y),
}

VIEWS = {
    "view": lambda: (
        lambda a: (a.view(6, 4, 6), a.view(2, 12, 6), a.reshape(-1), a.flatten(1, 2), a.view(2, 3, 2, 2, 2, 3)),
        T4,
    ),
    "view_ones": lambda: (lambda a: (a.view(1, 2, 12, 1, 6), a[:, :, None].squeeze(2), a.unsqueeze(-1).squeeze()), T4),
    "view_regroup": lambda: (lambda a: (a.view(4, 6, 6), a.view(9, 16), a.view(2, 2, 36)), T4),
    "transpose": lambda: (
        lambda a: (a.transpose(1, 2), a.permute(3, 1, 0, 2), a.mT, a.movedim(1, -1), a.swapaxes(0, 1)),
        T4,
    ),
    "t": lambda: (lambda a: (a.t(), a.T), X),
    "merge_heads": lambda: (lambda a: a.transpose(1, 2).reshape(2, 4, 18), T4),
    "split_heads": lambda: (lambda a: a.view(2, 3, 2, 2).transpose(1, 2), T3),
    "expand": lambda: (
        lambda a: (a.expand(2, 3, 4), a[:, None].expand(3, 5, 4), a.expand(3, -1), a.broadcast_to(2, 3, 4)),
        X,
    ),
    "expand_as": lambda: (lambda a, b: a.expand_as(b), ROW, X),
    "slice": lambda: (
        lambda a: (a[:, 1:3], a[1:], a[..., ::2], a[:, -2:], a[0], a[:, -1], a[..., 1:100], a.narrow(1, 1, 2)),
        X,
    ),
    "cat": lambda: (
        lambda a, b: (torch.cat([a, b, a], 0), torch.cat([a, b], -1), torch.stack([a, b], 1), torch.hstack([a, b])),
        X,
        Y,
    ),
    "cat_dtype": lambda: (lambda a, b: torch.cat([a, b], 1), X, INT),
    "split": lambda: (
        lambda a: (*a.split(2, 1), *a.chunk(2, -1), *a.split([1, 2], 0), *a.unbind(0), *a.tensor_split(2, 1)),
        X,
    ),
    "rotate_half": lambda: (lambda a: torch.cat([-a[..., 2:], a[..., :2]], -1), X),
    "pad": lambda: (lambda a: (F.pad(a, (1, 2)), F.pad(a, (0, 1, 2, 0), value=-1.0), F.pad(a, (-1, 1))), X),
    "flip": lambda: (lambda a: (a.flip(0), a.flip(0, -1), a.roll(1, 1), a.roll((2, -1), (0, 1)), a.roll(3)), X),
    "repeat": lambda: (
        lambda a: (a.repeat(2, 1), a.repeat(2, 1, 3), a.repeat_interleave(2, 0), a.repeat_interleave(3, dim=-1)),
        X,
    ),
    "repeat_flat": lambda: (lambda a: (a.repeat_interleave(2), a.tile(2)), X),
    "unfold": lambda: (lambda a: (a.unfold(1, 2, 1), a.unfold(0, 2, 1)), X),
    "diagonal": lambda: (lambda a: (a.diagonal(), a.diagonal(1), a.diagonal(-1), torch.diag(a)), X),
    "diagonal3": lambda: (lambda a: a.diagonal(1, 0, 2), T3),
    "diagonal_scatter": lambda: (
        lambda a, row: tuple(torch.diagonal_scatter(a, row[: a.diagonal(n).numel()], n) for n in (0, 1, -1)),
        X,
        x64(8),
    ),
    "convolution1": lambda: (
        lambda x, w, b: (F.conv2d(x, w, b), F.conv1d(x[..., 0], w[..., 0])),
        x64(2, 3, 4, 5),
        x64(6, 3, 1, 1),
        x64(6),
    ),
    "convolution_of_groups": lambda: (
        lambda x, w, b: (F.conv2d(x, w, b, groups=2), F.conv2d(x, w[:4, :1], groups=4)),
        x64(2, 4, 3, 5),
        x64(6, 2, 1, 1),
        x64(6),
    ),
    "diag_embed": lambda: (lambda a: torch.diag_embed(a), X),
    "clone": lambda: (lambda a: a.clone().detach().contiguous(), X),
    "assign": lambda: (_assign, X, ROW),
    "relative_shift": lambda: (_relative_shift, x64(2, 4, 7)),
    "block_reduce": lambda: (lambda a: a.view(2, 3, 2, 2).sum(-1), T3),
    "meshgrid": lambda: (lambda a, b: torch.meshgrid(a, b, indexing="ij"), ROW, X[:, 0]),
    "outer": lambda: (lambda a, b: torch.outer(a, b), ROW, X[:, 0]),
    "scalar": lambda: (lambda a: a.sum().reshape(1, 1) + a.mean().view(()), X),
}


def _assign(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(a)
    out[:, 1:3] = a[:, :2]
    out[0] = b
    out[:, ::2] += 1
    out.mul_(2)
    return out


def _relative_shift(a: torch.Tensor) -> torch.Tensor:
    h, n, m = a.shape
    return F.pad(a, (0, 1)).flatten(1)[:, : n * m].view(h, n, m)


INDEXING = {
    "arange": lambda: (lambda a: a + torch.arange(4), X),
    "arange_step": lambda: (lambda a: (torch.arange(1, 9, 2), torch.arange(0.0, 1.0, 0.25, dtype=torch.float64)), X),
    "arange_down": lambda: (lambda a: (torch.arange(4, 0, -1), torch.linspace(0, 1, 5, dtype=torch.float64)), X),
    "causal": lambda: (lambda a: a.masked_fill(torch.arange(3)[:, None] < torch.arange(4)[None], -math.inf), X),
    "tril": lambda: (lambda a: (a.tril(), a.triu(1), a.tril(-1), torch.ones(3, 4, dtype=torch.bool).tril()), X),
    "fills": lambda: (
        lambda a: (torch.full((2,), 3.5), torch.zeros(2), torch.ones_like(a), a.new_full((3,), 2.0), torch.eye(3)),
        X,
    ),
    "full_like": lambda: (
        lambda a: (torch.full_like(a, -math.inf), torch.zeros(2, dtype=torch.bool), a.new_ones(2)),
        X,
    ),
    "index": lambda: (lambda a, i: (a[i], a[:, i], a[i, i], a[i[:, None], i]), X, torch.tensor([2, 0, -1])),
    "index_none": lambda: (
        lambda a, i: (a[:, i], a[:, :, i], a[i, :, i], a[:, i, i[:, None]]),
        T4,
        torch.tensor([1, 0, -2]),
    ),
    "gather": lambda: (lambda a, i: a.gather(1, i), X, torch.tensor([[0, 3], [1, 1], [2, 0]])),
    "take_along": lambda: (lambda a, i: torch.take_along_dim(a, i, 1), X, torch.tensor([[0, 3], [1, 1], [2, 0]])),
    "index_select": lambda: (lambda a, i: a.index_select(-1, i), X, torch.tensor([3, 1])),
    "embedding": lambda: (lambda w, i: F.embedding(i, w), X, torch.tensor([[2, 1], [0, 0]])),
    "bias_table": lambda: (lambda w: w[(torch.arange(4)[:, None] - torch.arange(4)[None]).clamp(-1, 1) + 1], X),
    "doc_mask": lambda: (
        lambda a, d: torch.where(d[:, None] == d[None], a, 0.0),
        x64(4, 4),
        torch.tensor([0, 0, 1, 1]),
    ),
    "one_hot": lambda: (lambda i: (i[:, None] == torch.arange(5)).long(), torch.tensor([3, 1])),
    "put": lambda: (
        lambda a, b: (
            a.index_copy(1, torch.arange(0, 4, 2), b[:, :2]),
            a.index_add(0, 2 - torch.arange(3), b),
            a.index_fill(1, torch.arange(-2, 0), 7.0),
            a.index_put((torch.arange(3), torch.arange(3) + 1), b[:, 0], accumulate=True),
            a.index_put((torch.arange(2)[:, None] * 2, 3 - torch.arange(3)), b[:2, :3]),
            a.index_put((a > 0.5,), torch.tensor(0.0, dtype=a.dtype)),
        ),
        X,
        x64(3, 4),
    ),
    "windows": lambda: (
        lambda a, b: (
            torch.ops.aten.unfold_backward(a, [3, 5], 1, 2, 1),
            torch.ops.aten.unfold_backward(b, [2, 9], 1, 3, 2),
            torch.ops.aten.unfold_backward(b, [2, 16], -1, 3, 4),
        ),
        x64(3, 4, 2),
        x64(2, 4, 3),
    ),
    "put_apart": lambda: (_put_apart, x64(2, 3, 4), x64(2, 3)),
    "scatter": lambda: (
        lambda a, b: (
            a.scatter(1, (3 - torch.arange(2)).expand(3, 2), b[:, :2].contiguous()),
            a.scatter_add(1, (torch.arange(3)[:, None] + torch.arange(2)).clone(), b[:, :2].contiguous()),
            a.scatter_add(0, (2 - torch.arange(3)[:, None]).repeat(1, 4), b),
        ),
        X,
        x64(3, 4),
    ),
    "scatter_one": lambda: (
        lambda a, i: (a.scatter(1, i, 2.0), a.scatter(1, i, a[:, :1]), a.scatter_add(1, i, a[:, :1])),
        X,
        torch.tensor([[3], [0], [2]]),
    ),
    "one_number_anywhere": lambda: (
        lambda a, i: (
            a.index_fill(1, i, 7.0),
            a.index_put((i, i.flip(0)), torch.tensor(0.0, dtype=a.dtype)),
            torch.ops.aten.index_put(a, (None, i), a[:, :1]),
            a.scatter(1, i.expand(3, 3), 2.0),
        ),
        X,
        torch.tensor([2, 0, 2]),
    ),
    "added_to_one": lambda: (
        lambda a, i: (
            a.index_put((i,), a[:2], accumulate=True),
            a.index_put(((torch.arange(5)[:, None] - torch.arange(5)).clamp(-1, 1),), a[0], accumulate=True),
            a.scatter_add(1, i.expand(3, 2), a[:, :2]),
            a.index_put((torch.arange(-1, 2), i[:1]), a[:, 0], accumulate=True),
        ),
        X,
        torch.tensor([1, 1]),
    ),
}


def _put_apart(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    i, first, second = torch.arange(2), a.clone(), a.clone()
    first[i, :, i * 2] = b
    second[:, 2 - i[:, None], i] += b[:, :2, None]
    return first, second


PUT_ANYWHERE = {
    "data": lambda a, i: a.index_put((i,), a[:2]),
    "to a long table": lambda a, i: (
        a[0].repeat(40).index_put((torch.arange(8)[:, None] * torch.arange(8),), a[0, 0], accumulate=True)
    ),
    "two masks": lambda a, i: a.index_put((a[:, 0] > 0, a[0] > 0), a[0, 0]),
    "values under a mask": lambda a, i: a.index_put((a > 0,), a.flatten()),
    "around zero": lambda a, i: a.index_put((torch.arange(-1, 2),), a),
    "quotients": lambda a, i: a.index_put((torch.arange(8) // 2, torch.arange(8) % 2), a[:, 0]),
    "a part": lambda a, i: a.scatter(1, torch.arange(2)[None], a[:1, :2]),
    "many of each row": lambda a, i: a.repeat(1, 40).scatter(1, (a.repeat(1, 40) > 0).long().cumsum(1), 1.0),
}


@pytest.mark.parametrize("name", PUT_ANYWHERE)
def test_writes_whose_source_is_not_known_stay_with_pytorch(name: str) -> None:
    a = x64(8, 4)[: 3 if name == "around zero" else 8]
    program = program_of(PUT_ANYWHERE[name], a, torch.tensor([1, 1]))
    (last,) = program.outputs
    assert program.by_name[last].expr is None
    assert program.by_name[last].why


REDUCTIONS = {
    "sum": lambda: (
        lambda a: (a.sum(), a.sum(-1), a.sum((0, 2)), a.sum(1, keepdim=True), a.mean((0, 1), keepdim=True)),
        T3,
    ),
    "sum_bool": lambda: (
        lambda m, i: (m.sum(), m.sum(1), i.sum(0), m.sum(0, dtype=torch.float64), i.double().mean()),
        BOOL,
        INT,
    ),
    "extrema": lambda: (
        lambda a: (a.amax(-1), a.amin((0, 1)), a.max(), a.min(), a.max(1).values, a.min(-1, keepdim=True)[0]),
        T3,
    ),
    "prod": lambda: (lambda a: (a.prod(), a.prod(1), a.prod(0, keepdim=True)), T3),
    "truth": lambda: (
        lambda m, i: (m.any(), m.all(1), i.any(0), i.all(), m.any(-1, keepdim=True), m.amax(0)),
        BOOL,
        INT,
    ),
    "logsumexp": lambda: (lambda a: (a.logsumexp(-1), a.logsumexp((0, 1), keepdim=True)), T3),
    "logsumexp_inf": lambda: (lambda a: a[:2].logsumexp(0), SPECIAL),
    "var": lambda: (
        lambda a: (a.var(), a.var(-1), a.std(1, correction=0), a.std(0, unbiased=False, keepdim=True), a.var(False)),
        T3,
    ),
    "var_mean": lambda: (lambda a: (*torch.var_mean(a, -1), *torch.std_mean(a, (0, 1), keepdim=True)), T3),
    "norm": lambda: (
        lambda a: (a.norm(), a.norm(dim=-1), a.norm(1, dim=1), F.normalize(a, dim=-1), a.norm(3, -1), a.norm(0, -1)),
        T3,
    ),
    "norm_inf": lambda: (lambda a: torch.linalg.vector_norm(a, math.inf, dim=-1), T3),
    "softmax": lambda: (lambda a: (a.softmax(-1), a.softmax(0), a.log_softmax(1), F.softmin(a, -1)), T3),
    "softmax_masked": lambda: (
        lambda a, m: a.masked_fill(m, -math.inf).softmax(-1),
        X,
        torch.tensor([True, False, True, True]),
    ),
    "softmax_empty_row": lambda: (lambda a: torch.full_like(a, -math.inf).softmax(-1), X),
    "safe_softmax": lambda: (lambda a: torch._safe_softmax(torch.where(a > 0.9, a, -math.inf), -1), X),
    "layer_norm": lambda: (
        lambda a, w: (F.layer_norm(a, (4,)), F.layer_norm(a, (4,), w, w), F.layer_norm(a, (3, 4), eps=0.1)),
        T3,
        ROW,
    ),
    "rms_norm": lambda: (lambda a, w: F.rms_norm(a, (4,), w, 1e-6), T3, ROW),
    "group_norm": lambda: (lambda a: F.group_norm(a, 2, eps=0.1), x64(2, 4, 3)),
    "matmul": lambda: (lambda a, b: (a @ b.t(), a @ b[0], b[1] @ a.t(), a[0] @ b[0]), X, Y),
    "bmm": lambda: (lambda a, b: (a @ b.mT, torch.bmm(a, b.transpose(1, 2))), T3, T3 + 1),
    "matmul4": lambda: (lambda a: a @ a.transpose(-1, -2), T4),
    "addmm": lambda: (lambda a, b: (F.linear(a, b, a[:, 0]), torch.addmm(a[:, :3], a, b.t(), beta=0.5, alpha=2)), X, Y),
    "baddbmm": lambda: (
        lambda a: (torch.baddbmm(a[:, :, :3], a, a.mT, beta=0), torch.baddbmm(a[:, :, :3], a, a.mT, alpha=3)),
        T3,
    ),
    "addmv": lambda: (lambda a, b: torch.addmv(a[:, 0], a, b), X, ROW),
    "linear3": lambda: (lambda a, w: F.linear(a, w), T3, X),
    "einsum": lambda: (
        lambda a: (torch.einsum("bhqd,bhkd->bhqk", a, a), torch.einsum("bhqd,bqhe->de", a, a.transpose(1, 2))),
        T4,
    ),
    "cdist": lambda: (
        lambda a: (torch.cdist(a, a + 1, compute_mode="donot_use_mm_for_euclid_dist"), torch.cdist(a, a, p=1)),
        T3,
    ),
    "cosine": lambda: (lambda a: F.cosine_similarity(a[:, :, None], a[:, None], dim=-1), T3),
    "attention": lambda: (lambda q: (q @ q.transpose(-1, -2) * 0.3).softmax(-1) @ q, T4),
    "sdpa": lambda: (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), T4),
    "sdpa_mask": lambda: (lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), T4, x64(4, 4) > 0),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    check(UNARY[name], X.abs() + 0.3 if name in ("sqrt", "rsqrt", "log", "log2", "log10") else X)


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    check(*POINTWISE[name]())


@pytest.mark.parametrize("name", VIEWS)
def test_view(name: str) -> None:
    check(*VIEWS[name]())


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str) -> None:
    check(*INDEXING[name]())


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str) -> None:
    check(*REDUCTIONS[name]())


def _text(f: Callable, *args: torch.Tensor) -> str:
    program = program_of(f, *args)
    expr = program.by_name[program.outputs[0]].expr
    assert expr is not None
    return expr_text(expr)


def test_views_that_match_dimensions_need_no_division() -> None:
    assert _text(lambda a: a.view(2, 3, 2, 2, 6), T4) == "arg0_1[a0, a1, a2 * 2 + a3, a4]"
    assert _text(lambda a: a.view(6, 4, 6), T4) == "arg0_1[a0 // 3, a0 % 3, a1, a2]"
    assert _text(lambda a: a.unsqueeze(1), X) == "arg0_1[a0, a2]"


def test_sums_keep_the_type_their_products_may_be_taken_in() -> None:
    """That of what PyTorch rounded; the exponentials inside of a softmax are not."""
    h = X.to(torch.bfloat16)
    dtypes = []
    for f in (lambda a: a @ a.t(), lambda a: a.sum(-1), lambda a: a.softmax(-1)):
        program = program_of(f, h)
        expr = program.by_name[program.outputs[0]].expr
        assert expr is not None and program.by_name[program.outputs[0]].dtype == "bf16"
        dtypes.append([r.dtype for r in reductions(expr) if isinstance(r, Reduce)])
    assert dtypes == [["bf16"], ["bf16"], ["f32", "f32"]]


def test_dead_reads_vanish() -> None:
    program = program_of(lambda a: torch.zeros_like(a) + 1, X)
    assert all(v.reads != ("arg0_1",) for v in program.values)


def test_projection_is_marked() -> None:
    program = program_of(lambda a, w, b: F.linear(a, w, b) @ w, X, x64(5, 4), x64(5))
    assert [v.op for v in program.values if v.projection] == ["aten.addmm.default"]


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda a: a.cumsum(-1) + 1, "a scan"),
        (lambda a: a.sort(-1).values * 2, "sorting"),
        (lambda a: a.topk(2, -1)[0] * 2, "sorting"),
        (lambda a: a.argmax() + 1, "a position in several dimensions"),
        (lambda a: torch.randn_like(a) + a, "random numbers"),
        (lambda a: a.median(-1).indices + 1, "sorting"),
        (lambda a: torch.linalg.qr(a)[0] + 1, "no rule for aten.linalg_qr.default"),
        (lambda a: torch.view_as_real(torch.complex(a, a)) + 1, "element type torch.complex128"),
        (lambda a: a[:, :0].sum(-1), "empty tensor"),
    ],
)
def test_refusals_give_a_reason(f: Callable, why: str) -> None:
    program = program_of(f, X)
    refused = [v for v in program.values if v.expr is None and v.op != "input"]
    assert why in [v.why for v in refused], [(v.op, v.why) for v in refused]
    assert all(v.why and v.op for v in refused)
    if "complex" not in why and "empty" not in why:
        last = program.by_name[program.outputs[0]]
        assert last.expr is not None, "what follows is still computed"


def test_an_empty_piece_of_a_concatenation_vanishes() -> None:
    assert _text(lambda a: torch.cat([a[:, :0], a], 1), X) == "arg0_1[a0, a1]"


def test_attention_multiplies_in_the_type_of_its_inputs() -> None:
    graph = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q))
    program = translate(to_aten(graph, [T4.to(torch.bfloat16)]))
    exprs = [v.expr for v in program.values if v.expr is not None]
    sums = [r.dtype for e in exprs for r in reductions(e) if r.kind == "sum"]
    assert sums == ["bf16", "f32", "bf16"]


def test_extern_tuple_results_read_what_the_tuple_reads() -> None:
    program = program_of(lambda a: a.sort(-1), X)
    assert [program.by_name[name].reads for name in program.outputs] == [("arg0_1",), ("arg0_1",)]
    assert [program.by_name[name].op for name in program.outputs] == ["aten.sort.default"] * 2


def test_dynamic_shapes_are_refused() -> None:
    gm = make_fx(lambda a: a * 2, tracing_mode="symbolic")(X)
    with pytest.raises(Unsupported, match="not static"):
        translate(gm)


def test_mutations_are_refused() -> None:
    gm = make_fx(lambda a: a.clone().add_(1), tracing_mode="fake")(X)
    with pytest.raises(Unsupported, match="aten.add_.Tensor: it writes to its argument"):
        translate(gm)


def test_writes_to_inputs_are_refused() -> None:
    with pytest.raises(Unsupported, match="aten.copy_.default"):
        translate(trace(lambda a: a.add_(1) * 2, X))


def test_source_location_is_the_users_frame() -> None:
    gm = trace(lambda a: a.exp(), X)
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = (
            '  File "/lib/outer.py", line 3, in call\n    return f(x)\n'
            '  File "/home/me/model.py", line 12, in forward\n    p = s.exp()\n'
        )
    value = next(v for v in translate(gm).values if v.expr is not None)
    assert value.where is not None
    assert str(value.where) == "/home/me/model.py:12 `p = s.exp()`"


def test_tensors_on_a_cpu_beside_a_gpus() -> None:
    """Kernels read nothing that is on a CPU; what is made of numbers alone is made where it is read."""

    def moved(q, k, table):
        at = torch.arange(6, dtype=torch.float32)
        near = torch.exp2(-(at[:, None] - at).abs()).to(q.device)
        twice = (table * 2).to(q.device)
        return ((q @ k.mT + near) * twice).softmax(-1), q.sum(-1).cpu() + 1

    with FakeTensorMode():
        q, k = (torch.empty(2, 6, 4, device="cuda") for _ in range(2))
        gm = make_fx(moved, tracing_mode="fake")(q, k, torch.empty(6, 6))
    program = translate(gm)
    externs = {v.name: v.why for v in program.values if v.expr is None and v.op != "input"}
    assert set(externs.values()) == {"it reads a tensor on cpu", "it reads a tensor on cuda:0"}
    assert [program.by_name[n].op for n in externs] == [
        "aten.mul.Tensor",
        *["aten._to_copy.default"] * 2,
        "aten.add.Tensor",
    ]
    scores = program.by_name[program.outputs[0]]
    assert scores.expr is not None and program.by_name[program.outputs[1]].name in externs
