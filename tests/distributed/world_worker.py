"""Ranks without a launcher meet at each kind of address: world_worker.py RANK RANKS FOLDER PORT"""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist

from plsc import Entry
from plsc import entry as facade
from plsc.config import Options
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts

RANK, RANKS, FOLDER, PORT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])


def count(options: Options, world: World, user: UserParts) -> None:
    """Count the ranks, in place of a training run."""
    number = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(number, group=world.backbone_group)
    assert number.item() == RANKS * (RANKS + 1) / 2
    assert (world.rank, world.size, world.local_rank) == (RANK, RANKS, RANK)
    world.close()


def meet(entry: Entry, name: str) -> None:
    entry.set_rank(RANK)
    entry.set_world_size(RANKS)
    entry.set_timeout(60)
    entry.train()
    print(f"rank {RANK} met the others: {name}", flush=True)


def given_store() -> dist.Store:
    timeout = datetime.timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", PORT + 1, is_master=RANK == 0, timeout=timeout, wait_for_workers=False)


def main() -> None:
    facade.run_training = count
    for url in (f"tcp://127.0.0.1:{PORT}", f"file://{FOLDER}/ranks"):
        entry = Entry()
        entry.set_init_method(url)
        meet(entry, url.partition(":")[0])
    entry = Entry()
    entry.set_store(given_store())
    meet(entry, "store")
    # No wheel of torch has MPI: gloo in its place.
    dist.is_mpi_available, make = lambda: True, dist.new_group
    dist.new_group = lambda backend, timeout: make(backend=backend.replace("mpi", "gloo"), timeout=timeout)
    entry = Entry()
    entry.set_init_method(f"file://{FOLDER}/mpi")
    entry.set_backend("mpi")
    meet(entry, "mpi")


if __name__ == "__main__":
    main()
