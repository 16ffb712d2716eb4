"""What tuning picks, on a simulated GPU whose clock falls under load, further for some kernels than for others."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from fl_pallas.bridge import tuning


@dataclass
class Kernel:
    """Milliseconds at full clock, and after SETTLED milliseconds of launches."""

    alone: float
    loaded: float
    busy: float = 0.0

    def __call__(self) -> None:
        self.busy += self.alone


def _mean(kernel: Kernel, times: int) -> float:
    time = kernel.loaded if kernel.busy >= tuning.SETTLED else kernel.alone
    for _ in range(times):
        kernel()
    return time


@pytest.mark.parametrize(
    ("kernels", "best"),
    [
        ([Kernel(2.05, 2.30), Kernel(2.07, 2.09)], 1),  # the better one under load
        ([Kernel(2.05, 2.30), Kernel(2.07, 2.29)], 0),  # about the same
        ([Kernel(0.675, 0.690), Kernel(0.626, 0.699)], 1),  # level under load, the better one alone
        ([Kernel(1.0, 1.2), Kernel(0.9, 1.0), Kernel(0.89, 1.01)], 2),
        ([Kernel(1.0, 1.1), Kernel(0.5, 0.55), Kernel(0.51, 0.51)], 2),
        ([Kernel(1.0, 1.3), Kernel(1.2, 1.2)], 0),  # much slower alone
        ([Kernel(0.010, 0.02), Kernel(0.0102, 0.01)], 0),  # too short to heat a GPU
        ([Kernel(300.0, 310.0), Kernel(250.0, 270.0)], 1),
        ([Kernel(1.0, 1.0)], 0),
    ],
)
def test_fastest(kernels: list[Kernel], best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_mean", _mean)
    assert tuning.fastest(kernels) == best


def test_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while everything takes twice as long, for another process runs; the fastest is found all the same."""
    count = itertools.count()
    slowed = range(4, 14)
    monkeypatch.setattr(tuning, "_mean", lambda k, times: _mean(k, times) * (2 if next(count) in slowed else 1))
    kernels = [Kernel(1.2, 1.2), Kernel(1.0, 1.0), Kernel(1.3, 1.3), Kernel(1.1, 1.1)]
    assert tuning.fastest(kernels) == 1


def test_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_mean", _mean)
    assert tuning.level([Kernel(1.2, 1.2), Kernel(1.0, 1.0), Kernel(1.05, 1.05)], within=1.1) == [1, 2]
