"""Reductions, and what is made of them: matrix products, softmax, moments, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import InputError, Unsupported
from ..schedule import build
from ..schedule.dtype import is_float
from ..schedule.expr import Expr, index
from .pointwise import Arith
from .tensor import At, Indices, Number, Operand, Spec, Tensor, constant, element, fresh_axis, normal_dims

aten = torch.ops.aten
Dims = int | Sequence[int] | None


def accumulator(dtype: str) -> str:
    """The type PyTorch keeps sums and row statistics of `dtype` in."""
    return "f32" if dtype in ("bf16", "f16") else dtype


def _reduce(kind: str, x: Tensor, dim: Dims, keepdim: bool, dtype: str) -> At:
    """`x` reduced over `dim`, at indices of the result; the innermost reduction is over the last dimension."""
    dims = normal_dims(dim, len(x.shape))

    def at(idx: Indices) -> Expr:
        axes = {d: fresh_axis(x.shape[d]) for d in dims}
        kept = iter(i for d, i in enumerate(idx) if d not in axes) if keepdim else iter(idx)
        e = x.at(tuple(index(axes[d]) if d in axes else next(kept) for d in range(len(x.shape))))
        return build.reduce_over(kind, [axes[d] for d in dims], e, dtype)

    return at


def _map(formula: Callable[..., Expr], dtype: str, x: Tensor, *others: At) -> Tensor:
    """formula(arith, x, *others) at every index of `x`, computed in `dtype`."""
    f = Arith(dtype)
    return Tensor(x.shape, dtype, lambda idx: formula(f, build.cast(x.at(idx), dtype), *(o(idx) for o in others)))


def _cast(x: Tensor, dtype: str) -> Tensor:
    return _map(lambda f, e: e, dtype, x)


def _sum(out: Spec, x: Tensor, dim: Dims = None, keepdim: bool = False, **_: Any) -> At:
    dtype = accumulator(out.dtype)
    # What PyTorch rounded before it summed may be multiplied in that type, should it be a product of matrices.
    return _reduce("sum", _cast(x, dtype), dim, keepdim, x.dtype if is_float(x.dtype) else dtype)


def _prod(out: Spec, x: Tensor, dim: Dims = None, keepdim: bool = False, **_: Any) -> At:
    dtype = accumulator(out.dtype)
    return _reduce("prod", _cast(x, dtype), dim, keepdim, dtype)


def _extremum(kind: str) -> Callable[..., At]:
    def rule(out: Spec, x: Tensor, dim: Dims = None, keepdim: bool = False) -> At:
        bool_kind = {"max": "any", "min": "all"}[kind]
        return _reduce(bool_kind if x.dtype == "bool" else kind, x, dim, keepdim, x.dtype)

    return rule


def _extremum_dim(kind: str) -> Callable[..., tuple[At, At]]:
    """The values, and their positions."""
    return lambda outs, x, dim, keepdim=False: (
        _extremum(kind)(outs[0], x, dim, keepdim),
        _position(kind)(outs[1], x, dim, keepdim),
    )


def _position(kind: str) -> Callable[..., At]:
    """The first index of the extremum, or of NaN."""

    def rule(out: Spec, x: Tensor, dim: int | None = None, keepdim: bool = False) -> At:
        if dim is None and len(x.shape) > 1:
            raise Unsupported(f"aten.arg{kind}", "a position in several dimensions")
        dims = normal_dims(dim, len(x.shape))
        if not dims:
            return lambda idx: constant(0, "i64")
        (d,) = dims
        x = x if x.dtype != "bool" else _cast(x, "u8")
        extremum = _at_row(_reduce(kind, x, d, True, x.dtype), x, d)

        def place(idx: Indices) -> Expr:
            e = x.at(idx)
            here = build.op("eq", e, extremum(idx), dtype="bool")
            if is_float(x.dtype):
                here = build.op("or", here, build.op("isnan", e, dtype="bool"), dtype="bool")
            return build.select(here, idx[d], constant(x.shape[d] - 1, "i64"))

        return _reduce("min", Tensor(x.shape, "i64", place), d, keepdim, "i64")

    return rule


def _truth(kind: str) -> Callable[..., At]:
    def rule(out: Spec, x: Tensor, dim: Dims = None, keepdim: bool = False) -> At:
        at = _reduce(kind, _cast(x, "bool"), dim, keepdim, "bool")
        return lambda idx: build.cast(at(idx), out.dtype)

    return rule


def _moments(x: Tensor, dim: Dims, correction: Number | None, keepdim: bool, dtype: str) -> tuple[At, At]:
    """Variance, divided by the count less `correction` (None: 1), and mean over `dim`."""
    count = math.prod(x.shape[d] for d in normal_dims(dim, len(x.shape)))
    divisor = max(0, count - (1 if correction is None else correction))
    f, x = Arith(dtype), _cast(x, dtype)

    def mean(keep: bool) -> At:
        total = _reduce("sum", x, dim, keep, dtype)
        return lambda idx: f("div", total(idx), count)

    center = _at_row(mean(True), x, dim)
    square = _map(lambda f, e, c: f("mul", f("sub", e, c), f("sub", e, c)), dtype, x, center)
    total = _reduce("sum", square, dim, keepdim, dtype)
    return lambda idx: f("div", total(idx), divisor), mean(keepdim)


def _at_row(statistic: At, x: Tensor, dim: Dims) -> At:
    """A statistic kept as extent-1 dimensions, at full indices of `x`."""
    dims = normal_dims(dim, len(x.shape))
    zero = index(fresh_axis(1))
    return lambda idx: statistic(tuple(zero if d in dims else i for d, i in enumerate(idx)))


def _mean(out: Spec, x: Tensor, dim: Dims = None, keepdim: bool = False, **_: Any) -> At:
    return _moments(x, dim, 0, keepdim, accumulator(out.dtype))[1]


def _spread(root: bool, with_mean: bool) -> Callable[..., Any]:
    """var, std, var_mean and std_mean; the old overloads say `unbiased` where the new say `correction`."""

    def rule(
        out: Any,
        x: Tensor,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        correction: Number | None = None,
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        dtype = accumulator(x.dtype)
        var, mean = _moments(x, dim, correction if correction is not None else int(unbiased), keepdim, dtype)
        spread: At = (lambda idx: build.op("sqrt", var(idx), dtype=dtype)) if root else var
        return (spread, mean) if with_mean else spread

    return rule


def _exponentials(x: Tensor, dim: Dims, dtype: str) -> tuple[Tensor, At, At]:
    """x less its maximum over `dim`, and at full indices of x that maximum and the sum of exponentials."""
    top = _at_row(_reduce("max", x, dim, True, dtype), x, dim)
    shifted = _map(lambda f, e, m: f("sub", e, m), dtype, x, top)
    powers = _map(lambda f, e: f("exp", e), dtype, shifted)
    return shifted, top, _at_row(_reduce("sum", powers, dim, True, dtype), x, dim)


def _softmax(out: Spec, x: Tensor, dim: int, *_: Any) -> At:
    dtype = accumulator(out.dtype)
    shifted, _top, total = _exponentials(_cast(x, dtype), (dim,), dtype)
    return _map(lambda f, e, s: f("div", f("exp", e), s), dtype, shifted, total).at


def _safe_softmax(out: Spec, x: Tensor, dim: int, dtype: Any = None) -> At:
    """Softmax whose rows of all −inf are 0."""
    acc = accumulator(out.dtype)
    shifted, top, total = _exponentials(_cast(x, acc), (dim,), acc)

    def formula(f: Arith, e: Expr, m: Expr, s: Expr) -> Expr:
        return f.where(f("eq", m, -math.inf), 0, f("div", f("exp", e), s))

    return _map(formula, acc, shifted, top, total).at


def _log_softmax(out: Spec, x: Tensor, dim: int, *_: Any) -> At:
    dtype = accumulator(out.dtype)
    shifted, _top, total = _exponentials(_cast(x, dtype), (dim,), dtype)
    return _map(lambda f, e, s: f("sub", e, f("log", s)), dtype, shifted, total).at


def _logsumexp(out: Spec, x: Tensor, dim: Dims, keepdim: bool = False) -> At:
    """PyTorch's: an infinite maximum is not subtracted."""
    dtype = accumulator(out.dtype)
    f, x = Arith(dtype), _cast(x, dtype)

    def finite_top(keep: bool) -> At:
        top = _reduce("max", x, dim, keep, dtype)
        return lambda idx: f.where(f("isinf", top(idx)), 0, top(idx))

    powers = _map(lambda f, e, m: f("exp", f("sub", e, m)), dtype, x, _at_row(finite_top(True), x, dim))
    total = _reduce("sum", powers, dim, keepdim, dtype)
    return lambda idx: f("add", f("log", total(idx)), finite_top(keepdim)(idx))


