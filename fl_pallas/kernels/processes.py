"""Processes that compile kernels side by side (`compiler.py`), started where they are first needed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from . import compiler
from .chosen import environment

# The most that are started ahead of what they will compile.
AHEAD = 16


class Ended(Exception):
    """A process has ended before it answered."""


class _Process:
    """One of them, that is asked one question at a time. Raises OSError where none can be started."""

    def __init__(self) -> None:
        if "python" not in Path(sys.executable or "").name:
            raise OSError("Python is a part of another program")
        # -P: beside the program there is a module called triton.
        command = [sys.executable, "-P", str(Path(compiler.__file__)), json.dumps(sys.path)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        # In a session of its own it is not interrupted by Ctrl-C; it ends when its input does.
        self._popen = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment(), start_new_session=True
        )

    def answer(self, asked: dict[str, Any]) -> dict[str, str]:
        """Raises: Ended."""
        to, back = self._popen.stdin, self._popen.stdout
        assert to is not None and back is not None
        try:
            to.write(json.dumps(asked).encode() + b"\n")
            to.flush()
            answer: dict[str, str] = json.loads(back.readline())
        except (OSError, ValueError) as e:
            self.end()
            raise Ended from e
        return answer

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self.leave()

    def leave(self) -> None:
        """Have no more to do with it."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._popen.returncode = self._popen.returncode or 0


class _Pool:
    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._busy = 0
        self._lock = threading.Lock()
        self.has_answered = False

    def begin(self, count: int) -> None:
        with self._lock:
            self._bury()
            while len(self._idle) + self._busy < count:
                self._idle.append(_Process())

    def answer(self, asked: dict[str, Any]) -> dict[str, str]:
        with self._lock:
            self._bury()
            process = self._idle.pop() if self._idle else _Process()
            self._busy += 1
        try:
            answer = process.answer(asked)
        finally:
            with self._lock:
                self._busy -= 1
        with self._lock:
            self._idle.append(process)
            self.has_answered = True
        return answer

    def _bury(self) -> None:
        for p in [p for p in self._idle if not p.is_alive()]:
            self._idle.remove(p)
            p.end()

    def end(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def leave(self) -> None:
        while self._idle:
            self._idle.pop().leave()


_pool = _Pool()
atexit.register(lambda: _pool.end())


def _anew() -> None:
    """In a forked process, which has processes of its own."""
    global _pool
    _pool.leave()
    _pool = _Pool()


os.register_at_fork(after_in_child=_anew)


def begin(count: int) -> None:
    """Have as many compile, or wait for what they will, as far as there are processors."""
    with contextlib.suppress(OSError):
        _pool.begin(min(count, AHEAD, os.cpu_count() or 1))


def answer(asked: dict[str, Any]) -> dict[str, str]:
    """What one that is idle, or a new one, answers (`compiler.answered`).

    Raises: OSError if none can be started, or works here; Ended if the compiler ends it, twice.
    """
    with contextlib.suppress(Ended):
        return _pool.answer(asked)
    try:
        return _pool.answer(asked)
    except Ended as e:
        if _pool.has_answered:
            raise
        raise OSError("no process has answered") from e
