"""Plans without runs: for tests that look at kernels, and not at what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fl_pallas as fl
from fl_pallas.bridge.dlpack import DlpackKernel
from fl_pallas.capture.dtypes import torch_dtype


@contextmanager
def unrun() -> Iterator[None]:
    """Kernels that would be interpreted give zeros, at once; a GPU's run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DlpackKernel, "__call__", _zeros)
        yield


def explain(fn: Any, *args: Any, **kwargs: Any) -> fl.Explanation:
    """What fl.explain tells, of kernels that are not run."""
    with unrun():
        return fl.explain(fn, *args, **kwargs)


def _zeros(kernel: DlpackKernel, operands: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros(s.shape, dtype=torch_dtype(s.dtype)) for s in kernel.plan.stores]
