"""What starts compiled kernels: Triton's launchers, and code loaded on a device.

A launcher is a C module that takes so many pointers and descriptors, compiled where Triton's cache has none. All are of
one name, and where Python loads one for a second time, it hands out the module that it loaded last, of whatever
arguments, changed to this one: threads that load two at a time launch kernels by each other's. Hence one launcher for
all kernels of as many arguments, loaded once in a process.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.compiler import CompiledKernel

from .chosen import as_chosen

# What launchers know of a kernel besides its arguments. Kernels that want scratch memory are not launched.
_PLAIN = SimpleNamespace(
    num_ctas=1,
    tensordesc_meta=[],
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)


@dataclass(frozen=True)
class _Source:
    """What a launcher is made from: the types of its arguments."""

    signature: dict[int, str]


@functools.cache
def starting() -> Future[Any]:
    """Triton's driver, for which a C compiler runs where Triton's cache is empty: 0.4 s, begun in a thread here."""
    return ThreadPoolExecutor(1).submit(_driver)


def _driver() -> Any:
    with as_chosen():
        return triton.runtime.driver.active


_launchers: dict[tuple[int, int], Future[Any]] = {}
_lock = threading.Lock()


def launcher(pointers: int, descriptors: int) -> Future[Any]:
    """Triton's launcher for kernels of so many arguments, descriptors last: 0.3 s of a C compiler at times, begun in a
    thread by the first that asks.
    """
    with _lock:
        key = pointers, descriptors
        if key not in _launchers or _launchers[key].done() and _launchers[key].exception() is not None:
            kinds = ["*i8"] * pointers + ["nvTmaDesc"] * descriptors
            _launchers[key] = ThreadPoolExecutor(1).submit(_made, _Source(dict(enumerate(kinds))))
        return _launchers[key]


def _made(source: _Source) -> Any:
    driver = starting().result()
    with as_chosen():
        return driver.launcher_cls(source, _PLAIN)


# Threads do not live on in a forked process.
os.register_at_fork(after_in_child=starting.cache_clear)
os.register_at_fork(after_in_child=lambda: [_launchers.pop(k) for k, f in [*_launchers.items()] if not f.done()])


@dataclass(frozen=True)
class Loaded:
    """A kernel on a device.

    Attributes:
      run: (grid, stream, *fixed, pointers, descriptors) → None.
    """

    run: Callable[..., None]
    fixed: tuple[Any, ...]


def load(kernel: CompiledKernel, pointers: int, descriptors: int, index: int) -> Loaded:
    """A compiled kernel, loaded on the device of this index, which is the current one.

    Raises: whatever Triton and the driver do, where it is not for this device.
    """
    run = launcher(pointers, descriptors).result()
    metadata = kernel.metadata
    loaded = starting().result().utils.load_binary(kernel.name, kernel.kernel, metadata.shared, index)
    _, function, _, _, threads = loaded
    if metadata.num_warps * metadata.target.warp_size > threads:
        raise RuntimeError(f"{metadata.num_warps} warps take more registers than there are")
    # launch_metadata, launch_enter_hook, launch_exit_hook: profilers that hook into triton are not served.
    hooks = (kernel.packed_metadata, None, None, None)
    if hasattr(run, "launch") and not hasattr(run, "arg_annotations"):
        # Triton 3.6: its launcher less a look, at every call, at the scratch memory that kernels have none of.
        return Loaded(run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks))
    return Loaded(run, (function, *hooks))
