"""Forward and backward passes: the gradients of a problem's inputs, timed apart and together, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.oracle import float64

from .measure import outputs
from .problem import Problem

# Operations of a backward pass over those of its forward pass: five matrix products where there were two.
BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Step:
    """A training step: the problem on leaves, and the gradients that come in.

    Attributes:
      wanted: places of the inputs whose gradients are asked for: those of the first input's type.
    """

    problem: Problem
    wanted: tuple[int, ...]
    tangents: tuple[Tensor, ...]

    def gradients(self, out: Any, retain: bool) -> tuple[Tensor, ...]:
        leaves = [self.problem.inputs[n] for n in self.wanted]
        return torch.autograd.grad(outputs(out), leaves, self.tangents, retain_graph=retain)

    def errors(self, found: tuple[Tensor, ...]) -> float:
        """The largest ||gradient - exact|| / ||exact||, on up to eight (batch, head) pieces, of the inputs that pieces
        have to themselves."""
        p, square, norm = self.problem, dict.fromkeys(self.wanted, 0.0), dict.fromkeys(self.wanted, 0.0)
        cut_along = [letters for letters in ("b", "hg") if any(set(letters) & set(a) for a in p.axes)]
        for cut, out_cut in p.pieces():
            exact = self._exact(cut, out_cut)
            for n, ours, theirs in zip(self.wanted, found, exact, strict=True):
                if all(set(letters) & set(p.axes[n]) for letters in cut_along):
                    square[n] += (ours[cut[n]].double() - theirs).square().sum().item()
                    norm[n] += theirs.square().sum().item()
        return max((square[n] / norm[n]) ** 0.5 for n in self.wanted if norm[n])

    def _exact(self, cut: Any, out_cut: Any) -> tuple[Tensor, ...]:
        p = self.problem
        given = [t[c].detach() for t, c in zip(p.inputs, cut, strict=True)]
        given = [t.double() if t.is_floating_point() else t for t in given]
        for n in self.wanted:
            given[n].requires_grad_()
        with float64():
            out = outputs(p.plain(*given))
        tangents = [t[c].double() for t, c in zip(self.tangents, out_cut, strict=True)]
        return torch.autograd.grad(out, [given[n] for n in self.wanted], tangents)


def step(p: Problem, run: Callable[[Problem], Any]) -> Step:
    """The problem made ready for gradients; `run` computes it, for the shapes of what it returns."""
    wanted = tuple(n for n, t in enumerate(p.inputs) if t.dtype == p.inputs[0].dtype)
    leaves = tuple(t.detach().requires_grad_(n in wanted) for n, t in enumerate(p.inputs))
    p = replace(p, inputs=leaves)
    torch.manual_seed(1)
    return Step(p, wanted, tuple(torch.randn_like(t) for t in outputs(run(p))))
