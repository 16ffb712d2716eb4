"""Kernels compiled before they are called, side by side: what they will be given is known but for its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from .. import cache
from ..errors import Unsupported
from ..meanwhile import short_turns
from .launch import DirectKernel
from .order import Order

# Kernels with what they will be given; what another will make, or is not there yet, on PyTorch's "meta" device.
Calls = Sequence[tuple[DirectKernel, Sequence[Tensor]]]


class Together:
    """The regions of a function, of both its passes, whose kernels are compiled by the first call of one of them."""

    def __init__(self) -> None:
        self._expected: dict[object, Calls] = {}

    def expect(self, region: object, calls: Calls) -> None:
        """Tell what a region will do, once others have run. What will compile its kernels is begun, unless the first of
        them is kept on disk."""
        self._expected[region] = calls
        with contextlib.suppress(Unsupported):  # the call will raise it
            if calls and (order := calls[0][0].ahead(calls[0][1])) is not None:
                order.begin()

    def compile(self, region: object, calls: Calls) -> None:
        """Compile for the first call of a region, and for all that is expected."""
        others, self._expected = self._expected, {}
        others.pop(region, None)
        compile_ahead([*calls, *(call for more in others.values() for call in more)])


def compile_ahead(calls: Calls) -> None:
    """Compile the choices of several kernels that their first calls will time; of one alone, that call does."""
    if len(calls) < 2:
        return
    with cache.cubins(), short_turns:
        wanted: dict[str, tuple[DirectKernel, Order]] = {}
        for kernel, operands in calls:
            with contextlib.suppress(Unsupported):  # the call will raise it
                if (order := kernel.ahead(operands)) is not None and order.key not in kernel.family.fitted:
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
