"""Copies that PyTorch would make of what kernels store, for its own operations: the kernels store them as they lie.

Behind attention heads go side by side, for the layer that mixes them. Before: a kernel stores o[b, h, i, d], which
PyTorch copies to c[b, i, h, d]. After: the kernel stores c.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from ..dtype import itemsize
from ..expr import Load, Reduce, free_axes, index
from ..inner import factors
from ..program import Program, Value
from .region import Growth
from .resolve_views import inline_load, readers, resolve_views
from .surround import uses_division

COPY = "aten.clone.default"


def store_copies(
    viewed: Program, program: Program, growth: Growth, rounded: Set[str] = frozenset()
) -> tuple[Program, Growth]:
    """A Program with its views, and without; its regions → the two latter with copies for results, or with views that
    PyTorch goes on with: in the dimensions of an input, and not those of a batch of products.

    Args:
      rounded: casts that are no views.
    """
    inside = frozenset(m for region in growth.regions for m in region.members)
    results = (name for region in growth.regions for name in region.outputs)
    chains = {n: copied(viewed, n, inside) or _as_kept(viewed, n) or _as_given(viewed, n) for n in results}
    seen = {n: chain[-1].name for n, chain in chains.items() if chain and not readers(viewed, chain[-1].name) & inside}
    if not seen:
        return program, growth
    regions = (replace(r, outputs=tuple(seen.get(n, n) for n in r.outputs)) for r in growth.regions)
    return resolve_views(viewed, frozenset(seen.values()), rounded), replace(growth, regions=tuple(regions))


def copied(program: Program, name: str, inside: Set[str], later: Set[str] = frozenset()) -> tuple[Value, ...]:
    """The views that lead from a value to a copy of it through which alone all others see it; empty if there is none,
    or if what lies side by side would not do so in the copy.

    Args:
      program: with its views.
      inside: what kernels compute. Of what they read PyTorch makes no copy.
      later: what is not looked at.
    """
    chain = _views(program, name, later)
    while chain and chain[-1].op != COPY:
        chain = chain[:-1]
    if not chain or readers(program, chain[-1].name) & inside:
        return ()
    # Both sides of a product are sides of its tiles, and may be turned (the gradient of keys, by way of `k.mT`).
    sides = 2 if _is_product(program.by_name[name]) else 1
    last = next((a for a in reversed(chain[-1].axes) if a.extent > 1), chain[-1].axes[-1])
    return chain if any(i is index(last) for i in _seen(chain).index[-sides:]) else ()


def _is_product(v: Value) -> bool:
    """Whether the two last dimensions of a value are those of two matrices that it multiplies."""
    if not isinstance(v.expr, Reduce) or len(v.axes) < 2:
        return False
    row, column = v.axes[-2:]
    sides = [free_axes(f) & {row, column} for f in factors(v.expr.body)]
    return {row} in sides and {column} in sides and {row, column} not in sides


def _as_kept(program: Program, name: str) -> tuple[Value, ...]:
    """The view of more bits through which alone all others see a value, if it is kept for a backward pass: kernels have
    these bits."""
    users = [program.by_name[u] for u in program.users[name]]
    kept = len(users) == 1 and users[0].is_view and users[0].name in program.saved and name not in program.outputs
    wider = kept and itemsize(users[0].dtype) > itemsize(program.by_name[name].dtype)
    return (users[0],) if wider and users[0].shape == program.by_name[name].shape else ()


def _as_given(program: Program, name: str) -> tuple[Value, ...]:
    """The views that lead from a value to the last one that is as large in each dimension as an input."""
    given = {v.shape for v in program.given}
    chain = _views(program, name)
    while chain and chain[-1].shape not in given:
        chain = chain[:-1]
    return chain


def _views(program: Program, name: str, later: Set[str] = frozenset()) -> tuple[Value, ...]:
    """The views, each of the one before and the first of `name`, through which alone all others see it, and that keep
    its dimensions whole."""
    chain = [program.by_name[name]]
    while chain[-1].name not in program.outputs:
        last = chain[-1]
        users = [u for u in program.users[last.name] if u not in later]
        view = program.by_name[users[0]] if len(users) == 1 else last
        if view is last or not view.is_view or (view.numel, view.dtype) != (last.numel, last.dtype):
            break
        assert view.expr is not None
        if uses_division(view.expr):
            break
        chain.append(view)
    return tuple(chain[1:])


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
