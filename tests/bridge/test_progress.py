"""What is shown while kernels are compiled and timed."""

from __future__ import annotations

import io
import logging
import time

import pytest
from rich.console import Console

from fl_pallas.bridge import progress as module
from fl_pallas.bridge.progress import progress


def waited(seconds: float, terminal: bool = True) -> str:
    """What is written while three kernels take so long, the first two half of it."""
    written = io.StringIO()
    with progress(3, Console(file=written, force_terminal=terminal, width=80)) as count:
        for _ in range(2):
            time.sleep(seconds / 4)
            count()
        time.sleep(seconds / 2)
        count()
    return written.getvalue()


def test_what_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "AFTER", 0.1)
    with caplog.at_level(logging.INFO):
        text = waited(1.2)
    assert "2 of 3 kernels compiled and timed" in text
    assert "3 of 3 kernels compiled and timed in 1." in caplog.text


def test_what_is_quick_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert waited(0.01) == "" and not caplog.text


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER", 0.05)
    assert waited(0.3, terminal=False) == ""


def test_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER", 0.01)
    written = io.StringIO()
    with pytest.raises(ValueError), progress(1, Console(file=written, force_terminal=True, width=80)):
        time.sleep(0.3)
        raise ValueError
    shown = written.getvalue()
    time.sleep(0.2)
    assert "0 of 1 kernel compiled" in shown and written.getvalue() == shown
