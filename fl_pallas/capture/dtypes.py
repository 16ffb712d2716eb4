"""PyTorch's element types and their short names."""

from __future__ import annotations

import torch

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_TORCH = {name: dtype for dtype, name in _NAMES.items()}


def short_dtype(dtype: torch.dtype) -> str | None:
    """The short name of `dtype`; None if a Program cannot hold it (complex, `float8_e4m3fnuz`, …)."""
    return _NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The PyTorch type of a short name."""
    return _TORCH[name]
