"""Trains over several datasets on one, two and three ranks in one launch: several_worker.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from plsc.checkpoint import read_manifest
from plsc.config import Options
from plsc.parallel.world import World
from tests.distributed.resume_worker import close, joined
from tests.distributed.worker import run_worker, smaller_world
from tests.resuming import Steady, different, options_of, saved_at, train

# name: weight, head. Of glyphs and cars a step has one image, so most ranks have none; of cars there are
# fewer classes than ranks.
SETS = {
    "faces": (6.0, {"loss_type": "dist_adaface"}),
    "glyphs": (1.0, {"loss_type": "cosface", "scale": 8.0}),
    "cars": (1.0, {"loss_type": "dist_softmax"}),
}
STEPS = 9  # of 8 images; an epoch has 4


def options(folder: Path, name: str, *names: str, **more) -> Options:
    settings = {
        "runtime__dtype": "float64", "model__sync_batch_norm": True, "train__global_batch_size": 8,
        "train__epochs": 9, "train__steps": STEPS, "train__calc_acc": True, "head__scale": 16.0,
        "head__optimizer": "adamw", "head__lr_factor": 0.05, "optim__clip_norm": 0.5,
        "optim__schedule": "constant", "optim__warmup_steps": 0,
    }  # fmt: skip
    made = options_of("unused", folder / name, **{**settings, **more})
    for one in names or SETS:
        weight, head = SETS[one]
        made.add_data_set(name=one, path=str(folder / "sets" / one), weight=weight, **head)
    return made


def metrics(folder: Path, name: str) -> dict[int, dict[str, float]]:
    """Return what does not depend on time, by step."""
    entries = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    kinds = ("loss", "accuracy", "effective_rank")
    steps = [entry for entry in entries if "loss" in entry]
    return {e["step"]: {k: v for k, v in e.items() if k.split("/")[0] in kinds} for e in steps}


def check_same_losses(ours: dict, theirs: dict, case: str) -> None:
    assert sorted(ours) == sorted(theirs) == list(range(1, STEPS + 1)), case
    for step, expected in theirs.items():
        assert ours[step].keys() == expected.keys()
        assert len(expected) == 12, expected
        for key, value in expected.items():
            # Cosines between embeddings are measured in float32.
            limit = 1e-4 if key.startswith("effective_rank") else 1e-9 * max(1, abs(value))
            assert abs(ours[step][key] - value) < limit, (case, step, key, ours[step][key], value)


def main() -> None:
    folder = Path(sys.argv[1])
    full = World.from_environment("cpu", timeout_seconds=60)
    worlds = {ranks: smaller_world(full, ranks) for ranks in (1, 2, 3)}

    def start(ranks: int, name: str, *names: str, **more) -> None:
        world = worlds[ranks]
        if world is not None:
            train(options(folder, name, *names, **more), world, Steady)
        dist.barrier()

    for ranks in worlds:
        start(ranks, f"on {ranks}", checkpoint__every_n_steps=3, checkpoint__keep_last=-1)
    start(3, "resumed", checkpoint__load_dir=str(saved_at(folder / "on 3", 3)))
    for ranks, until in ((3, 2), (1, 5), (2, STEPS)):
        start(ranks, "moved", train__steps=until, checkpoint__load_dir="last")
    # One set is left out in the middle of an epoch, on another number of ranks.
    for ranks in (2, 1):
        start(
            ranks, f"without, on {ranks}", "faces", "cars",
            checkpoint__load_dir=str(saved_at(folder / "on 3", 6)),
        )  # fmt: skip
    if full.is_main:
        truth = metrics(folder, "on 1")
        for name in ("on 2", "on 3", "moved"):
            check_same_losses(metrics(folder, name), truth, name)
        last = f"2-step{STEPS}"
        for name in ("on 2", "on 3", "moved"):
            close(joined(folder / name / last), joined(folder / "on 1" / last), name)
        assert different(folder / "resumed" / last, folder / "on 3" / last) == []
        heads = read_manifest(folder / "on 3" / last).heads
        assert heads["faces"].class_ranges == [[0, 3], [3, 6], [6, 7]]
        assert heads["glyphs"].class_ranges == [[0, 4]]
        assert heads["cars"].class_ranges == [[0, 1], [1, 2], [2, 2]]
        without = [metrics(folder, f"without, on {ranks}") for ranks in (1, 2)]
        assert sorted(without[0]) == sorted(without[1]) == list(range(7, STEPS + 1))
        for step, values in without[0].items():
            assert "loss/glyphs" not in values
            assert abs(values["loss"] - without[1][step]["loss"]) < 1e-9 * max(1, values["loss"])
        print(f"last losses {truth[STEPS]['loss']!r}, {metrics(folder, 'moved')[STEPS]['loss']!r}")
    full.close()


if __name__ == "__main__":
    run_worker(main)
