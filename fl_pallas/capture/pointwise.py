"""Pointwise ATen operations as expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..schedule import build
from ..schedule.dtype import is_float, is_int
from ..schedule.expr import Expr
from ..schedule.integer import NARROW
from .dtypes import torch_dtype
from .tensor import At, Indices, Number, Spec, Tensor, common_dtype, constant, element

aten, prims = torch.ops.aten, torch.ops.prims
_TESTS = (*build.COMPARISONS, "isnan", "isinf")
# The largest whole power that is taken by multiplications: others take 80 instructions an element.
WHOLE = 8


class Arith:
    """Makes operations of one type; plain numbers among their arguments become constants."""

    def __init__(self, dtype: str):
        self.dtype = dtype

    def __call__(self, name: str, *args: Expr | Number) -> Expr:
        return build.op(name, *map(self.lift, args), dtype="bool" if name in _TESTS else self.dtype)

    def where(self, condition: Expr, then: Expr | Number, other: Expr | Number) -> Expr:
        return build.select(condition, self.lift(then), self.lift(other))

    def lift(self, x: Expr | Number) -> Expr:
        return constant(x, self.dtype) if isinstance(x, (bool, int, float)) else x


Formula = Callable[..., Expr]


def _elements(args: Any, idx: Indices, dtype: str) -> list[Any]:
    return [element(a, idx, dtype) if isinstance(a, Tensor) else a for a in args]


def _apply(formula: Formula, dtype: str, out: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> At:
    def at(idx: Indices) -> Expr:
        named = dict(zip(kwargs, _elements(kwargs.values(), idx, dtype)))
        e = formula(Arith(dtype), *_elements(args, idx, dtype), **named)
        return build.cast(build.wrapped(e, dtype) if dtype in NARROW else e, out.dtype)

    return at


def arithmetic(formula: Formula) -> Callable[..., At]:
    """A rule computing in the result's type: formula(arith, *args, **kwargs) gets tensors as expressions."""
    return lambda out, *args, **kwargs: _apply(formula, out.dtype, out, args, kwargs)


def _test(formula: Formula) -> Callable[..., At]:
    """A rule with a bool result that computes in the common type of its arguments."""
    return lambda out, a, *b: _apply(formula, common_dtype(a, b[0] if b else a), out, (a, *b), {})


def _logical(formula: Formula) -> Callable[..., At]:
    """A rule that takes its arguments as bools."""
    return lambda out, *args: _apply(formula, "bool", out, args, {})


def _op(name: str) -> Formula:
    return lambda f, *args: f(name, *args)


def _in_bool(name: str, bool_name: str) -> Formula:
    return lambda f, a, b: f(bool_name if f.dtype == "bool" else name, a, b)


def _add(f: Arith, a: Any, b: Any, alpha: Number = 1) -> Expr:
    return f("or", a, b) if f.dtype == "bool" else f("add", a, f("mul", b, alpha))


def _sub(f: Arith, a: Any, b: Any, alpha: Number = 1) -> Expr:
    return f("sub", a, f("mul", b, alpha))


def _truncated(f: Arith, a: Any, b: Any) -> Expr:
    if is_float(f.dtype):
        return f("trunc", f("div", a, b))
    quotient = f("floordiv", f("abs", a), f("abs", b))
    return f.where(f("eq", f("lt", a, 0), f("lt", b, 0)), quotient, f("neg", quotient))


def _floored(f: Arith, a: Any, b: Any) -> Expr:
    return f("floordiv", a, b) if is_int(f.dtype) else f("floor", f("div", a, b))


