"""Expressions of a kernel on the tiles of one of its programs, as jax operations."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..errors import ScheduleError
from ..schedule.dtype import is_float, is_narrow_float
from ..schedule.expr import Const, Expr, Index, Load, Reduce, Ref, Size, free_axes, outer_loads
from ..schedule.scan import RUNNING
from .elementwise import elementwise
from .loads import load
from .reductions import reduced
from .running import running
from .tile import JNP, Context, Tile


class Evaluator(Context):
    """A program of a kernel, and the values of its expressions."""

    def eval(self, e: Expr) -> Tile:
        """`e` over its wide free axes."""
        return self.memoised(e, e, lambda: self._masked(e))

    def _masked(self, e: Expr) -> Tile:
        """`e`, its masks left out where the tile needs none."""
        scope = next((s for s in reversed(self.scopes) if e in s.bare), None)
        if scope is None or scope.interior is False:
            return self._eval(e)
        bare = self.eval(scope.bare[e])
        axes = self.sorted_axes(free_axes(e))
        if scope.interior is True:
            return Tile(self.spread(bare, axes), axes)
        if len(axes) < 2:
            return self._eval(e)
        for n in outer_loads(e):
            if len(self.wide(free_axes(n))) < 2:
                load(self, n)  # in a branch it would not be loaded ahead

        def masked() -> Array:
            self.push({}, {})
            tile = self._eval(e)
            self.pop()
            return self.spread(tile, axes).astype(bare.array.dtype)

        return Tile(lax.cond(scope.interior, lambda: self.spread(bare, axes), masked), axes)

    def _eval(self, e: Expr) -> Tile:
        if isinstance(e, Const):
            # A mask's number, scaled, may be beyond float32: infinite, as in PyTorch.
            with np.errstate(over="ignore"):
                return Tile(jnp.asarray(e.value, self.type_of(e)), ())
        if isinstance(e, Size):
            return Tile(jnp.asarray(self.number(e), jnp.int32), ())
        if isinstance(e, Index):
            return self.indices(e.axis)
        if isinstance(e, Ref):
            return self.held(e.name)
        if isinstance(e, Load):
            stored = load(self, e)
            return Tile(self._widened(stored.array, e.dtype), stored.axes)
        if isinstance(e, Reduce):
            return reduced(self, e)
        return running(self, e) if e.name in RUNNING else elementwise(self, e)

    def held(self, name: str) -> Tile:
        """What a reference stands for here.

        Raises: ScheduleError if it has no value.
        """
        tile = next((s.refs[name] for s in reversed(self.scopes) if name in s.refs), None)
        if tile is None:
            raise ScheduleError(f"reference {name} has no value here")
        return tile

    def _widened(self, x: Array, dtype: str) -> Array:
        if is_float(dtype):
            return x.astype(JNP[self.compute])
        if is_narrow_float(dtype):
            return lax.bitcast_convert_type(x, JNP[dtype]).astype(JNP[self.compute])
        if dtype == "bool":
            return x != 0
        return x.astype(jnp.int64 if dtype == "i64" else jnp.int32)
