"""What Triton's pipeliner is known to get wrong, and how its IR shows it."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_VIEW = re.compile(r"\s*(%\w+) = ttg\.memdesc_(\w+) (%\w+)\b.*?: !ttg\.memdesc<(\d+)x")
_STORE = re.compile(r"\s*(%\w+) = ttg\.local_alloc %|ttg\.local_store %\w+, (%\w+)")
_COPY = re.compile(r"async_tma_copy_global_to_local %\w+\[[^\]]*\] (%\w+)|async_copy_global_to_local %\w+, (%\w+)")
_PRODUCT = re.compile(r"= ttng\.warp_group_dot (%\w+), (%\w+),.*isAsync = true")
_WAIT = re.compile(r"= ttng\.warp_group_dot_wait .*pendings = (\d+)")
_LOOP = re.compile(r"( *)(?:%\S+ = )?scf\.for ")


@dataclass(frozen=True)
class _Rings:
    """The buffers of a kernel that copies go to.

    Attributes:
      of: of a view, the buffer it is of.
      slots: how many tiles a buffer has room for, one behind the other, where that is not one.
      ahead: copies to it before its loop.
    """

    of: dict[str, str] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    ahead: Counter[str] = field(default_factory=Counter)

    def buffer(self, name: str) -> str:
        return self.of.get(name, name)


def overtakes(ttgir: str) -> bool:
    """Whether a loop copies to, or writes, shared memory that an asynchronous matrix product may still read.

    A ring of buffers has room for one tile more than there are copies under way, for products that have not ended when
    the next copy begins. Triton 3.6 forgets that tile (`loadRequiresAdditionalBuffer`) where a load has a second use,
    in registers.
    """
    lines = ttgir.splitlines()
    bodies = _innermost(lines)
    inside = {n for first, last in bodies for n in range(first, last)}
    rings = _Rings()
    for n, line in enumerate(lines):
        if m := _VIEW.match(line):
            rings.of[m[1]] = rings.buffer(m[3])
            if m[2] == "index":
                rings.slots[m[3]] = int(m[4])
        elif (m := _COPY.search(line)) and n not in inside:
            rings.ahead[rings.buffer(m[1] or m[2])] += 1
    return any(_overtaken(lines[first:last], rings) for first, last in bodies)


def _innermost(lines: Sequence[str]) -> list[tuple[int, int]]:
    """The lines of each loop's body that has no loop inside: the first, and the one behind the last."""
    found: list[tuple[int, int]] = []
    started, end = 0, ""
    for n, line in enumerate(lines):
        if m := _LOOP.match(line):
            started, end = n + 1, f"{m[1]}}}"
        elif end and line.startswith(end):
            found.append((started, n))
            end = ""
    return found


def _overtaken(body: Sequence[str], rings: _Rings) -> bool:
    """The same of one loop: of an iteration, and of another behind it."""
    # Products that have not ended: in which of the two they began, and the buffers that they read.
    running: list[tuple[int, set[str]]] = []
    for turn in range(2):
        for line in body:
            if m := _PRODUCT.search(line):
                running.append((turn, {rings.buffer(m[1]), rings.buffer(m[2])}))
            elif m := _WAIT.search(line):
                running = running[max(0, len(running) - int(m[1])) :]
            elif m := _COPY.search(line):
                to = rings.buffer(m[1] or m[2])
                # The copy is for so many iterations later.
                later = rings.ahead[to]
                if any(to in read and (turn - began + later) % rings.slots.get(to, 1) == 0 for began, read in running):
                    return True
            elif m := _STORE.search(line):
                # Threads write here what they have computed.
                if any(rings.buffer(m[1] or m[2]) in read for _, read in running):
                    return True
    return False


_LOAD = re.compile(r"( *)%(\w+) = tt\.(?:descriptor_)?load .*[ <]tensor<((?:\d+x)+)(?:!tt\.ptr<)?(\w+)>+(?: loc.*)?$")
_NAME = re.compile(r"%(\w+)")
_TAKEN = re.compile(r"= tt\.(?:dot|trans) ")
# Elements of a register, by type.
_PACKED = {"f32": 1, "bf16": 2, "f16": 2}


def copied(ttir: str) -> str:
    """Triton IR in which a matrix product takes a copy of a tile that a loop loads for something else besides, so that
    threads write it to shared memory once the product before has ended."""
    lines = ttir.splitlines()
    bodies = _innermost(lines)
    made: list[str] = []
    second: dict[str, str] = {}
    for n, line in enumerate(lines):
        end = next((last for first, last in bodies if first <= n < last), None)
        if end is None:
            second = {}
        elif _TAKEN.search(line):
            line = _NAME.sub(functools.partial(_renamed, second), line)
        made.append(line)
        m = _LOAD.match(line)
        if end is not None and m and m[4] in _PACKED:
            uses = [later for later in lines[n + 1 : end] if re.search(rf"%{m[2]}\b", later)]
            products = sum(1 for use in uses if _TAKEN.search(use))
            if 0 < products < len(uses):
                second[m[2]] = f"copy_{m[2]}"
                made.append(f"{m[1]}%{second[m[2]]} = {_copy(m[2], f'tensor<{m[3]}{m[4]}>', _PACKED[m[4]])}")
    return "\n".join(made) + "\n"


def _renamed(names: Mapping[str, str], m: re.Match[str]) -> str:
    return f"%{names.get(m[1], m[1])}"


def _copy(name: str, kind: str, packed: int) -> str:
    """An operation that Triton does not see through."""
    how = f'constraints = "=r,r", packed_element = {packed} : i32, pure = true'
    return f'tt.elementwise_inline_asm "mov.b32 $0, $1;" {{{how}}} %{name} : {kind} -> {kind}'
