"""What became of a function: the object behind fl.explain, and its report."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .errors import SourceLoc
from .schedule.cost import Cost, fused_costs, unfused_cost
from .schedule.pipeline import Schedule
from .schedule.plan import KernelPlan
from .schedule.text import plan_text

Stage = tuple[str, Callable[[], str]]
"""The name of a pass, and what prints the IR after it."""


@dataclass(frozen=True)
class Fallback:
    """Something that runs in PyTorch although it, or what feeds it, asked to be fused.

    Attributes:
      what: the operation that stands in the way.
      why: the law or limit that failed.
      where: the user's source line, if known.
      bytes: size of what is materialised because of it; 0 if nothing quadratic is.
      fused: whether kernels compute it all the same, and store those bytes between them.
    """

    what: str
    why: str
    where: SourceLoc | None
    bytes: int
    fused: bool = False

    def __str__(self) -> str:
        size = f"; {_size(self.bytes)} will be materialised" if self.bytes else ""
        how = "is fused in parts" if self.fused else "runs in PyTorch"
        return f"{self.what} {how}: {self.why}{size}" + (f" (at {self.where})" if self.where else "")


@dataclass(frozen=True)
class Graph:
    """One captured graph, specialised to the shapes it was called with.

    Attributes:
      schedule: None if the graph runs in PyTorch whole.
      fallbacks: what could not be fused.
      history: what the passes made, in order.
      left: operations that PyTorch runs, by name and count.
      name: "forward" or "backward", where gradients are asked for.
    """

    schedule: Schedule | None
    fallbacks: tuple[Fallback, ...]
    history: tuple[Stage, ...]
    left: tuple[tuple[str, int], ...] = ()
    name: str = ""

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        return tuple(p for plans in self.schedule.kernels for p in plans) if self.schedule else ()


@dataclass
class Explanation:
    """The graphs of a function, in the order they were compiled (a graph break gives several).

    Attributes:
      skipped: functions that TorchDynamo gives no graph of.
    """

    graphs: list[Graph] = field(default_factory=list)
    skipped: list[Fallback] = field(default_factory=list)

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        return tuple(k for g in self.graphs for k in g.kernels)

    @property
    def kernel_count(self) -> int:
        return len(self.kernels)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        return tuple(f for g in self.graphs for f in g.fallbacks) + tuple(self.skipped)

    def ir(self, stage: str | None = None) -> str:
        """The IR after each pass (or after `stage` alone), graph after graph."""
        return "\n\n".join(
            f"=== graph {n}: {name}\n{text()}"
            for n, g in enumerate(self.graphs)
            for name, text in g.history
            if stage in (None, name)
        )

    def show(self, console: Console | None = None) -> None:
        """Print the report."""
        console = console or Console()
        for n, g in enumerate(self.graphs):
            console.print(_graph_tree(n, g))
        for f in self.skipped:
            console.print(f"[yellow]{f}[/]")

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=160, no_color=True))
        return text.getvalue()


def _graph_tree(n: int, g: Graph) -> Tree:
    title = f"graph {n}, {g.name}" if g.name else f"graph {n}"
    tree = Tree(f"{title}: {len(g.kernels)} fused kernel{'s' * (len(g.kernels) != 1)}")
    if g.schedule is not None:
        costs = fused_costs(g.schedule)
        for region, plans, cost in zip(g.schedule.regions, g.schedule.kernels, costs, strict=True):
            branch = tree.add(f"region {', '.join(region.members)} -> {', '.join(region.outputs)}")
            for plan in plans:
                branch.add(Text(plan_text(plan)))
            branch.add(_costs(cost, unfused_cost(g.schedule.program, region)))
    if g.left:
        tree.add("in PyTorch: " + ", ".join(f"{name} x{count}" if count > 1 else name for name, count in g.left))
    for f in g.fallbacks:
        tree.add(f"[yellow]{f}[/]")
    return tree


def _costs(fused: Cost, unfused: Cost) -> Table:
    table = Table("", "GFLOP", "memory traffic", "largest intermediate")
    table.add_row("fused", f"{fused.flops / 1e9:.3f}", _size(fused.bytes), _size(fused.largest))
    table.add_row("unfused", f"{unfused.flops / 1e9:.3f}", _size(unfused.bytes), _size(unfused.largest))
    return table


def _size(n: int) -> str:
    for unit, limit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= limit:
            return f"{n / limit:.1f} {unit}"
    return f"{n} B"
