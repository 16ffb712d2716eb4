"""Tensors whose memory holds their elements: not those that PyTorch takes the negative of as it reads them (the
imaginary part of a conjugate), nor those without memory that stand for zeros (tangents of `torch.func.jvp`)."""

from __future__ import annotations

from torch import Tensor


def is_plain(t: Tensor) -> bool:
    """Whether a kernel may read a tensor where it lies."""
    return not (t.is_neg() or t._is_zerotensor())


def plain(t: Tensor) -> Tensor:
    """A tensor with the same elements that a kernel may read: `t` itself, or a copy."""
    t = t.resolve_neg()
    return t.clone() if t._is_zerotensor() else t
