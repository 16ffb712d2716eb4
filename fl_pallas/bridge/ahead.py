"""Kernels compiled before they are called, side by side: what they will be given is known but for its numbers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .. import cache
from ..errors import Unsupported
from .launch import DirectKernel, unavailable
from .order import Order

# Kernels with what they will be given; what another will make, or is not there yet, on PyTorch's "meta" device.
Calls = Sequence[tuple[DirectKernel, Sequence[Tensor]]]


def prepare(device: torch.device) -> None:
    """Start what will compile kernels for a device, which takes a second, while they are planned: where none is kept on
    disk."""
    if unavailable(device) is None and cache.is_empty():
        _begin()


def _begin() -> None:
    from ..kernels import processes  # triton is not everywhere

    processes.begin()


class Together:
    """The regions of a function, of both its passes, whose kernels are compiled side by side: from when both passes are
    planned, beside what PyTorch compiles of the rest, until one of them is called."""

    def __init__(self) -> None:
        self._expected: list[tuple[DirectKernel, Sequence[Tensor]]] = []
        self._begun: threading.Thread | None = None

    def expect(self, calls: Calls) -> None:
        """Tell what a region will do, once others have run. What will compile its kernels is started, unless the first
        of them is kept on disk."""
        self._expected += calls
        with contextlib.suppress(Unsupported):  # the call will raise it
            if calls and calls[0][0].ahead(calls[0][1]) is not None:
                _begin()

    def begin(self) -> None:
        """Compile what is expected, in a thread."""
        expected, self._expected = self._expected, []
        if wanted := _wanted(expected):
            self._begun = threading.Thread(target=_compile_all, args=(wanted,), name="fl_pallas")
            self._begun.start()

    def compile(self, calls: Calls) -> None:
        """Compile what the first call of a region lacks, once all that was begun is there."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.join()
        # One alone is compiled by its call.
        if len(calls) > 1 and len(wanted := _wanted(calls)) > 1:
            _compile_all(wanted)


def _wanted(calls: Calls) -> list[tuple[DirectKernel, Order]]:
    """The kernels whose choices are to be compiled for their first calls, which will time them."""
    wanted: dict[str, tuple[DirectKernel, Order]] = {}
    for kernel, operands in calls:
        with contextlib.suppress(Unsupported):  # the call will raise it
            if (order := kernel.ahead(operands)) is not None and order.key not in kernel.family.fitted:
                wanted[order.key] = kernel, order
    return [*wanted.values()]


def _compile_all(wanted: Sequence[tuple[DirectKernel, Order]]) -> None:
    # One thread for each, that waits for those of its choices (kernels/fit.py).
    with ThreadPoolExecutor(len(wanted)) as threads:
        for kernel, order in wanted:
            threads.submit(_compile, kernel, order)


def _compile(kernel: DirectKernel, order: Order) -> None:
    with contextlib.suppress(Unsupported):  # the call will raise it
        kernel.family.fitted[order.key] = order.fitted()
