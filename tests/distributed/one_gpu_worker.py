"""Two ranks that see one GPU each, its own or a common one: one_gpu_worker.py; torch.cuda is patched."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from plsc.errors import OptionError
from plsc.parallel.world import World
from tests.distributed.worker import run_worker


def main() -> None:
    own = SimpleNamespace(uuid=f"GPU-{os.environ['RANK']}")
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: own
    world = World.from_environment("cuda", "gloo")
    assert (world.device, world.local_rank) == (torch.device("cuda", 0), int(os.environ["RANK"]))
    own.uuid = "GPU-0"
    with pytest.raises(OptionError, match="ranks 0 and 1"):
        World.from_environment("cuda", "gloo")
    print(f"rank {world.rank} is refused", flush=True)
    world.close()


if __name__ == "__main__":
    run_worker(main)
