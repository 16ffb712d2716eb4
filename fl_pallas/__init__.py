"""fl_pallas: attention written in plain PyTorch, compiled to fused Pallas kernels."""

from . import cache
from .api import compile, explain
from .config import config
from .errors import ConfigError, FallbackWarning, FlPallasError, InputError, Unsupported
from .explain import Explanation

__all__ = [
    "ConfigError",
    "Explanation",
    "FallbackWarning",
    "FlPallasError",
    "InputError",
    "Unsupported",
    "cache",
    "compile",
    "config",
    "explain",
]
