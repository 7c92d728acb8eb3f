"""Shard a network of wide layers on GPUs, and check the peak device memory."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from plsc.models import BaseModel
from plsc.parallel.backbone import local_part
from plsc.parallel.world import World
from plsc.run.run import build_run
from plsc.run.user_parts import UserParts
from tests.distributed.worker import run_worker
from tests.option_pairs import Images, options_with

LAYERS, WIDTH = 32, 2048  # 512 MiB


class Wide(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 16 * 16, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.last = nn.Linear(WIDTH, 16)

    def build_network(self, input, label, is_train=True):
        return self.last(self.layers(self.first(input.flatten(1))))


def main() -> None:
    world = World.from_environment("cuda")
    torch.manual_seed(world.rank)  # all ranks get the weights of rank 0
    network = Wide()
    options = options_with({"parallel.backbone": "sharded", "model.sync_batch_norm": True})
    run = build_run(options, world, UserParts(train_reader=Images(), model=network))
    whole = sum(p.numel() for p in run.network.parameters()) * 4
    # Half of the parameters, a few layers, images, workspace.
    most = torch.cuda.max_memory_allocated(world.device)
    assert most < 0.75 * whole, f"{most} bytes of the device for a network of {whole}"
    torch.manual_seed(0)
    for mine, right in zip(run.network.parameters(), Wide().parameters(), strict=True):
        local = local_part(mine)
        assert local.device == world.device
        assert mine.full_tensor().cpu().equal(right)
    run.network.train()
    for batch in itertools.islice(run.data.loader.epoch(0), 1):
        run.trained_network(batch.input(world.device), None, True).sum().backward()
    world.close()


if __name__ == "__main__":
    run_worker(main)
