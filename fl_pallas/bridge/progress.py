"""What is waited for, on the terminal, while kernels are compiled and timed: if that takes longer than a second."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.status import Status

# Seconds.
AFTER = 1.0

log = logging.getLogger(__name__)


@contextlib.contextmanager
def progress(kernels: int, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Within, how many of so many kernels are ready; gives what counts one more. A log at level INFO is told the end.

    Args:
      console: standard error's, by default. Where that is no terminal, nothing is shown.
    """
    done = 0
    over = False
    lock = threading.Lock()

    def text() -> str:
        return f"fl_pallas: {done} of {kernels} kernel{'s' if kernels > 1 else ''} compiled and timed"

    def count() -> None:
        nonlocal done
        done += 1
        status.update(text())

    def begin() -> None:
        with lock:
            if not over:
                status.start()

    status = Status(text(), console=console or Console(stderr=True))
    timer = threading.Timer(AFTER, begin)
    timer.daemon = True
    start = time.perf_counter()
    timer.start()
    try:
        yield count
    finally:
        timer.cancel()
        with lock:
            over = True
            status.stop()
        if (took := time.perf_counter() - start) > AFTER:
            log.info("%s in %.1f s", text(), took)
