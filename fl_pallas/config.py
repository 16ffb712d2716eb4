"""Process-wide settings, each declared once, also an environment variable, and checked when set.

| setting     | variable       | values                 | meaning                                            |
|-------------|----------------|------------------------|----------------------------------------------------|
| `fallback`  | `FL_FALLBACK`  | torch, error           | run in PyTorch what cannot be fused, or raise      |
| `road`      | `FL_ROAD`      | auto, dlpack, direct   | how kernels are launched                           |
| `interpret` | `FL_INTERPRET` | auto, 0, 1             | Pallas's interpreter; auto: where there is no GPU  |
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "fallback": ("torch", "error"),
    "road": ("auto", "dlpack", "direct"),
    "interpret": (None, False, True),
}
_TEXT = {"auto": None, "0": False, "1": True}


@dataclass
class Config:
    """The settings; assigning a value that is not allowed raises ConfigError."""

    fallback: str = "torch"
    road: str = "auto"
    interpret: bool | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ALLOWED:
            raise ConfigError(f"no setting is called {name!r}; there are {', '.join(_ALLOWED)}")
        if value not in _ALLOWED[name]:
            raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, _ALLOWED[name]))}")
        super().__setattr__(name, value)

    def merged(self, **given: Any) -> Config:
        """A copy in which the given settings that are not None replace these.

        Raises: ConfigError.
        """
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return Config(**{**kept, **{k: v for k, v in given.items() if v is not None}})


def from_environment() -> Config:
    """The settings as the FL_* variables give them.

    Raises: ConfigError.
    """
    given = {f.name: os.environ[f"FL_{f.name.upper()}"] for f in fields(Config) if f"FL_{f.name.upper()}" in os.environ}
    if "interpret" in given:
        if given["interpret"] not in _TEXT:
            raise ConfigError(f"FL_INTERPRET={given['interpret']!r}: expected one of {', '.join(_TEXT)}")
        given["interpret"] = _TEXT[given["interpret"]]  # type: ignore[assignment]
    return Config(**given)  # type: ignore[arg-type]


def share_gpu_memory() -> None:
    """Keep JAX from taking most of the GPU's memory when it starts, unless the user decided otherwise."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


config = from_environment()
