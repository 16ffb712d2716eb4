"""The cache on disk: entries come back whole, old ones go, broken ones and unwritable disks do no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton import knobs

import fl_pallas as fl
from fl_pallas import cache
from fl_pallas.bridge import ahead
from fl_pallas.kernels import processes
from fl_pallas.kernels.chosen import CHOSEN, as_chosen


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setitem(CHOSEN, "TRITON_CACHE_DIR", None)
    kept = fl.config.cache, fl.config.cache_mb
    fl.config.cache = str(tmp_path / "cache")
    yield tmp_path / "cache"
    fl.config.cache, fl.config.cache_mb = kept


def entries(place: Path) -> list[Path]:
    return sorted(place.rglob("*.entry"))


def test_an_entry_comes_back(place: Path) -> None:
    assert cache.read("a") is None and cache.is_empty()
    cache.write("a", {"x": [1, "two"]})
    assert cache.read("a") == {"x": [1, "two"]} and not cache.is_empty()
    assert fl.cache.info().entries == 1 and 0 < fl.cache.info().bytes < 100
    assert str(place) in str(fl.cache.info())
    fl.cache.clear()
    assert cache.read("a") is None and fl.cache.info().entries == 0


def test_what_compiles_is_started_early_where_nothing_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a device that has kernels of its own."""
    begun: list[str] = []
    monkeypatch.setattr(processes, "begin", lambda: begun.append("begun"))
    ahead.prepare(torch.device("cpu"))
    assert not begun
    monkeypatch.setattr(ahead, "unavailable", lambda device: None)
    ahead.prepare(torch.device("cuda"))
    assert begun == ["begun"]
    cache.write("a", {})
    ahead.prepare(torch.device("cuda"))
    assert begun == ["begun"]


def test_a_broken_entry_is_none(place: Path) -> None:
    cache.write("a", {"x": 1})
    entries(place)[0].write_text('{"x"')
    assert cache.read("a") is None
    cache.write("a", {"x": 2})
    assert cache.read("a") == {"x": 2}


def test_what_was_used_last_stays(place: Path) -> None:
    fl.config.cache_mb = 1
    text = "x" * 400_000
    for age, name in ((30, "old"), (20, "used"), (10, "new")):
        cache.write(name, {"text": text})
        path = next(p for p in entries(place) if p.stem == name)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
        if name == "used":
            cache.read("used")
    assert [p.stem for p in entries(place)] == ["new", "used"]
    assert fl.cache.info().bytes <= 2**20


def test_a_kernel_of_tritons_goes_whole(place: Path) -> None:
    """It takes some of a kernel's files for all, and does not compile again; one that was used lately stays."""
    fl.config.cache_mb = 1
    with as_chosen():
        folder = Path(knobs.cache.dir)
    for age, name in ((30, "used"), (20, "old")):
        for kind in ("json", "cubin"):
            path = folder / name / f"kernel.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x" * 300_000)
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    os.utime(folder / "used" / "kernel.json")
    cache.write("new", {"text": "x" * 10_000})
    assert {p.parent.name for p in folder.rglob("*.*")} == {"used"} and len(list(folder.rglob("*.*"))) == 2


def test_off(place: Path) -> None:
    fl.config.cache = "off"
    cache.write("a", {})
    assert cache.read("a") is None and not place.exists()
    assert str(fl.cache.info()) == "the cache is off"
    fl.cache.clear()


def test_a_disk_that_refuses(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fl.config.cache = str(tmp_path / "file")
    cache.write("a", {})
    assert cache.read("a") is None


# The package by its place alone: what it imports takes many times as long as what is looked at.
WRITER = """
import sys
from types import ModuleType
package = sys.modules["fl_pallas"] = ModuleType("fl_pallas")
package.__path__ = [sys.argv[3]]
from fl_pallas import cache
from fl_pallas.bridge import ahead
from fl_pallas.config import config
config.cache, n = sys.argv[1], int(sys.argv[2])
for k in range(200):
    cache.write(f"k{k % 5}", {"by": n, "text": "x" * 5000})
    entry = cache.read(f"k{k % 5}")
    assert entry is not None and len(entry["text"]) == 5000, entry
"""


def test_several_processes(place: Path) -> None:
    command, package = [sys.executable, "-c", WRITER, str(place)], str(Path(fl.__file__).parent)
    running = [subprocess.Popen([*command, str(n), package], stderr=subprocess.PIPE, text=True) for n in range(3)]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert len(entries(place)) == 5


def test_a_key_knows_its_parts() -> None:
    assert cache.key_of("a", 1) == cache.key_of("a", 1)
    assert len({cache.key_of("a", 1), cache.key_of("a", 2), cache.key_of("a1"), cache.key_of("a", "b", 1)}) == 4