def _div(f: Arith, a: Any, b: Any, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return f("div", a, b)
    return (_truncated if rounding_mode == "trunc" else _floored)(f, a, b)


def _remainder(f: Arith, a: Any, b: Any) -> Expr:
    return f("mod", a, b) if is_int(f.dtype) else f("sub", a, f("mul", _floored(f, a, b), b))


def _pow(f: Arith, x: Any, p: Any) -> Expr:
    if not isinstance(p, (int, float)):
        return f("pow", x, p)
    if is_float(f.dtype) and abs(p) == 0.5:  # as PyTorch does
        return f("sqrt" if p > 0 else "rsqrt", x)
    if p in range(1, WHOLE + 1):
        return build.whole_power(f.lift(x), int(p))
    if is_float(f.dtype) and -p in range(1, WHOLE + 1):
        return f("div", 1, build.whole_power(f.lift(x), int(-p)))
    return f("pow", x, p)


def _clamp(f: Arith, x: Expr, min: Any = None, max: Any = None) -> Expr:
    low = x if min is None else f("max", x, min)
    return low if max is None else f("min", low, max)


def _gelu(f: Arith, x: Expr, approximate: str = "none") -> Expr:
    if approximate == "none":
        inner = f("erf", f("mul", x, math.sqrt(0.5)))
    else:
        cubic = f("add", x, f("mul", f("mul", f("mul", x, x), x), 0.044715))
        inner = f("tanh", f("mul", cubic, math.sqrt(2 / math.pi)))
    return f("mul", f("mul", x, 0.5), f("add", inner, 1))


def _leaky_relu(f: Arith, x: Expr, slope: Any = 0.01) -> Expr:
    less = f("mul", x, slope)
    # The larger of the two, where that is so, is one operation and not two.
    return f("max", x, less) if isinstance(slope, float) and 0 < slope <= 1 else f.where(f("gt", x, 0), x, less)


def _elu(f: Arith, x: Expr, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Expr:
    negative = f("mul", f("expm1", f("mul", x, input_scale)), alpha * scale)
    return f.where(f("gt", x, 0), f("mul", x, scale), negative)


def _softplus(f: Arith, x: Expr, beta: Number = 1, threshold: Number = 20) -> Expr:
    scaled = f("mul", x, beta)
    return f.where(f("gt", scaled, threshold), x, f("div", f("log1p", f("exp", scaled)), beta))


def _log_sigmoid(f: Arith, x: Expr) -> Expr:
    return f("sub", f("min", x, 0), f("log1p", f("exp", f("neg", f("abs", x)))))


def _log_sigmoid_forward(out: tuple[Spec, Spec], x: Tensor) -> tuple[At, None]:
    """The second result is scratch space whose content differs between devices."""
    return arithmetic(_log_sigmoid)(out[0], x), None


def _softplus_backward(f: Arith, grad: Expr, x: Expr, beta: Number, threshold: Number) -> Expr:
    scaled = f("mul", x, beta)
    return f.where(f("gt", scaled, threshold), grad, f("mul", grad, f("sigmoid", scaled)))


def _log_sigmoid_backward(f: Arith, grad: Expr, x: Expr, _buffer: Any) -> Expr:
    return f("mul", grad, f("sigmoid", f("neg", x)))


def _log_add_exp(f: Arith, a: Expr, b: Expr) -> Expr:
    top = f("max", a, b)
    rest = f("log1p", f("exp", f("neg", f("abs", f("sub", a, b)))))
    same_infinity = build.op("and", f("isinf", a), f("eq", a, b), dtype="bool")
    return f.where(same_infinity, a, f("add", top, rest))


def _x_log_y(f: Arith, x: Any, y: Any) -> Expr:
    y = f.lift(y)
    return f.where(f("isnan", y), math.nan, f.where(f("eq", x, 0), 0, f("mul", x, f("log", y))))


def _ignoring_nan(name: str) -> Formula:
    def formula(f: Arith, a: Expr, b: Expr) -> Expr:
        if not is_float(f.dtype):
            return f(name, a, b)
        return f.where(f("isnan", a), b, f.where(f("isnan", b), a, f(name, a, b)))

    return formula


def _asinh(f: Arith, x: Expr) -> Expr:
    size = f("abs", x)
    root = f("sqrt", f("add", f("mul", x, x), 1))
    small = f("log1p", f("add", size, f("mul", size, f("div", size, f("add", root, 1)))))
    # Beyond it the square of `x` is lost, or infinite.
    large = f("add", f("log", size), math.log(2))
    return f("mul", f("sign", x), f.where(f("gt", size, 2.0**30), large, small))


def _acosh(f: Arith, x: Expr) -> Expr:
    # By its distance from 1, of which x² - 1 would lose what is small.
    beyond = f("sub", x, 1)
    root = f("mul", f("sqrt", beyond), f("sqrt", f("add", x, 1)))
    return f("log1p", f("add", beyond, root))


def _atanh(f: Arith, x: Expr) -> Expr:
    return f("mul", f("sub", f("log1p", x), f("log1p", f("neg", x))), 0.5)


def _nan_to_num(
    f: Arith, x: Expr, nan: Number | None = None, posinf: Number | None = None, neginf: Number | None = None
) -> Expr:
    if not is_float(f.dtype):
        return x
    limits = torch.finfo(torch_dtype(f.dtype))
    finite = f.where(f("eq", x, -math.inf), limits.min if neginf is None else neginf, x)
    finite = f.where(f("eq", x, math.inf), limits.max if posinf is None else posinf, finite)
    return f.where(f("isnan", x), 0 if nan is None else nan, finite)


def _special(name: str) -> Formula:
    return lambda f, x: f(name, x) if is_float(f.dtype) else build.FALSE


def _finite(f: Arith, x: Expr) -> Expr:
    special = build.op("or", _special("isnan")(f, x), _special("isinf")(f, x), dtype="bool")
    return build.negate(special)


def _where(out: Spec, condition: Tensor, then: Any, other: Any) -> At:
    return lambda idx: build.select(
        element(condition, idx, "bool"), element(then, idx, out.dtype), element(other, idx, out.dtype)
    )


def _masked_fill(out: Spec, x: Tensor, mask: Tensor, value: Any) -> At:
    return _where(out, mask, value, x)


def _hard_sigmoid(f: Arith, x: Expr) -> Expr:
    return f("div", _clamp(f, f("add", x, 3), 0, 6), 6)


_SAME_NAME = (
    "sqrt rsqrt exp exp2 expm1 log log2 log1p sin cos tan asin acos atan tanh sigmoid erf floor ceil trunc neg abs sign"
).split()  # fmt: skip

RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, n): arithmetic(_op(n)) for n in _SAME_NAME},
    **{getattr(aten, n): _test(_op(n)) for n in build.COMPARISONS},
    **{getattr(aten, n): _test(_special(n)) for n in ("isnan", "isinf")},
    **{getattr(aten, f"logical_{n}"): _logical(_op(n)) for n in ("and", "or", "xor", "not")},
    **{getattr(aten, f"bitwise_{n}"): arithmetic(_op(n)) for n in ("and", "or", "xor", "not")},
    **{getattr(aten, f"__{n}__"): arithmetic(_op(n)) for n in ("and", "or", "xor")},
    aten.isfinite: _test(_finite),
    aten.round.default: arithmetic(_op("round")),
    aten.sgn: arithmetic(_op("sign")),
    aten.bitwise_left_shift: arithmetic(_op("shl")),
    aten.bitwise_right_shift: arithmetic(_op("shr")),
    aten.__lshift__: arithmetic(_op("shl")),
    aten.__rshift__: arithmetic(_op("shr")),
    aten.log10: arithmetic(lambda f, x: f("mul", f("log", x), 1 / math.log(10))),
    aten.sinh: arithmetic(lambda f, x: f("mul", f("sub", f("expm1", x), f("expm1", f("neg", x))), 0.5)),
    aten.cosh: arithmetic(lambda f, x: f("mul", f("add", f("exp", x), f("exp", f("neg", x))), 0.5)),
    aten.asinh: arithmetic(_asinh),
    aten.acosh: arithmetic(_acosh),
    aten.atanh: arithmetic(_atanh),
    aten.reciprocal: arithmetic(lambda f, x: f("div", 1, x)),
    aten.square: arithmetic(lambda f, x: f("mul", x, x)),
    aten.frac: arithmetic(lambda f, x: f("sub", x, f("trunc", x))),
    aten.add: arithmetic(_add),
    aten.sub: arithmetic(_sub),
    aten.rsub: arithmetic(lambda f, a, b, alpha=1: _sub(f, b, a, alpha)),
    aten.mul: arithmetic(_in_bool("mul", "and")),
    aten.div: arithmetic(_div),
    aten.floor_divide: arithmetic(_floored),
    aten.remainder: arithmetic(_remainder),
    aten.fmod: arithmetic(lambda f, a, b: f("sub", a, f("mul", _truncated(f, a, b), b))),
    aten.pow: arithmetic(_pow),
    aten.maximum: arithmetic(_in_bool("max", "or")),
    aten.minimum: arithmetic(_in_bool("min", "and")),
    aten.max.other: arithmetic(_in_bool("max", "or")),
    aten.min.other: arithmetic(_in_bool("min", "and")),
    aten.fmax: arithmetic(_ignoring_nan("max")),
    aten.fmin: arithmetic(_ignoring_nan("min")),
    aten.clamp: arithmetic(_clamp),
    aten.clamp_min: arithmetic(_op("max")),
    aten.clamp_max: arithmetic(_op("min")),
    aten.hardtanh: arithmetic(lambda f, x, low=-1, high=1: _clamp(f, x, low, high)),
    aten.hardsigmoid: arithmetic(_hard_sigmoid),
    aten.hardswish: arithmetic(lambda f, x: f("mul", x, _hard_sigmoid(f, x))),
    aten.relu: arithmetic(lambda f, x: f("max", x, 0)),
    aten.silu: arithmetic(lambda f, x: f("mul", x, f("sigmoid", x))),
    aten.mish: arithmetic(lambda f, x: f("mul", x, f("tanh", _softplus(f, x)))),
    aten.gelu: arithmetic(_gelu),
    aten.elu: arithmetic(_elu),
    aten.leaky_relu: arithmetic(_leaky_relu),
    aten._prelu_kernel: arithmetic(lambda f, x, w: f.where(f("gt", x, 0), x, f("mul", x, w))),
    aten.threshold: arithmetic(lambda f, x, threshold, value: f.where(f("le", x, threshold), value, x)),
    aten.softplus: arithmetic(_softplus),
    aten.softplus_backward: arithmetic(_softplus_backward),
    aten.log_sigmoid_forward: _log_sigmoid_forward,
    aten.log_sigmoid_backward: arithmetic(_log_sigmoid_backward),
    aten.lerp: arithmetic(lambda f, a, b, w: f("add", a, f("mul", f("sub", b, a), w))),
    aten.addcmul: arithmetic(lambda f, x, a, b, value=1: f("add", x, f("mul", f("mul", a, b), value))),
    aten.addcdiv: arithmetic(lambda f, x, a, b, value=1: f("add", x, f("mul", f("div", a, b), value))),
    aten.logaddexp: arithmetic(_log_add_exp),
    aten.hypot: arithmetic(lambda f, a, b: f("sqrt", f("add", f("mul", a, a), f("mul", b, b)))),
    aten.atan2: arithmetic(_op("atan2")),
    aten.xlogy: arithmetic(_x_log_y),
    aten.nan_to_num: arithmetic(_nan_to_num),
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.masked_fill: _masked_fill,
    prims.convert_element_type: lambda out, x, dtype: lambda idx: element(x, idx, out.dtype),
}
