"""Answers that are kept: ways to make kernels are weighed by making them, and most kernels of two ways are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])

# More than the kernels of a large region, so that those of one way are still known when the next is weighed.
ANSWERS = 512


def remembered(function: F) -> F:
    """`function`, of frozen arguments alone, which computes each of its last answers once."""
    return cast(F, functools.lru_cache(maxsize=ANSWERS)(function))
