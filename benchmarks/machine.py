"""What figures depend on: the GPU, versions, the code."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def machine(device: torch.device, commit: str) -> dict[str, Any]:
    """What the figures depend on."""
    found: dict[str, Any] = {name: _installed(name) for name in ("torch", "jax", "jaxlib", "triton", "fl_pallas")}
    found |= {"python": platform.python_version(), "commit": commit or _commit()}
    found["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    else:
        found["gpu"] = f"none: {platform.processor() or platform.machine()}, interpret mode"
    return found


def _installed(name: str) -> str:
    if name == "torch":
        return torch.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    changed = "-changed" if _output("git", "status", "--porcelain", "--untracked-files=no") else ""
    return (_output("git", "rev-parse", "--short=12", "HEAD") or "unknown") + changed


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
