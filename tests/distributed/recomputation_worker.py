"""Train on two ranks with and without recomputation; exit with 1 if a bit differs.

recomputation_worker.py DATASET FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from plsc.parallel.world import World
from tests.distributed.worker import run_worker
from tests.resuming import different, options_of, saved_at, train

CASES = {
    "batch norm": {},
    "micro-batches": {"train__micro_batches": 2, "model__sync_batch_norm": True},
    "clipped, sampled": {"optim__clip_norm": 0.5, "head__sample_ratio": 0.5},
}


def main() -> None:
    dataset, folder = map(Path, sys.argv[1:])
    world = World.from_environment("cpu")
    for case, settings in CASES.items():
        saved = []
        for number, names in enumerate(("none", "all", "stem,stages.*,neck")):
            options = options_of(
                dataset, folder / case / str(number), model__name="SmallResNet", model__dropout=0.4,
                train__batch_size=8, train__steps=3, memory__recompute=names, **settings,
            )  # fmt: skip
            train(options, world, lambda: None)
            world.barrier()
            saved.append(saved_at(folder / case / str(number), 3))
        assert different(saved[0], saved[1]) == different(saved[0], saved[2]) == [], case
    world.close()


if __name__ == "__main__":
    run_worker(main)
