"""Classes of modules whose instances are compiled: `@fl.compile` above a class."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Where an instance keeps what calls it; copies and pickles make their own.
KEPT = "_fl_pallas_call"


def compiled_class(cls: type[nn.Module], compiled: Callable[[Any], Any]) -> type[nn.Module]:
    """`cls` itself, below a decorator, or a subclass by its name where it has that already (`Fast = compile(Slow)`);
    instances run compiled from their first call on.

    By its name methods may ask for it, as in `super(Attention, self).__init__()`: it has to be the class they are of.

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

    inherited = cls.__getstate__

    def state(self: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in inherited(self).items() if name != KEPT}

    # What PyTorch's Module.compile would set on an instance, which its calls go through.
    body = {"_compiled_call_impl": property(call), "__getstate__": state}
    if _has_its_name(cls):
        named = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
        return type(cls.__name__, (cls,), body | named)
    for name, value in body.items():
        setattr(cls, name, value)
    return cls


def _has_its_name(cls: type) -> bool:
    """Whether a class is known by its name where `fl.compile` is called, or in its module: no decorator calls then."""
    frame = sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame = frame.f_back
    own = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    return any(names.get(cls.__name__) is cls for names in (frame.f_locals, frame.f_globals, own))
