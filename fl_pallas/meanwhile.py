"""Settings of the whole process that several threads need at times."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class Meanwhile:
    """A context that is entered for all threads by the first that needs it, and left by the last.

    Args:
      context: makes the one that is entered.
    """

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[object]]):
        self._context = context
        self._lock = threading.Lock()
        self._users = 0
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._entered.enter_context(self._context())
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._entered.close()
