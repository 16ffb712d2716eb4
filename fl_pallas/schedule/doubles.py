"""float64 beside other floats: PyTorch's on a GPU, whose kernels compute in float32.

A bias by `floor(log2(distance.double()))` is computed by PyTorch, and the attention that adds it fuses.
"""

from __future__ import annotations

from .dtype import is_float
from .program import Program


def doubles(program: Program) -> frozenset[str]:
    """Names of what is computed in float64, and of what is made of that, in a program that has other floats as well."""
    if {v.dtype for v in program.values if is_float(v.dtype) and v.axes} <= {"f64"}:
        return frozenset()
    wide = {v.name for v in program.values if v.dtype == "f64" and v.axes}
    made = (v for v in program.values if v.expr is not None and (v.name in wide or not wide.isdisjoint(v.reads)))
    # A view of float64 is as good as that.
    return frozenset(v.name for v in made if not (v.is_view and v.name in wide and not wide.isdisjoint(v.reads)))
