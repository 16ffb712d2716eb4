"""Operands that PyTorch makes, and rounds for a product in 16 bits, are loaded as they are rounded.

A cast is a view: kernels would load what is rounded, twice as many bytes, and send it through registers.
"""

from __future__ import annotations

from ..program import Program, Value
from .grow_regions import grow_regions
from .region import Growth
from .resolve_views import is_narrower, readers, resolve_views, root_of


def grow_rounded(viewed: Program) -> tuple[Program, Growth, frozenset[str]]:
    """A Program with its views → it without, its regions, and which of its casts are values of their own."""
    program = resolve_views(viewed)
    growth = grow_regions(program)
    inside = frozenset(m for region in growth.regions for m in region.members)
    rounded = frozenset(
        v.name for v in viewed.values if _narrows(viewed, v, inside) and readers(viewed, v.name) & inside
    )
    if rounded:
        program = resolve_views(viewed, rounded=rounded)
        growth = grow_regions(program)
    return program, growth, rounded


def _narrows(viewed: Program, v: Value, inside: frozenset[str]) -> bool:
    """Whether `v` is a cast, to fewer bits, of what PyTorch makes by an operation that can round along with it."""
    if not is_narrower(v):
        return False
    made = viewed.by_name[root_of(viewed, v.name)]
    return made.expr is not None and not made.projection and made.name not in inside
