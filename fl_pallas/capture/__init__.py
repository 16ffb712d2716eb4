"""From PyTorch code to a Program: the only part that knows ATen."""

from .translate import translate

__all__ = ["translate"]
