"""What was compiled before, on disk: chosen kernels as Triton IR, and the cubins Triton made of them.

A folder for each version of what makes kernels (this package, JAX, Triton), so that an old entry is never
read by new code. Several processes may share it: entries appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import platformdirs

from .config import config

# The folder of Triton's own files.
TRITON = "triton"


@dataclass(frozen=True)
class Info:
    """The cache as it is: its folder (None: switched off), entries, and their size and limit in bytes."""

    folder: Path | None
    entries: int
    bytes: int
    limit: int

    def __str__(self) -> str:
        if self.folder is None:
            return "the cache is off"
        return f"{self.folder}: {self.entries} kernels, {self.bytes / 2**20:.1f} of {self.limit / 2**20:.0f} MiB"


def info() -> Info:
    """Look at the cache."""
    root = folder()
    files = list(_files(root)) if root else []
    entries = sum(p.suffix == ".entry" for p, _ in files)
    return Info(root, entries, sum(s.st_size for _, s in files), config.cache_mb * 2**20)


def clear() -> None:
    """Remove everything that was cached, whatever version it is of."""
    root = folder()
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)


def folder() -> Path | None:
    """Where the cache is; None if it is switched off."""
    if config.cache == "off":
        return None
    return Path(config.cache or platformdirs.user_cache_dir("fl_pallas", appauthor=False))


def key_of(*parts: object) -> str:
    """The name of an entry: equal for parts that print equally."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:40]


def read(key: str) -> dict[str, Any] | None:
    """The entry of this key; None if there is none, or none that can be read."""
    place = _place()
    if place is None:
        return None
    path = place / f"{key}.entry"
    try:
        entry = json.loads(path.read_text())
        os.utime(path)  # what was used last is removed last
    except (OSError, ValueError):
        return None
    return entry


def write(key: str, entry: dict[str, Any]) -> None:
    """Keep an entry, and remove the oldest ones where the limit is passed. A disk that refuses is no error."""
    place = _place()
    if place is None:
        return
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place, suffix=".part")
        with os.fdopen(handle, "w") as f:
            json.dump(entry, f)
        os.replace(name, place / f"{key}.entry")
        _prune()


def is_empty() -> bool:
    """Whether nothing is kept by this version."""
    place = _place()
    return place is None or not any(place.glob("*.entry"))


def triton_folder() -> Path | None:
    """Where Triton's own files are kept; None if the cache is switched off."""
    place = _place()
    return None if place is None else place / TRITON


def _place() -> Path | None:
    root = folder()
    return None if root is None else root / _version()


@functools.cache
def _version() -> str:
    """Names everything that a kernel's code depends on, but the kernel."""
    names = ("jax", "jaxlib", "triton", "torch")
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return key_of(*(f"{n} {_installed(n)}" for n in names), source.hexdigest())[:16]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in root.rglob("*"):
        # Another process may remove it meanwhile.
        with contextlib.suppress(OSError):
            if path.is_file():
                yield path, path.stat()


def _prune() -> None:
    root = folder()
    assert root is not None
    units: dict[Path, list[tuple[Path, os.stat_result]]] = {}
    for path, stat in _files(root):
        # Triton takes some files of a kernel, which are a folder's, for all.
        unit = path.parent if path.parent.parent.name == TRITON else path
        units.setdefault(unit, []).append((path, stat))
    excess = sum(s.st_size for files in units.values() for _, s in files) - config.cache_mb * 2**20
    for files in sorted(units.values(), key=lambda files: max(s.st_mtime for _, s in files)):
        if excess <= 0:
            return
        for path, stat in files:
            path.unlink(missing_ok=True)
            excess -= stat.st_size
