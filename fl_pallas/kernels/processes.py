"""Processes that write down and compile kernels side by side (`worker.py`), started where they are first needed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from triton import knobs

from ..config import Config, config
from . import worker
from .chosen import environment, folder
from .compiler import settings

P = ParamSpec("P")
T = TypeVar("T")

# Questions that are asked at a time, of a process each.
SIDE_BY_SIDE = min(32, os.cpu_count() or 1)


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
      own: our settings.
    """

    triton: str
    folder: str
    own: Config


# What is asked for: what a function returns. And whether it returned, or None for what is to be called under other
# settings; with what it did or raised.
_Question = tuple[_Setup, Callable[[], Any]]
_Answer = tuple[bool | None, Any]


class _Process:
    """One that is asked a question at a time, by a socket; forked by the first."""

    def __init__(self, lane: socket.socket):
        self._lane, self._stream = lane, lane.makefile("rwb")

    def answer(self, asked: bytes) -> _Answer:
        """Raises: Ended."""
        try:
            self._stream.write(asked)
            self._stream.flush()
            return pickle.load(self._stream)
        except (OSError, EOFError, pickle.UnpicklingError) as e:
            self.end()
            raise Ended from e

    def is_alive(self) -> bool:
        try:
            return bool(self._lane.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def end(self) -> None:
        """Have no more to do with it: it ends when nobody can ask it any more."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._lane.close()


class _Pool:
    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._asking = threading.Semaphore(SIDE_BY_SIDE)
        self.has_answered = False

    def begin(self) -> None:
        """Have some that are idle. Raises OSError where none can be started."""
        with self._lock:
            self._begin()

    def answer(self, asked: bytes) -> _Answer:
        """Raises: Ended, OSError."""
        with self._asking:
            with self._lock:
                self._begin()
                process = self._idle.pop()
            try:
                answer = process.answer(asked)
            except Ended:  # so may what the others would be forked by
                with self._lock:
                    self._leave_idle()
                raise
            with self._lock:
                self._idle.append(process)
                self.has_answered = True
            return answer

    def _begin(self) -> None:
        for p in [p for p in self._idle if not p.is_alive()]:
            self._idle.remove(p)
            p.end()
        if not self._idle:
            self._start()

    def _start(self) -> None:
        if "python" not in Path(sys.executable or "").name:
            raise OSError("Python is a part of another program")
        self._started = [p for p in self._started if p.poll() is None]
        pairs = [socket.socketpair() for _ in range(SIDE_BY_SIDE)]
        theirs = [other.fileno() for _, other in pairs]
        # -P: beside the program there is a module called triton.
        command = [sys.executable, "-P", str(Path(worker.__file__)), json.dumps(sys.path), json.dumps(theirs)]
        nothing = subprocess.DEVNULL
        try:
            # In a session of its own it is not interrupted by Ctrl-C.
            popen = subprocess.Popen(
                command,
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                env=environment(),
                start_new_session=True,
                pass_fds=theirs,
            )
            self._started.append(popen)
            self._idle = [_Process(own) for own, _ in pairs]
        finally:
            for own, other in pairs:
                other.close()
                if not self._idle:
                    own.close()

    def end(self) -> None:
        for p in self._started:
            p.kill()
            p.wait()
        self.leave()

    def _leave_idle(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def leave(self) -> None:
        """Have no more to do with them."""
        self._leave_idle()
        while self._started:
            self._started.pop().returncode = 0


_pool = _Pool()
atexit.register(lambda: _pool.end())


def _anew() -> None:
    """In a forked process, which has processes of its own."""
    global _pool
    _pool.leave()
    _pool = _Pool()


os.register_at_fork(after_in_child=_anew)


def begin() -> None:
    """Start what takes a second until it answers, while other work is done."""
    with contextlib.suppress(OSError):
        _pool.begin()


def elsewhere(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns in a process that is idle, or a new one.

    Raises: what it raises there; Nowhere if no process can be started, or works here, or is set up as this one, or what
      it is given cannot be sent; Ended if it ends the process, twice.
    """
    if _answers:
        raise Nowhere("this process is asked itself")
    setup = _Setup(settings(), folder(), config)
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


def _answer(asked: bytes) -> _Answer:
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


def answered(asked: _Question) -> _Answer:
    """The answer to a question."""
    setup, function = asked
    if setup.triton != settings():
        return None, None
    knobs.cache.dir = setup.folder
    vars(config).update(vars(setup.own))
    try:
        return True, function()
    except Exception as e:
        try:
            pickle.loads(pickle.dumps(e))
        except Exception:
            e = RuntimeError(f"{type(e).__name__}: {e}")
        return False, e
