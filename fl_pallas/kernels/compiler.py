"""A process that compiles Triton IR for another: a program that imports Triton alone, and reads and writes JSON.

In one process, threads that compile wait for each other's turn at Python, and for the user's (`processes.py`).
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
from typing import Any, cast

# Seconds without anything to do, after which it ends.
IDLE = 120
# What Triton does otherwise here: kernels are told apart by it, in Triton's cache too.
VERSION = "fl_pallas 1: LLVM assumes nothing of vectors of integers"
# What an operation on vectors of integers lets LLVM assume of each element.
_ASSUMED = re.compile(r"(= \w+)(?: (?:nuw|nsw|exact|disjoint|nneg|samesign))+(?= .*<\d+ x i\d+>)")


def settings() -> str:
    """What of the user's environment Triton's code depends on."""
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return str((sorted(get_cache_invalidating_env_vars().items()), knobs.nvidia.ptxas.path))


def compiled(path: str, capability: int, options: dict[str, Any]) -> Any:
    """Triton's CompiledKernel of the Triton IR in a file.

    Raises: whatever Triton, LLVM, MLIR and ptxas do.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    with knobs.runtime.scope():
        # Triton's own type for it has neither the backend that it is given nor the key that it is asked for.
        knobs.runtime.add_stages_inspection_hook = cast(Any, _without_assumptions)
        return triton.compile(path, target=GPUTarget("cuda", capability, 32), options=options)


def _without_assumptions(backend: Any = None, stages: dict[str, Any] | None = None, *of: Any) -> tuple[str, str] | None:
    """Have LLVM assume nothing of vectors of integers, in the last of its two stages. Of no stages (Triton 3.7 and
    later ask first), what is added to the key of the cache, and its hash."""
    if stages is None:
        return VERSION, VERSION
    optimised = stages["llir"]
    stages["llir"] = lambda module, metadata: unassumed(optimised(module, metadata))
    return None


def unassumed(llir: str) -> str:
    """LLVM IR whose vectors of integers are no longer said not to overflow.

    LLVM (of Triton 3.6) puts two numbers that are shifted into one vector, and says of both that they do not overflow
    where only one is read. Its NVPTX backend makes one number of 64 bits of them, and lets the one that does overflow,
    and is not read, run over into the other: a row's number, and with it a mask, was another one in half of the rows.
    """
    return _ASSUMED.sub(r"\1", llir)


def address(kernel: Any) -> dict[str, str]:
    """Where Triton's cache keeps a CompiledKernel."""
    (name,) = (name for name in kernel.metadata_group if name.endswith(".json"))
    return {"hash": kernel.hash, "name": name}


def answered(asked: dict[str, Any]) -> dict[str, str]:
    """Where the kernel that is asked for is kept; or why there is none; or nothing, for settings are others here. Where
    none is asked for, Triton's hash of its own files, by which it looks kernels up.
    """
    from triton import knobs
    from triton.runtime import cache

    if not asked:
        return {"key": cache.triton_key()}
    if asked["settings"] != settings():
        return {}
    knobs.cache.dir = asked["cache"]
    cache.triton_key = lambda: asked["key"]  # this process has not read its files
    with knobs.nvidia.scope():
        if asked["newest"]:
            knobs.nvidia.ptxas = knobs.nvidia.ptxas_blackwell.path
        try:
            return address(compiled(asked["path"], asked["capability"], asked["options"]))
        except Exception as e:
            return {"error": str(e)}


def main() -> None:
    """Answer a question a line, until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what LLVM prints is no answer
    sys.path[:] = json.loads(sys.argv[1])
    import triton  # noqa: F401  ahead of the first question

    while select.select([sys.stdin], [], [], IDLE)[0] and (line := sys.stdin.readline()):
        answers.write(json.dumps(answered(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
