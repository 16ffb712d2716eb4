"""Copies that PyTorch would make of what kernels store, for its own operations: the kernels store them as they lie.

Behind attention heads go side by side, for the layer that mixes them. Before: a kernel stores o[b, h, i, d], which
PyTorch copies to c[b, i, h, d]. After: the kernel stores c.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from ..expr import Load, index
from ..program import Program, Value
from .grow_regions import Growth
from .resolve_views import inline_load, readers, resolve_views
from .surround import uses_division

COPY = "aten.clone.default"


def store_copies(viewed: Program, program: Program, growth: Growth) -> tuple[Program, Growth]:
    """A Program as it was before its views were resolved, and after; its regions → the two with copies for results."""
    inside = frozenset(m for region in growth.regions for m in region.members)
    results = (name for region in growth.regions for name in region.outputs)
    copies = {name: chain[-1].name for name in results if (chain := copied(viewed, name, inside))}
    if not copies:
        return program, growth
    regions = (replace(r, outputs=tuple(copies.get(n, n) for n in r.outputs)) for r in growth.regions)
    return resolve_views(viewed, frozenset(copies.values())), replace(growth, regions=tuple(regions))


def copied(program: Program, name: str, inside: Set[str], later: Set[str] = frozenset()) -> tuple[Value, ...]:
    """The views that lead from a value to a copy of it through which alone all others see it; empty if there is none,
    or if what lies side by side would not do so in the copy.

    Args:
      program: with its views.
      inside: what kernels compute. Of what they read PyTorch makes no copy.
      later: what is not looked at.
    """
    chain = [program.by_name[name]]
    while chain[-1].op != COPY or len(chain) == 1:
        last = chain[-1]
        users = [u for u in program.users[last.name] if u not in later]
        if last.name in program.outputs or len(users) != 1:
            return ()
        view = program.by_name[users[0]]
        if not view.is_view or view.expr is None or (view.numel, view.dtype) != (last.numel, last.dtype):
            return ()
        if uses_division(view.expr):
            return ()
        chain.append(view)
    read = readers(program, chain[-1].name)
    along = _seen(chain[1:]).index[-1]
    last = next((a for a in reversed(chain[-1].axes) if a.extent > 1), chain[-1].axes[-1])
    return tuple(chain[1:]) if read and not read & inside and along is index(last) else ()


def seen_through(chain: tuple[Value, ...], value: Value) -> Value:
    """The last of some views, each of the one before, in terms of what the first is a view of: `value`."""
    return replace(chain[-1], expr=inline_load(_seen(chain), value))


def _seen(chain: Sequence[Value]) -> Load:
    """The last of some views, each of the one before, as a load of what the first is a view of."""
    expr = chain[-1].expr
    for v in reversed(chain[:-1]):
        assert isinstance(expr, Load)
        expr = inline_load(expr, v)
    assert isinstance(expr, Load)
    return expr
