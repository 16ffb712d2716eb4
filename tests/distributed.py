"""One of two processes of a data-parallel training step.    python -m tests.distributed ddp|fsdp FILE RANK"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fl_pallas as fl

from .training import Block, attention

WORLD = 2


def sharded(block: nn.Module) -> nn.Module:
    """FSDP2: parameters are in parts, gathered for each pass."""
    return fully_shard(block, mesh=init_device_mesh("cpu", (WORLD,)))


def whole(gradient: Tensor | None) -> Tensor:
    """A gradient, or all parts of one."""
    assert gradient is not None
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[operator]


# Compiled inside of the wrapper, as a function and as a module.
FORMS: dict[str, tuple[Callable[[Block], nn.Module], ...]] = {
    "ddp": (
        lambda block: DistributedDataParallel(with_function(block)),
        lambda block: DistributedDataParallel(fl.compile(block)),
    ),
    "fsdp": (
        lambda block: sharded(with_function(block)),
        lambda block: sharded(nn.Sequential(fl.compile(block))),
    ),
}


def with_function(block: Block) -> Block:
    block.attention = fl.compile(attention)
    return block


def main(wrapper: str, meeting: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)  # both processes draw the same model and the same whole batch
    single, batch = Block(), torch.randn(2 * WORLD, 33, 32)
    for form in FORMS[wrapper]:
        model = form(copy.deepcopy(single))
        model(batch[rank::WORLD]).square().mean().backward()
        single.zero_grad()
        single(batch).square().mean().backward()
        for ours, alone in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), alone.grad, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("FL_CACHE", "off")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
