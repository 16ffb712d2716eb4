"""Processes that call functions of this package for another (`processes.py`): a program that imports what they need
once, and is forked where one is asked first.

In one process, threads that trace and compile wait for each other's turn at Python, and for the user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Seconds without anything to do, after which a process ends.
IDLE = 120


def main() -> None:
    """Fork for each socket that is asked something, until there is none, or nobody asks any more."""
    sys.path[:] = json.loads(sys.argv[1])
    lanes = [socket.socket(fileno=n) for n in json.loads(sys.argv[2])]
    os.environ["JAX_PLATFORMS"] = "cpu"  # it only writes kernels down here
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads do not live on in a forked process
    hashed = _begin_hashing()
    # The package without what its own module imports: PyTorch takes seconds, and nothing here needs it.
    package = types.ModuleType("fl_pallas")
    package.__path__ = [str(Path(__file__).parent.parent)]
    sys.modules[package.__name__] = package
    from jax._src import xla_bridge
    from triton.runtime import cache

    from fl_pallas.kernels import fit, processes  # noqa: F401  what will be called

    with contextlib.suppress(ImportError):
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401  so does whoever lowers first

    # Lowering starts what JAX has backends for: that of a GPU is loaded from hundreds of megabytes.
    xla_bridge.discover_pjrt_plugins = lambda: None
    key = hashed() or cache.triton_key()
    cache.triton_key = lambda: key
    processes.begin_answering()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
    while lanes and (asked := select.select(lanes, [], [], IDLE)[0]):
        for lane in asked:
            lanes.remove(lane)
            if lane.recv(1, socket.MSG_PEEK) and not os.fork():
                try:
                    for other in lanes:
                        other.close()
                    _answer(lane, processes.answered)
                finally:
                    os._exit(0)
            lane.close()


def _begin_hashing() -> Callable[[], str]:
    """Begin Triton's hash of its own files, half a second, by which it looks kernels up; and what waits for it."""
    from triton.runtime.cache import triton_key

    read, write = os.pipe()
    if not os.fork():
        try:
            os.write(write, triton_key().encode())
        finally:
            os._exit(0)
    os.close(write)

    def hashed() -> str:
        with os.fdopen(read) as pipe:
            return pipe.read()

    return hashed


def _answer(lane: socket.socket, answered: Callable[[Any], Any]) -> None:
    """Answer a question after the other."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Triton waits for ptxas
    with lane.makefile("rwb") as stream:
        while select.select([lane], [], [], IDLE)[0]:
            try:
                asked = pickle.load(stream)
            except EOFError:
                return
            pickle.dump(answered(asked), stream)
            stream.flush()


if __name__ == "__main__":
    main()
