"""Element types, by their short names; a type is a plain string."""

from __future__ import annotations

FLOATS = ("bf16", "f16", "f32", "f64")
# Of eight bits: they are read, and computed with as the numbers that they stand for; nothing is rounded to them.
NARROW_FLOATS = ("f8e4m3", "f8e5m2")
INTS = ("i8", "i16", "i32", "i64", "u8")
DTYPES = (*FLOATS, *NARROW_FLOATS, *INTS, "bool")

_BYTES = {"bool": 1, "i8": 1, "u8": 1, "i16": 2, "bf16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
_BYTES |= dict.fromkeys(NARROW_FLOATS, 1)
_MANTISSA = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}


def is_float(dtype: str) -> bool:
    return dtype in FLOATS


def is_narrow_float(dtype: str) -> bool:
    return dtype in NARROW_FLOATS


def is_int(dtype: str) -> bool:
    return dtype in INTS


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return _BYTES[dtype]


def mantissa_bits(dtype: str) -> int:
    """Significant bits of a floating type, the hidden one counted."""
    return _MANTISSA[dtype]


def compute_dtype(dtypes: object) -> str:
    """The floating type fused regions compute in: float32, or float64 if any operand has it."""
    return "f64" if "f64" in set(dtypes) else "f32"  # type: ignore[call-overload]
