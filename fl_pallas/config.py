"""Process-wide settings, each declared once, also an environment variable, and checked when set.

| setting     | variable       | values                | meaning                                                  |
|-------------|----------------|-----------------------|----------------------------------------------------------|
| `fallback`  | `FL_FALLBACK`  | torch, error          | run in PyTorch what cannot be fused, or raise            |
| `road`      | `FL_ROAD`      | auto, dlpack, direct  | how kernels are launched                                 |
| `interpret` | `FL_INTERPRET` | auto, 0, 1            | Pallas's interpreter; auto: where there is no GPU        |
| `tune`      | `FL_TUNE`      | a number, off         | choices timed for each kernel; off (0): the model's pick |
| `rest`      | `FL_REST`      | auto, inductor, eager | who computes what no kernel does                         |
| `cache`     | `FL_CACHE`     | a folder, off         | where compiled kernels are kept; empty: the user's cache |
| `cache_mb`  | `FL_CACHE_MB`  | mebibytes             | how much of them is kept                                 |
| `verify`    | `FL_VERIFY`    | 0, 1                  | check the IR after every pass, to debug the compiler     |
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

_Check = tuple[str, Callable[[Any], bool]]


def _one_of(*values: Any) -> _Check:
    return f"one of {', '.join(map(repr, values))}", lambda v: any(
        v is x or (v == x and type(v) is type(x)) for x in values
    )


def _count(most: int) -> _Check:
    return f"a whole number up to {most}", lambda v: type(v) is int and 0 <= v <= most


_ALLOWED: dict[str, _Check] = {
    "fallback": _one_of("torch", "error"),
    "road": _one_of("auto", "dlpack", "direct"),
    "interpret": _one_of(None, False, True),
    "tune": ("a whole number up to 64, or 'off'", _count(64)[1]),
    "rest": _one_of("auto", "inductor", "eager"),
    "cache": ("a folder or 'off'", lambda v: isinstance(v, str)),
    "cache_mb": _count(2**20),
    "verify": _one_of(False, True),
}
OFF = "off"
_SWITCH = {"0": False, "1": True}
_TEXT: dict[str, dict[str, bool | None]] = {"interpret": {"auto": None, **_SWITCH}, "verify": {**_SWITCH}}


@dataclass
class Config:
    """The settings; assigning a value that is not allowed raises ConfigError."""

    fallback: str = "torch"
    road: str = "auto"
    interpret: bool | None = None
    tune: int = 8
    rest: str = "auto"
    cache: str = ""
    cache_mb: int = 1024
    verify: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ALLOWED:
            raise ConfigError(f"no setting is called {name!r}; there are {', '.join(_ALLOWED)}")
        if name == "tune" and value == OFF:
            value = 0
        expected, allowed = _ALLOWED[name]
        if not allowed(value):
            raise ConfigError(f"{name}={value!r}: expected {expected}")
        super().__setattr__(name, value)

    def merged(self, **given: Any) -> Config:
        """A copy in which the given settings that are not None replace these.

        Raises: ConfigError.
        """
        made = Config(**{f.name: getattr(self, f.name) for f in fields(self)})
        for name, value in given.items():
            if value is not None:
                setattr(made, name, value)
        return made


def from_environment() -> Config:
    """The settings as the FL_* variables give them.

    Raises: ConfigError.
    """
    given: dict[str, Any] = {}
    for f in fields(Config):
        variable = f"FL_{f.name.upper()}"
        text = os.environ.get(variable)
        if text is None:
            continue
        given[f.name] = text
        if f.name in _TEXT:
            values = _TEXT[f.name]
            if text not in values:
                raise ConfigError(f"{variable}={text!r}: expected one of {', '.join(values)}")
            given[f.name] = values[text]
        elif f.type == "int" and (f.name, text) != ("tune", OFF):
            if not text.isdecimal():
                raise ConfigError(f"{variable}={text!r}: expected a whole number")
            given[f.name] = int(text)
    return Config(**given)


def share_gpu_memory() -> None:
    """Keep JAX from taking most of the GPU's memory when it starts, unless the user decided otherwise."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


config = from_environment()
