"""Where Triton writes the IR that it could not compile: a choice that is skipped is nothing to tell the user about."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "TRITON_REPRODUCER_PATH"

_lock = threading.Lock()
_users = 0
_folder: tempfile.TemporaryDirectory[str] | None = None


@contextlib.contextmanager
def off_the_terminal() -> Iterator[None]:
    """Within, failed compilations leave their IR in a file that is thrown away, instead of all of it on stderr.

    Triton takes the place from the environment, which all threads share: the first to come sets it, the last
    to leave sets it back. Where the user chose a place, it stays.
    """
    global _users, _folder
    with _lock:
        if not _users and VARIABLE not in os.environ:
            _folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            os.environ[VARIABLE] = str(Path(_folder.name) / "kernel")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _folder is not None:
                del os.environ[VARIABLE]
                _folder.cleanup()
                _folder = None
