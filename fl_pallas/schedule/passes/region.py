"""What growth finds: regions, and blow-ups that stay with PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ..program import Value


@dataclass(frozen=True)
class Region:
    """Values computed by fused kernels: `members` in program order, `outputs` those needed outside.

    Attributes:
      large: the members that have both sides of a join.
    """

    members: tuple[str, ...]
    outputs: tuple[str, ...]
    large: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rejected:
    """A blow-up that stays with PyTorch.

    Attributes:
      value: the value that will be materialised.
      blocker: the value whose operation stands in the way.
      why: the reason.
      nbytes: size of what is materialised, in bytes.
      fused: whether kernels compute it all the same, and store a part of that size between them.
      join: the join that the region grew from, where `value` is a part made of it.
      apart: members of the region without which kernels could compute the others, or may be faster.
    """

    value: Value
    blocker: Value
    why: str
    nbytes: int
    fused: bool = False
    join: Value | None = None
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Growth:
    regions: tuple[Region, ...]
    rejected: tuple[Rejected, ...]
