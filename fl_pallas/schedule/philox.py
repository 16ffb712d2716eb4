"""Philox 2x32: random bits as a pure function of a key and a counter (Salmon et al., SC11; the Random123 library).

Written once for every arithmetic that computes it: jax's unsigned 32 bits in kernels, PyTorch's 64 bits elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MULTIPLIER, WEYL = 0xD256D193, 0x9E3779B9
MASK = 0xFFFFFFFF
# The fewest rounds that pass BigCrush. More cost a kernel that is bound by its arithmetic.
ROUNDS = 7
# Bits of a number in [0, 1): those of a float32 between 1 and 2.
BITS = 23


def philox(first: Any, second: Any, keys: Sequence[Any], multiplied: Callable[[Any], tuple[Any, Any]]) -> Any:
    """The first word of the bits at a counter of two words.

    Args:
      keys: of each round: the key plus as many times WEYL.
      multiplied: the high and the low word of a word times MULTIPLIER.
    """
    for key in keys:
        high, low = multiplied(first)
        first, second = high ^ key ^ second, low
    return first
