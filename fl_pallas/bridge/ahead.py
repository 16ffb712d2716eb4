"""Kernels compiled before they are called, side by side: what they will be given is known but for its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from .. import cache
from ..errors import Unsupported
from .launch import DirectKernel
from .order import Order


def compile_ahead(calls: Sequence[tuple[DirectKernel, Sequence[Tensor]]]) -> None:
    """Compile the choices of several kernels that their first calls will time; of one alone, that call does.

    Args:
      calls: kernels with what they will be given; what another will make, on PyTorch's "meta" device.
    """
    with cache.cubins():
        wanted: dict[str, tuple[DirectKernel, Order]] = {}
        for kernel, operands in calls:
            with contextlib.suppress(Unsupported):  # the call will raise it
                if (order := kernel.ahead(operands)) is not None:
                    wanted[order.key] = kernel, order
        if len(wanted) < 2:
            return
        # One thread for each, that waits for those of its choices (kernels/fit.py).
        with ThreadPoolExecutor(len(wanted)) as threads:
            for kernel, order in wanted.values():
                threads.submit(_compile, kernel, order)


def _compile(kernel: DirectKernel, order: Order) -> None:
    with contextlib.suppress(Unsupported):  # the call will raise it
        kernel.family.fitted[order.key] = order.fitted()
