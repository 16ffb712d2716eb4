"""Processes that write down and compile kernels side by side (`worker.py`), started where they are first needed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from triton import knobs
from triton.runtime import cache as triton_cache

from ..config import Config, config
from ..meanwhile import short_turns
from . import worker
from .chosen import environment, folder
from .compiler import settings

P = ParamSpec("P")
T = TypeVar("T")

# The most that are started ahead of what they will compile.
AHEAD = 16


class Ended(Exception):
    """A process has ended before it answered."""


class Nowhere(Exception):
    """No other process can do it."""


@dataclass(frozen=True)
class _Setup:
    """What of the process that asks an answer depends on.

    Attributes:
      triton: Triton's settings.
      folder: of Triton's cache.
      key: Triton's hash of its own files, by which it looks kernels up.
      own: our settings.
    """

    triton: str
    folder: str
    key: str
    own: Config


# What is asked for: what a function returns.
_Question = tuple[_Setup, Callable[[], Any]]


class _Process:
    """One of them, that is asked one question at a time. Raises OSError where none can be started."""

    def __init__(self) -> None:
        if "python" not in Path(sys.executable or "").name:
            raise OSError("Python is a part of another program")
        # -P: beside the program there is a module called triton.
        command = [sys.executable, "-P", str(Path(worker.__file__)), json.dumps(sys.path)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        # In a session of its own it is not interrupted by Ctrl-C; it ends when its input does.
        self._popen = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment(), start_new_session=True
        )

    def answer(self, asked: bytes) -> Any:
        """Raises: Ended."""
        to, back = self._popen.stdin, self._popen.stdout
        assert to is not None and back is not None
        try:
            to.write(asked)
            to.flush()
            return pickle.load(back)
        except (OSError, EOFError, pickle.UnpicklingError) as e:
            self.end()
            raise Ended from e

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

    def answer(self, asked: bytes) -> Any:
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


def elsewhere(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns in a process that is idle, or a new one.

    Raises: what it raises there; Nowhere if no process can be started, or works here, or is set up as this one, or what
      it is given cannot be sent; Ended if it ends the process, twice.
    """
    if _answers:
        raise Nowhere("this process is asked itself")
    setup = _Setup(settings(), folder(), hashing().result(), config)
    try:
        known, value = _answer(pickle.dumps((setup, functools.partial(function, *args, **kwargs))))
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError, OSError) as e:
        raise Nowhere from e
    if known is None:
        raise Nowhere("its settings are others")
    if not known:
        raise value
    return value


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns in another process, or in this one, where no other can call it.

    Raises: what it raises.
    """
    try:
        return elsewhere(function, *args, **kwargs)
    except (Nowhere, Ended):
        return function(*args, **kwargs)


@functools.cache
def hashing() -> Future[str]:
    """Triton's hash of its own files, which it looks kernels up by, as Inductor's keys do: begun here, in a thread."""
    return ThreadPoolExecutor(1).submit(_key)


def _key() -> str:
    # The files are read a megabyte at a time, with a turn at Python after each.
    with short_turns:
        return triton_cache.triton_key()


# A thread does not live on in a forked process.
os.register_at_fork(after_in_child=hashing.cache_clear)


def _answer(asked: bytes) -> tuple[bool | None, Any]:
    with contextlib.suppress(Ended):
        return _pool.answer(asked)
    try:
        return _pool.answer(asked)
    except Ended as e:
        if _pool.has_answered:
            raise
        raise OSError("no process has answered") from e


# Whether this is one of the processes that are asked.
_answers = False


def begin_answering() -> None:
    """This process is asked, and asks no other."""
    global _answers
    _answers = True


@contextlib.contextmanager
def newest_ptxas() -> Iterator[None]:
    """Triton assembles by the newest ptxas that it has. Raises: RuntimeError where others compile too."""
    if not _answers:
        raise RuntimeError("the user's own kernels would be assembled by another ptxas")
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell.path
        yield


def answered(asked: _Question) -> bytes:
    """The answer to a question: whether a function returned, and what it did or raised; or, for what is to be called
    under other settings, None and nothing."""
    setup, function = asked
    if setup.triton != settings():
        return pickle.dumps((None, None))
    knobs.cache.dir = setup.folder
    triton_cache.triton_key = lambda: setup.key  # this process has not read its files
    vars(config).update(vars(setup.own))
    try:
        return pickle.dumps((True, function()))
    except Exception as e:
        try:
            pickle.loads(pickle.dumps(e))
        except Exception:
            e = RuntimeError(f"{type(e).__name__}: {e}")
        return pickle.dumps((False, e))
