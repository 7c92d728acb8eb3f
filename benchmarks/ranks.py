"""What several ranks do, for benchmarks/gpu.py; rank 0 prints a line of JSON.

    torchrun --nproc-per-node 2 benchmarks/ranks.py head 1000000 128 512   # C, batch per rank, D
    torchrun --nproc-per-node 2 benchmarks/ranks.py train FOLDER    # resumes from the last checkpoint
    torchrun --nproc-per-node 2 benchmarks/ranks.py train FOLDER --kill-at 12   # SIGKILL for the last rank

head: seconds of steps of the sharded head. train: a deterministic run on small images that saves every five
steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # this checkout's plsc

from measuring import print_json  # noqa: E402
from train import timed  # noqa: E402
from train_ways import Built, TrainWay  # noqa: E402
from ways import LR, MARGIN, MOMENTUM, SCALE, WEIGHT_DECAY  # noqa: E402

from plsc.parallel.world import World  # noqa: E402

CLASSES, STEPS = 40, 25


def head(given: argparse.Namespace) -> None:
    """Time steps of the head: bfloat16 products, ArcFace."""
    from plsc.heads import Execution, RowSGD, ShardedHead, build_margin

    classes, batch, dimension = map(int, given.arguments)
    world = World.from_environment(given.device)
    margin = build_margin("arcface", scale=SCALE, margin=MARGIN)
    head = ShardedHead(
        classes, dimension, margin, execution=Execution("bfloat16"), group=world.head_group
    ).to(world.device)
    rows = RowSGD(head, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(batch, dimension, generator=generator).to(world.device).requires_grad_()
    labels = torch.randint(classes, (batch,), generator=generator).to(world.device)

    def step() -> None:
        head(x, labels).loss.backward()
        rows.step()

    rounds = [timed(TrainWay(""), Built(step), given.steps, world, given.clock) for _ in range(6)]
    if world.is_main:
        print_json("ranks", what="head", ranks=world.size, C=classes, B=batch, seconds=rounds[1:])
    world.close()


def train(given: argparse.Namespace) -> None:
    """Train to the end, or until the last rank is killed."""
    from plsc.checkpoint.manifest import checkpoints_in
    from plsc.storage.store import Store
    from tests.distributed.job import small_entry

    folder = Path(given.arguments[0])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first: list[int] = []

    def watch(context: Any) -> None:
        first.append(context.step)
        if context.step == given.kill_at and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    ins = small_entry(folder.parent / "images", folder)
    ins.set_device(given.device)
    ins.set_class_num(CLASSES)
    ins.set_train_epochs(1000)
    ins.set_train_steps(STEPS)
    ins.set_save_every_n_steps(5)
    ins.set_deterministic(True)
    ins.set_checkpoint_dir("last")
    ins.add_callback(watch, "after_step")
    ins.train()
    if rank == 0:
        _, newest = checkpoints_in(Store(str(folder)))[-1]
        files = {name: str(facts) for name, facts in newest.files.items()}  # with checksums
        print_json("train", ranks=ranks, first=first[0], last=newest.step, files=files)


def main() -> None:
    """Run the chosen work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("head", "train"))
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=20, help="steps per round of head; six rounds")
    parser.add_argument("--kill-at", type=int, default=0, help="step after which train is killed")
    given = parser.parse_args()
    given.clock = time.perf_counter
    {"head": head, "train": train}[given.what](given)


if __name__ == "__main__":
    main()