def _norm(out: Spec, x: Tensor, ord: Number | None = 2, dim: Dims = None, keepdim: bool = False, **_: Any) -> At:
    """(Σ |x|^ord)^(1/ord), with its limits at 0 and ±∞."""
    dtype = accumulator(out.dtype)
    p = 2 if ord is None else ord
    if p == 2:
        at = _reduce("sum", _map(lambda f, e: f("mul", e, e), dtype, x), dim, keepdim, dtype)
        return lambda idx: build.op("sqrt", at(idx), dtype=dtype)
    if p == 0:
        nonzero = _map(lambda f, e: f.where(f("ne", e, 0), 1, 0), dtype, x)
        return _reduce("sum", nonzero, dim, keepdim, dtype)
    size = _map(lambda f, e: f("abs", e), dtype, x)
    if abs(p) == math.inf:
        return _reduce("max" if p > 0 else "min", size, dim, keepdim, dtype)
    if p == 1:
        return _reduce("sum", size, dim, keepdim, dtype)
    f = Arith(dtype)
    at = _reduce("sum", _map(lambda f, e: f("pow", e, p), dtype, size), dim, keepdim, dtype)
    return lambda idx: f("pow", at(idx), 1 / p)


def _layer_norm(
    outs: tuple[Spec, ...], x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[At, At, At]:
    dims = range(len(x.shape) - len(shape), len(x.shape))
    dtype = accumulator(x.dtype)
    f = Arith(dtype)
    var, mean = _moments(x, list(dims), 0, True, dtype)

    def scale(idx: Indices) -> Expr:
        return f("rsqrt", f("add", var(idx), eps))

    def at(idx: Indices) -> Expr:
        row = (_at_row(statistic, x, list(dims))(idx) for statistic in (mean, scale))
        e = f("mul", f("sub", element(x, idx, dtype), next(row)), next(row))
        e = e if weight is None else f("mul", e, element(weight, idx, dtype))
        return e if bias is None else f("add", e, element(bias, idx, dtype))

    return at, mean, scale


def contraction(
    dtype: str, extent: int, left: Callable[[Indices, Expr], Expr], right: Callable[[Indices, Expr], Expr]
) -> At:
    """Sum over k of left(idx, k) · right(idx, k): a matrix product in `dtype`."""

    def at(idx: Indices) -> Expr:
        axis = fresh_axis(extent)
        k = index(axis)
        factors = (build.cast(side(idx, k), dtype) for side in (left, right))
        return build.reduce("sum", axis, build.op("mul", *factors, dtype=dtype), dtype)

    return at


def _matmul(out: Spec, a: Tensor, b: Tensor) -> At:
    """a [..., m, k] · b [..., k, n].

    Raises: InputError where PyTorch's kernels would; its tracing lets mixed types pass.
    """
    if a.dtype != b.dtype:
        raise InputError(f"a matrix product of {a.dtype} and {b.dtype}: expected both to have the same dtype")
    return contraction(
        out.dtype, a.shape[-1], lambda idx, k: a.at((*idx[:-1], k)), lambda idx, k: b.at((*idx[:-2], k, idx[-1]))
    )


def _matvec(out: Spec, a: Tensor, b: Tensor) -> At:
    """a [m, k] · b [k], or the dot product of a [k] and b [k]."""
    return contraction(out.dtype, a.shape[-1], lambda idx, k: a.at((*idx, k)), lambda idx, k: b.at((k,)))


def _linear(out: Spec, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> At:
    product = contraction(
        out.dtype, x.shape[-1], lambda idx, k: x.at((*idx[:-1], k)), lambda idx, k: weight.at((idx[-1], k))
    )
    return product if bias is None else _plus(out, bias, product, 1, 1)


def _plus(out: Spec, bias: Operand, product: At, beta: Number, alpha: Number) -> At:
    f = Arith(out.dtype)

    def at(idx: Indices) -> Expr:
        scaled = f("mul", product(idx), alpha)
        # PyTorch ignores the bias, NaN included, when beta is 0.
        return scaled if beta == 0 else f("add", f("mul", element(bias, idx, out.dtype), beta), scaled)

    return at


def _add_product(product: Callable[..., At]) -> Callable[..., At]:
    """beta · bias + alpha · (a · b)."""
    return lambda out, bias, a, b, *, beta=1, alpha=1: _plus(out, bias, product(out, a, b), beta, alpha)


def _distance(out: Spec, a: Tensor, b: Tensor, p: Number, mode: int | None) -> At:
    """‖a[..., i, :] − b[..., j, :]‖ₚ."""

    def difference(idx: Indices) -> Expr:
        left, right = (*idx[:-2], idx[-1]), (*idx[:-3], *idx[-2:])
        return build.op("sub", element(a, left, out.dtype), element(b, right, out.dtype), dtype=out.dtype)

    return _norm(out, Tensor((*out.shape, a.shape[-1]), out.dtype, difference), p, (-1,))


PROJECTIONS = frozenset((aten.addmm.default, aten.linear.default, aten.convolution.default))

RULES: dict[Any, Callable[..., Any]] = {
    aten.sum: _sum,
    aten.mean: _mean,
    aten.prod: _prod,
    aten.any: _truth("any"),
    aten.all: _truth("all"),
    **dict.fromkeys((aten.amax, aten.max.default), _extremum("max")),
    **dict.fromkeys((aten.amin, aten.min.default), _extremum("min")),
    aten.argmax: _position("max"),
    aten.argmin: _position("min"),
    aten.max.dim: _extremum_dim("max"),
    aten.min.dim: _extremum_dim("min"),
    aten.var: _spread(root=False, with_mean=False),
    aten.std: _spread(root=True, with_mean=False),
    aten.var_mean: _spread(root=False, with_mean=True),
    aten.std_mean: _spread(root=True, with_mean=True),
    aten.logsumexp: _logsumexp,
    aten._softmax: _softmax,
    aten._safe_softmax: _safe_softmax,
    aten._log_softmax: _log_softmax,
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten._cdist_forward: _distance,
    aten.native_layer_norm: _layer_norm,
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.matmul), _matmul),
    **dict.fromkeys((aten.mv, aten.dot), _matvec),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _add_product(_matmul)),
    aten.addmv: _add_product(_matvec),
    aten.linear: _linear,
}
