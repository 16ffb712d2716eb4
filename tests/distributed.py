"""One of two processes of a data-parallel training step.    python -m tests.distributed FILE RANK"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fl_pallas as fl

from .training import Block, attention

WORLD = 2


def whole(gradient: Tensor | None) -> Tensor:
    """A gradient, or all parts of one."""
    assert gradient is not None
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[operator]


def compiled(block: Block) -> nn.Module:
    """Compiled as a module, each process with the whole of it."""
    return DistributedDataParallel(fl.compile(block))


def sharded(block: Block) -> nn.Module:
    """FSDP2 around a compiled function: parameters are in parts, gathered for each pass."""
    block.attention = fl.compile(attention)
    return fully_shard(block, mesh=init_device_mesh("cpu", (WORLD,)))


def main(meeting: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)  # both processes draw the same model and the same whole batch
    single, batch = Block(), torch.randn(2 * WORLD, 33, 32)
    for wrap in (compiled, sharded):
        model = wrap(copy.deepcopy(single))
        model(batch.chunk(WORLD)[rank]).square().mean().backward()
        single.zero_grad()
        single(batch).square().mean().backward()
        for ours, alone in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), alone.grad, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
