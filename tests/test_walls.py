"""The one-way flow: what each folder of the package may import, in a fresh interpreter without the rest."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fl_pallas"
FRAMEWORKS = ("torch", "jax", "jaxlib", "triton")

# A bare package stands in for fl_pallas, whose __init__ imports everything.
SCRIPT = """
import importlib, sys, types
package, forbidden, names = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ImportError(f"the wall: {name} is imported")

sys.meta_path.insert(0, Wall())
root = types.ModuleType("fl_pallas")
root.__path__ = [package]
sys.modules["fl_pallas"] = root
for name in names:
    importlib.import_module(name)
    print(name)
found = sorted(set(forbidden) & {name.partition(".")[0] for name in sys.modules})
assert not found, found
"""


def modules(folder: str) -> list[str]:
    """Every module of a folder of the package, the folder's own first."""
    found = pkgutil.walk_packages([str(PACKAGE / folder)], f"fl_pallas.{folder}.")
    return [f"fl_pallas.{folder}", *(m.name for m in found)]


def run(forbidden: tuple[str, ...], names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(PACKAGE), ",".join(forbidden), *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "names, forbidden",
    [
        pytest.param(modules("schedule"), FRAMEWORKS, id="schedule"),
        pytest.param(modules("capture"), ("jax", "jaxlib", "triton"), id="capture"),
        pytest.param(modules("kernels"), ("torch",), id="kernels"),
        pytest.param([f"fl_pallas.{n}" for n in ("errors", "config", "explain")], FRAMEWORKS, id="public"),
    ],
)
def test_imports(names: list[str], forbidden: tuple[str, ...]) -> None:
    done = run(forbidden, names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names


def test_the_wall_stands() -> None:
    """The check itself notices a forbidden import."""
    done = run(("torch",), ["fl_pallas.capture.dtypes"])
    assert done.returncode != 0
    assert "the wall: torch is imported" in done.stderr


def test_every_module_is_behind_a_wall() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert folders == {"schedule", "capture", "kernels", "bridge"}
