"""Classes of modules whose instances are compiled: `@fl.compile` above a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Where an instance keeps what calls it; copies and pickles make their own.
KEPT = "_fl_pallas_call"


def compiled_class(cls: type[nn.Module], compiled: Callable[[Any], Any]) -> type[nn.Module]:
    """A subclass, by the name of `cls`, whose instances run compiled from their first call on.

    Args:
      compiled: compiles a method.
    """

    def call(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            return None  # what is compiled around it takes it along
        kept = self.__dict__
        if KEPT not in kept:
            kept[KEPT] = compiled(self._call_impl)
        return kept[KEPT]

    def state(self: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in cls.__getstate__(self).items() if name != KEPT}

    # What PyTorch's Module.compile would set on an instance, which its calls go through.
    body = {"_compiled_call_impl": property(call), "__getstate__": state, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), body | {"__doc__": cls.__doc__, "__qualname__": cls.__qualname__})
