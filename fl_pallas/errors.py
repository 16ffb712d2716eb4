"""Errors of fl_pallas: what failed, where in the user's code, why, and what would make it work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SourceLoc:
    """A line of the user's program: file, 1-based line number and the text of that line."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}"
        return f"{text} `{self.code}`" if self.code else text


class FlPallasError(Exception):
    """Base of every error raised by fl_pallas."""


class InputError(FlPallasError, ValueError, RuntimeError):
    """The arguments of a compiled function do not fit it (shape, dtype, device); PyTorch raises a RuntimeError then, as
    a rule, and a ValueError for some."""


class ConfigError(FlPallasError, ValueError):
    """An option or an FL_* environment variable has a value that is not allowed."""


class ScheduleError(FlPallasError):
    """The scheduler produced or was given an ill-formed IR: a bug of fl_pallas, never of the user."""


class Unsupported(FlPallasError):
    """Something cannot be fused.

    Args:
      what: the operation (or construct) that stands in the way.
      why: the law or limit that failed.
      where: the user's source line, if known.
    """

    def __init__(self, what: str, why: str, where: SourceLoc | None = None):
        self.what, self.why, self.where = what, why, where
        super().__init__(f"{what}: {why}" + (f" (at {where})" if where else ""))

    def __reduce__(self) -> Any:
        return type(self), (self.what, self.why, self.where)


class NoGradient(Unsupported):
    """A program has no gradient, by eager autograd's rules too: it writes to what its gradient needs."""


@contextlib.contextmanager
def failing(what: str, loudly: bool) -> Iterator[None]:
    """What goes wrong in the compiler itself is a reason to leave `what` to PyTorch, which then says so.

    Args:
      what: is compiled.
      loudly: whether it stays an error, as tests want it.

    Raises: Unsupported.
    """
    try:
        yield
    except (RecursionError, Warning):  # which a user may have made errors
        raise
    except Exception as error:
        known = isinstance(error, FlPallasError) and not isinstance(error, ScheduleError)
        if loudly or known or type(error).__module__.partition(".")[0] == "torch":
            raise
        first = str(error).partition("\n")[0]
        why = f"an error in fl_pallas, which is worth a report ({type(error).__name__}: {first})"
        raise Unsupported(what, why) from error


class FallbackWarning(UserWarning):
    """A program, or part of one, runs in PyTorch although fl_pallas was asked to fuse it."""
