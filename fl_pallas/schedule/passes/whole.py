"""Sums of products of small whole numbers, of quantised queries and keys, as products of matrices of floats: exact."""

from __future__ import annotations

from ..build import cast, op, reduce, rewrite
from ..dtype import is_int
from ..expr import Expr, Op, Reduce, loads
from ..integer import bounds

# Up to which bfloat16 has every whole number, and float32, in which sums are kept.
FACTOR, SUM = 2**8, 2**24


def in_floats(e: Expr) -> Expr:
    """Before: `sum[d](i32(q[i, d]) * i32(k[j, d]))`, of int8. After: the same of bfloat16, as int32."""
    return rewrite(e, lambda n: _in_floats(n) if isinstance(n, Reduce) else n)


def is_in_floats(e: Expr) -> bool:
    """Whether an integer is such a sum."""
    return isinstance(e, Op) and e.name == "cast" and is_int(e.dtype) and isinstance(e.args[0], Reduce)


def _in_floats(r: Reduce) -> Expr:
    if r.kind != "sum" or not is_int(r.dtype) or not isinstance(r.body, Op) or r.body.name != "mul":
        return r
    most = [max(map(abs, span)) if (span := bounds(a)) and loads(a) else SUM for a in r.body.args]
    if max(most) > FACTOR or most[0] * most[1] * r.axis.extent > SUM:
        return r
    product = op("mul", *(cast(a, "bf16") for a in r.body.args), dtype="bf16")
    return cast(reduce("sum", r.axis, product, "bf16"), r.dtype)
