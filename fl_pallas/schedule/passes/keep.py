"""What a forward pass keeps for a backward pass: bytes against recomputation."""

from __future__ import annotations

from ..expr import reductions
from ..program import Program
from .grow_regions import grow_regions
from .resolve_views import resolve_views, root_of


def kept(program: Program) -> frozenset[str]:
    """Names of the values of a forward Program that a backward pass reads from memory; the others it computes again.

    What PyTorch computes is kept, as PyTorch itself would. Of what kernels compute, their results are, and
    reductions no larger than a result (the statistics of a row); the rest is a blow-up, or cheap.
    """
    program = resolve_views(program)
    found = {v.name for v in program.values if not v.is_view}
    for region in grow_regions(program).regions:
        members = [program.by_name[m] for m in region.members]
        results = {root_of(program, name) for name in region.outputs}
        largest = max(program.by_name[name].numel for name in results)
        found -= {
            v.name
            for v in members
            if v.name not in results and not (v.expr is not None and reductions(v.expr) and v.numel <= largest)
        }
    return frozenset(found)
