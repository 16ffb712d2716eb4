"""Triton as the user set it up, with files of ours: Inductor sets it up for itself, once it compiles."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from .. import cache
from ..meanwhile import Meanwhile

# What Inductor says in the environment of the whole process where the user does not: its folder of Triton's files,
# PyTorch's own ptxas, a library of the CUDA toolkit. Read before it does, and each None where the user said nothing.
CHOSEN = {name: os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH")}


def as_chosen() -> Meanwhile:
    """Triton's settings are the user's meanwhile, and its files are kept in our cache, unless the user chose a place
    for them. To be left soon: Inductor's kernels are compiled and kept so too.
    """
    return _as_chosen


def environment() -> dict[str, str]:
    """The environment less what Inductor says in it."""
    said = {**os.environ, **CHOSEN}
    return {name: value for name, value in said.items() if value is not None}


def folder() -> str:
    """Where Triton's files of our kernels are kept."""
    from triton import knobs  # triton is not everywhere

    own = cache.triton_folder()
    return str(knobs.cache.dir if own is None or CHOSEN["TRITON_CACHE_DIR"] is not None else own)


@contextlib.contextmanager
def _set() -> Iterator[None]:
    from triton import knobs  # triton is not everywhere

    # What assigns to the attributes writes to the environment too, which Inductor reads in other threads.
    wanted = [
        (vars(knobs.nvidia), "ptxas", CHOSEN["TRITON_PTXAS_PATH"]),
        (vars(knobs.nvidia), "libdevice_path", CHOSEN["TRITON_LIBDEVICE_PATH"]),
        (vars(knobs.cache), "dir", folder()),
    ]
    before = [(place, name, place[name]) for place, name, _ in wanted if name in place]
    for place, name, value in wanted:
        place[name] = value
    try:
        yield
    finally:
        for place, name, _ in wanted:
            del place[name]
        for place, name, value in before:
            place[name] = value


_as_chosen = Meanwhile(_set)
