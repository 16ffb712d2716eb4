"""What ptxas is known to get wrong, and how machine code shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from functools import cached_property

# The upper half of a 64-bit sum, in uniform registers or in those of a thread, which takes the carry of the lower one;
# a register that becomes 0.
_UPPER = re.compile(r"IADD3\.X U?R\d+, (U?R\d+)(?:\.reuse)?, (-?0x[0-9a-f]+), U?RZ, U?P\d, !U?PT")
_ZERO = re.compile(r"\*/\s+(?:U?MOV (U?R\d+), U?RZ|IMAD\.MOV\.U32 (R\d+), RZ, RZ, RZ|CS2R\S* (R\d+), SRZ) ")
_WRITTEN = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+) (U?R)(\d+)")
# A sum of pairs of 16-bit numbers that has lost its constant.
_NOTHING_ADDED = re.compile(r"VIADD\.16x2 \S+ \S+ (?:(?:0x)?0|RZ) ;")


def is_miscompiled(sass: str) -> bool:
    """Whether the upper half of a descriptor is not what it should be, or a sum of 16-bit pairs adds nothing.

    A descriptor of a matrix in shared memory is an address, zero extended, and constants in the upper half. ptxas of
    CUDA 12.8, which Triton 3.6 brings, takes the address from a register that has something else, and the upper half
    from it or from its neighbour (where the matrix begins where that of another product did, or a pointer was in the
    registers before); that of 12.9 does not. The product then reads elsewhere, or outside of shared memory. The second
    is done by all of 12.8 to 13.0 where one of the pair is not used.
    """
    if _NOTHING_ADDED.search(sass):
        return True
    zero: set[str] = set()
    for line in sass.splitlines():
        if (upper := _UPPER.search(line)) and _is_of_descriptor(int(upper[2], 16)) and upper[1] not in zero:
            return True
        if written := _WRITTEN.search(line):
            changed = {f"{written[2]}{int(written[3]) + n}" for n in range(_width(written[1]))}
            zero = zero | changed if _ZERO.search(line) else zero - changed
    return False


def _is_of_descriptor(upper: int) -> bool:
    """Whether a constant is the upper half of a descriptor: how rows are interleaved in the first two bits, and how far
    apart eight of them are in the last 14."""
    return upper & 0xC0000000 != 0 and upper & 0x3FFF0000 == 0


# Of PTX: an instruction's results; a matrix instruction and its operand in registers; labels, jumps, ends.
_RESULTS = re.compile(r"\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)")
_BY_REGISTERS = re.compile(r"\s*wgmma\.mma_async\S*\s+\{[^}]*\}, \{([^}]*)\}")
_LABEL = re.compile(r"(\$L__BB\w+):")
_JUMP = re.compile(r"(@\S+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+)")
_END = re.compile(r"^\s*ret;")
# The same of machine code, by addresses; a copy of a register, or zeros; columns of a matrix instruction's result.
_RESULT = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+) (?:P\w, )?R(\d+)")
_TAKEN = re.compile(r"HGMMA\S* R\d+, R(\d+)")
_ADDRESS = re.compile(r"/\*([0-9a-f]{4,})\*/")
_BRANCH = re.compile(r"\*/\s+(@\S+ )?BRA\S* (?:U?P\w+, )?0x([0-9a-f]+)")
_EXIT = re.compile(r"\*/\s+EXIT")
_COPY = re.compile(r"\*/\s+(?:(?:MOV|IMAD\.MOV\.U32) R\d+, (?:RZ, RZ, )?R[\dZ]+|CS2R(?:\.32)? R\d+, SRZ)")
# A number of the code, or zeros, that a register becomes; what a copy of a register has.
_NUMBER = re.compile(r"\*/\s+(?:MOV R\d+, (RZ|0x\w+)|IMAD\.MOV\.U32 R\d+, RZ, RZ, (RZ|0x\w+)|CS2R(?:\.32)? R\d+, SRZ)")
_COPIED = "R"
_COLUMNS = re.compile(r"HGMMA\.64x(\d+)x")


def steady_operands(ptx: str) -> list[bool]:
    """Of each matrix instruction that takes an operand in registers: whether a loop comes to it again without writing
    them."""
    lines = ptx.splitlines()
    labels = {m[1]: n for n, line in enumerate(lines) if (m := _LABEL.match(line))}
    after = _successors(lines, _JUMP, _END, labels.__getitem__)
    writing: dict[str, set[int]] = {}
    for n, line in enumerate(lines):
        for register in re.findall(r"%\w+", m[1]) if (m := _RESULTS.match(line)) else ():
            writing.setdefault(register, set()).add(n)
    found = []
    for n, line in enumerate(lines):
        if m := _BY_REGISTERS.match(line):
            written = set().union(*(writing.get(r, ()) for r in re.findall(r"%\w+", m[1])))
            found.append(n in _reached(n, after, written))
    return found


def shared_operands(ptx: str) -> list[int | None]:
    """Of each matrix instruction that takes an operand in registers: which of them took the same ones before it, with
    nothing written to them in between."""
    found: list[int | None] = []
    taken: dict[tuple[str, ...], int] = {}
    for line in ptx.splitlines():
        if m := _BY_REGISTERS.match(line):
            operand = tuple(re.findall(r"%\w+", m[1]))
            found.append(taken.get(operand))
            taken[operand] = len(found) - 1
        elif m := _RESULTS.match(line):
            written = {*re.findall(r"%\w+", m[1])}
            taken = {operand: n for operand, n in taken.items() if written.isdisjoint(operand)}
    return found


def loses_operand(sass: str, steady: Sequence[bool]) -> bool:
    """Whether a matrix instruction takes registers that a loop should not write, and does.

    ptxas (12.8, 12.9) may not keep the registers of an operand that is the same in a whole loop: from the second
    iteration on it is whatever they were used for.

    Args:
      steady: `steady_operands` of the PTX, whose order of matrix instructions ptxas keeps.
    """
    code = _Code(sass)
    if len(code.products) != len(steady):
        return True
    for (n, register), is_steady in zip(code.products, steady, strict=True):
        if is_steady:
            last = code.last_written(n, {*range(register, register + 4)})
            if any(not _COPY.search(code.lines[k]) for k in last & _reached(n, code.after, set())):
                return True
    return False


def loses_constant(sass: str, shared: Sequence[int | None]) -> bool:
    """Whether a matrix instruction takes a number that is written down in the code, and another one, which takes the
    same operand, does not; or a register that nothing was written to.

    Where some of an operand's numbers are the same whatever the kernel reads, ptxas (12.8, 12.9) may write them to its
    registers ahead of the last instruction that takes them, and no other.

    Args:
      shared: `shared_operands` of the PTX, whose order of matrix instructions ptxas keeps, unless it writes out a loop.
    """
    code = _Code(sass)
    if any(not code.last_written(n, {register + k}) for n, register in code.products for k in range(4)):
        return True
    if len(code.products) != len(shared):
        return False
    for (n, register), other in zip(code.products, shared, strict=True):
        if other is not None:
            first, its_register = code.products[other]
            for k in range(4):
                here, there = code.number(n, register + k), code.number(first, its_register + k)
                if here != there and _COPIED not in (here, there):
                    return True
    return False


class _Code:
    """Machine code, as nvdisasm lists it."""

    def __init__(self, sass: str):
        self._numbered = [(int(m[1], 16), line) for line in sass.splitlines() if (m := _ADDRESS.search(line))]
        self.lines = [line for _, line in self._numbered]
        # Matrix instructions that take an operand in registers, and its first one.
        self.products = [(n, int(m[1])) for n, line in enumerate(self.lines) if (m := _TAKEN.search(line))]

    @cached_property
    def after(self) -> list[list[int]]:
        """The instructions that each goes on to."""
        places = {at: n for n, (at, _) in enumerate(self._numbered)}
        return _successors(self.lines, _BRANCH, _EXIT, lambda at: places[int(at, 16)])

    @cached_property
    def _before(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.lines]
        for n, following in enumerate(self.after):
            for m in following:
                before[m].append(n)
        return before

    @cached_property
    def _writing(self) -> dict[int, set[int]]:
        """The instructions that write each register."""
        writing: dict[int, set[int]] = {}
        for n, line in enumerate(self.lines):
            for register in _written(line):
                writing.setdefault(register, set()).add(n)
        return writing

    def last_written(self, n: int, registers: Set[int]) -> set[int]:
        """The instructions that write to any of the registers, and none does from there to the instruction `n`."""
        writing = set[int]().union(*(self._writing.get(r, ()) for r in registers))
        return _reached(n, self._before, writing, into=True) & writing

    def number(self, n: int, register: int) -> str:
        """The number of the code that a register has at the instruction `n`; `_COPIED` if it may be that of another,
        and nothing where it is computed, or written nowhere."""
        texts = [self.lines[k] for k in self.last_written(n, {register})]
        found = [(_NUMBER.search(text), _COPY.search(text)) for text in texts]
        if any(copy and not number for number, copy in found):
            return _COPIED
        numbers = {(number[1] or number[2] or "RZ") if number else "" for number, _ in found}
        return numbers.pop() if len(numbers) == 1 else ""


def _successors(
    lines: Sequence[str], jump: re.Pattern[str], end: re.Pattern[str], place: Callable[[str], int]
) -> list[list[int]]:
    """The places that each line goes on to, by what a jump looks like (its condition, and where to) and an end."""
    after = []
    for n, line in enumerate(lines):
        found = jump.search(line)
        goes_on = n + 1 < len(lines) and not end.search(line) and (found is None or found[1])
        after.append([*([n + 1] if goes_on else []), *([place(found[2])] if found else [])])
    return after


def _reached(start: int, after: Sequence[Sequence[int]], without: Set[int], into: bool = False) -> set[int]:
    """Where one comes to from a place, itself if one comes back, not beyond some places; or `into` them either."""
    found: set[int] = set()
    waiting = [start]
    while waiting:
        for n in after[waiting.pop()]:
            if n not in found and (into or n not in without):
                found.add(n)
                if n not in without:
                    waiting.append(n)
    return found


def _written(line: str) -> range:
    """Numbers of the registers of a thread that an instruction writes."""
    m = _RESULT.search(line)
    if m is None:
        return range(0)
    columns = _COLUMNS.match(m[1])
    return range(int(m[2]), int(m[2]) + (int(columns[1]) // 2 if columns else _width(m[1])))


def _width(op: str) -> int:
    """How many registers an instruction writes, at most."""
    if "GMMA" in op:
        return 256
    if ".128" in op or "MMA" in op or "LDSM" in op:
        return 4
    return 2 if ".64" in op or ".WIDE" in op or op == "CS2R" else 1
