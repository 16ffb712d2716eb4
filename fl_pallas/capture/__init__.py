"""From PyTorch code to a Program: the only part that knows ATen."""

from .translate import kernels_device, translate

__all__ = ["kernels_device", "translate"]
