"""Frames that TorchDynamo gives up: PyTorch runs what is in them, and no graph reaches us to say so."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable
from typing import Any

from torch._dynamo.utils import CompilationMetrics, counters, get_compilation_metrics

from ..errors import SourceLoc, Unsupported

# By file and line. TorchDynamo never looks at the code of such a frame again, whoever compiles it.
_known: dict[tuple[str, int], Unsupported] = {}
_read = 0  # when the last frame was begun of which TorchDynamo's report was read, in µs


def frames() -> int:
    """How many frames TorchDynamo has looked at."""
    return counters["frames"]["total"]


def skipped(count: int) -> list[Unsupported]:
    """Why TorchDynamo gave up frames, of the `count` last ones that it looked at."""
    global _read
    # Some frames have no report (those that yield): then the last ones were read before.
    new = [m for m in get_compilation_metrics()[-count:] if count and (m.start_time_us or 0) > _read]
    given_up = [m for m in new if m.fail_type == "Unsupported"]
    refusals = [_refusal(m) for m in given_up]
    _known.update(((m.co_filename or "", m.co_firstlineno or 0), r) for m, r in zip(given_up, refusals, strict=True))
    _read = max([_read, *(m.start_time_us or 0 for m in new)])
    return refusals


def known(fn: Callable[..., Any]) -> list[Unsupported]:
    """Why TorchDynamo gave up frames of a function, or of a module's `forward`, before now."""
    code = getattr(getattr(fn, "forward", fn), "__code__", None)
    if code is None:
        return []
    if inspect.isgeneratorfunction(fn):
        where = SourceLoc(code.co_filename, code.co_firstlineno)
        return [Unsupported(code.co_name, "TorchDynamo traces no function that yields", where)]
    lines = range(code.co_firstlineno, max(line or 0 for _, _, line in code.co_lines()) + 1)
    return [refusal for (file, line), refusal in _known.items() if file == code.co_filename and line in lines]


def _refusal(m: CompilationMetrics) -> Unsupported:
    # What is behind a break is a frame of its own, under a name that holds that of the function.
    name = re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", m.co_name or "")
    # Its own words behind a heading, or the first line of what there is.
    said = ((m.fail_reason or "").partition("Explanation: ")[2] or m.fail_reason or "").partition("\n")[0]
    file, line = m.fail_user_frame_filename or m.co_filename or "", m.fail_user_frame_lineno or m.co_firstlineno or 0
    where = SourceLoc(file, line, linecache.getline(file, line).strip())
    return Unsupported(name, f"TorchDynamo gives no graph of it ({said})", where)
