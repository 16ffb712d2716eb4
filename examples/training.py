"""What the training examples share: two models side by side, their loss curves and speed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

AGREE = 0.05
"""How far apart two losses may be: rounding grows as training goes on."""


@dataclass(frozen=True)
class Curve:
    """The loss of each step, and tokens per second without the first step, which compiles."""

    losses: list[float]
    speed: float


def race(
    models: Mapping[str, nn.Module],
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    tokens: int,
    rate: float,
) -> dict[str, Curve]:
    """Train each model on the same batches, of so many tokens each."""
    bar = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("loss {task.fields[loss]:.3f}")
    with Progress(TextColumn("{task.description}"), *bar, console=console) as progress:
        return {name: _train(name, model, batches, loss, tokens, rate, progress) for name, model in models.items()}


def _train(
    name: str,
    model: nn.Module,
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    tokens: int,
    rate: float,
    progress: Progress,
) -> Curve:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    task = progress.add_task(name, total=len(batches), loss=math.nan)
    losses: list[Tensor] = []
    start = math.nan
    for step, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        losses.append(found.detach())
        if step == 1 or step % 10 == 0 or step == len(batches):
            progress.update(task, completed=step, loss=found.item())  # which waits for a GPU
        if step == 1:
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    return Curve(torch.stack(losses).tolist(), (len(batches) - 1) * tokens / seconds)


def report(curves: Mapping[str, Curve], title: str, device: str, file: Path | None) -> None:
    """Print losses and speeds, draw the curves if a file is given; exit with 1 if the losses do not agree."""
    for name, c in curves.items():
        console.print(f"{name}: loss {c.losses[0]:.4f} to {c.losses[-1]:.4f}, {c.speed:.0f} tokens/s")
    if torch.device(device).type == "cpu":
        console.print("(kernels run in Pallas interpret mode on a CPU: their speed means nothing there)")
    ours, theirs = (torch.tensor(c.losses) for c in curves.values())
    apart = (ours - theirs).abs().max().item()
    console.print(f"largest difference between the losses: {apart:.2g}")
    if file is not None:
        _plot(curves, title, file)
        console.print(f"wrote {file}")
    if not apart < AGREE:
        sys.exit(f"the losses should agree within {AGREE}")


def _plot(curves: Mapping[str, Curve], title: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (name, curve), style in zip(curves.items(), ("-", "--")):
        axes.plot(range(1, len(curve.losses) + 1), curve.losses, style, label=name)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(file)
