"""Weights: operands of a product that a layer has, and not its tokens."""

from __future__ import annotations

from collections.abc import Set

from ..dtype import is_float
from ..expr import Expr, Load, divides, loads, reductions
from ..program import BESIDE, Program, Value


def has_weight(program: Program, v: Value) -> bool:
    """Whether an operand of the product is a parameter, or a matrix where the other has batch axes; or either changed
    by what is made of such (normalised, with an update of low rank). A product of weights (learned queries) is none,
    nor are rows that tokens pick (embeddings).
    """
    rank, picked = rank_of(program, v), _picked(v)
    return any(is_weight(program, s, rank) for s in _operands_of(program, v) if s.name not in picked)


def _picked(v: Value) -> set[str]:
    """What a product multiplies at places that data decides."""
    assert v.expr is not None
    return {n.source for n in _multiplied(v.expr) if any(loads(i) for i in n.index)}


def _operands_of(program: Program, v: Value) -> list[Value]:
    """The floats that are multiplied, where some are: a bias that is added to products is none."""
    return [s for r in operand_names(v) if is_float((s := program.by_name[r]).dtype)]


def operand_names(v: Value) -> list[str]:
    """What is multiplied, or all that is read where no product is."""
    assert v.expr is not None
    multiplied = {n.source for n in _multiplied(v.expr)}
    return [r for r in v.reads if r in (multiplied or v.reads)]


def _multiplied(e: Expr) -> list[Load]:
    return [n for r in reductions(e) for n in loads(r.body)]


def rank_of(program: Program, v: Value) -> int:
    """The most axes that an operand of `v` has, less those along which it is repeated (`x[:, None] * y`)."""
    operands = _operands_of(program, v)
    shapes = [s.shape for s in operands]
    by_element = v.expr is not None and not reductions(v.expr)
    alike = [by_element and len(s) == len(v.shape) for s in shapes]
    repeated = [sum(n == 1 < whole for n, whole in zip(s, v.shape)) if a else 0 for s, a in zip(shapes, alike)]
    rank = max((len(s) - n for s, n in zip(shapes, repeated)), default=0)
    return rank + 1 if rank == 2 and any(_has_rows_of_batch(program, s) for s in operands) else rank


def _has_rows_of_batch(program: Program, v: Value) -> bool:
    """Whether the rows of a matrix are those of all members of a batch, one after another: a layer's result."""
    known = {f.name: f for f in program.facts}
    waiting, seen = [v], {v.name}
    while waiting:
        made = waiting.pop()
        made = known.get(made.name, made)
        for n in loads(made.expr) if made.expr is not None and len(made.axes) == 2 else ():
            if len(n.index) > 2 and divides(n):
                return True
            if n.source not in seen and n.source in program.by_name:
                seen.add(n.source)
                waiting.append(program.by_name[n.source])
    return False


def is_weight(program: Program, v: Value, rank: int) -> bool:
    """Whether an operand, one of a value whose operands have at most `rank` axes, is a weight or made of weights."""
    if v.expr is None:
        # A fact is what the forward pass has computed: tokens, not weights, whatever axes a product gave them.
        made = v.name in program.tokens or any(f.name == v.name for f in program.facts)
        if v.why == BESIDE:
            return all(is_weight(program, program.by_name[r], rank) for r in v.reads)
        return v.op == "parameter" or (v.op == "input" and len(v.axes) == 2 < rank and not made)
    if len(v.axes) != 2 or reductions(v.expr) or not v.reads:
        return False
    reads = [program.by_name[r] for r in v.reads]
    return any(is_weight(program, r, rank) for r in reads) and all(_of_weights(program, r, rank) for r in reads)


def tokens_of(program: Program, names: Set[str]) -> frozenset[str]:
    """Those of the matrices that a program computes that are no weights, nor made of these alone."""
    made = (v for v in map(program.by_name.__getitem__, names) if v.expr is not None and len(v.axes) == 2)
    return frozenset(v.name for v in made if not is_weight(program, v, len(v.axes) + 1))


def _of_weights(program: Program, v: Value, rank: int) -> bool:
    if v.expr is None:
        return is_weight(program, v, rank)
    return all(_of_weights(program, program.by_name[r], rank) for r in v.reads)
