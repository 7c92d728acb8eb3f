"""Memory and time of the options that save memory.

    python benchmarks/memory.py                    # ResNet18 at 112 x 112, batch 32: some minutes
    python benchmarks/memory.py --time --rounds 5  # time: all ways in turn, in one process

Memory: one process per way, one rank on the CPU. "Needed" is the peak resident memory in addition to that
after a step of a small network, which runs late imports; next to it is the estimate of `plsc plan`. Large
blocks are returned to the system at once (MALLOC_MMAP_THRESHOLD_), so the peak is that of tensors, not of the
allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from plsc.config import Options
from plsc.data.batch import Batch
from plsc.parallel.world import World
from plsc.plan import plan
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import Run, build_run
from plsc.train.step import Step

MIB = 2**20
WAYS: dict[str, dict[str, Any]] = {
    "plain (sgd with momentum)": {},
    "recompute all blocks": {"memory.recompute": "all"},
    "recompute the first two stages": {"memory.recompute": "stages.0.*,stages.1.*"},
    "recompute whole stages": {"memory.recompute": "stages.*"},
    "recompute stem and all blocks": {"memory.recompute": "stem,stages.*.*"},
    "2 micro-batches": {"train.micro_batches": 2},
    "4 micro-batches": {"train.micro_batches": 4},
    "bf16": {"precision.mode": "bfloat16"},
    "adamw": {"optim.optimizer": "adamw"},
    "bf16, 4 micro-batches, recompute all blocks": {
        "precision.mode": "bfloat16",
        "train.micro_batches": 4,
        "memory.recompute": "all",
    },
}


def base(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all ways share."""
    return {
        "model.name": arguments.model,
        "model.image_shape": (3, arguments.image, arguments.image),
        "train.batch_size": arguments.batch,
        "head.class_num": arguments.classes,
    }


def measure(arguments: argparse.Namespace, name: str) -> None:
    """Run three steps of a way and print the peak memory of this process."""
    from measuring import status

    world = World.single("cpu")
    with tempfile.TemporaryDirectory() as folder:
        small = {"model.name": "SmallResNet", "model.image_shape": (3, 32, 32)}
        settings = base(arguments) | WAYS[name]
        TrainingRun(world, folder, settings | small).step()
        ready = status("VmRSS")
        run = TrainingRun(world, folder, settings)
        losses = [run.step() for _ in range(2)]  # from the second step on, with optimizer states
        print(json.dumps({"ready": ready, "peak": status("VmHWM"), "losses": losses}))


def planned_bytes(arguments: argparse.Namespace, name: str) -> int:
    """Return the estimate of `plsc plan` for a way: head and backbone."""
    return plan({**base(arguments), **WAYS[name], "runtime.device": "cpu"}).device_bytes


def compare_memory(arguments: argparse.Namespace, names: list[str]) -> None:
    """Print and record the memory of each way."""
    print(f"{arguments.model}, {arguments.image} x {arguments.image}, batch {arguments.batch}\n")
    print("| way | needed MiB | / plain | plan MiB | plan / needed |\n|---|---|---|---|---|")
    plain = None
    for name in names:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one", name],
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        facts = json.loads(done.stdout.splitlines()[-1])
        needed, foreseen = facts["peak"] - facts["ready"], planned_bytes(arguments, name)
        plain = plain or needed
        print(
            f"| {name} | {needed / MIB:,.0f} | {needed / plain:.2f} | {foreseen / MIB:,.0f} | "
            f"{foreseen / needed:.2f} |",
            flush=True,
        )
        note(arguments, kind="memory", way=name, needed=needed, planned=foreseen, **facts)


def compare_times(arguments: argparse.Namespace, names: list[str]) -> None:
    """Run a step of each way in turn; print the medians and their ratios to the first way."""

    world, runs = World.single("cpu"), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            runs[name] = TrainingRun(world, folder, base(arguments) | WAYS[name])
            runs[name].step()
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                began = time.perf_counter()
                run.step()
                taken[name].append(time.perf_counter() - began)
    print("| way | ms per step | / plain |\n|---|---|---|")
    for name in names:
        pairs = zip(taken[name], taken[names[0]], strict=True)
        ratio = statistics.median(one / first for one, first in pairs)
        print(f"| {name} | {statistics.median(taken[name]) * 1000:,.0f} | {ratio:.2f} |")
        note(arguments, kind="time", way=name, seconds=taken[name])


def note(arguments: argparse.Namespace, **facts: Any) -> None:
    """Append a line of JSON to the output."""
    if arguments.output is not None:
        shape = {key: getattr(arguments, key) for key in ("model", "image", "batch", "classes")}
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts | shape) + "\n")


def main() -> None:
    """Compare the ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ResNet18")
    parser.add_argument("--image", type=int, default=112)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--ways", nargs="*", help="only ways whose names begin with these")
    parser.add_argument("--time", action="store_true", help="measure time instead of memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file to append lines of JSON to")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments, arguments.one)
        return
    wanted = arguments.ways
    names = [name for name in WAYS if wanted is None or name.startswith(tuple(wanted))]
    (compare_times if arguments.time else compare_memory)(arguments, names)


class TrainingRun:
    """A run that executes single steps on the same batch."""

    def __init__(self, world: World, folder: str | Path, settings: dict[str, Any]) -> None:
        options = Options()
        settings = {
            "train.with_test": False,
            "checkpoint.save_dir": str(folder),
            "data.num_workers": 0,
            "data.train_image_num": 10**9,
            **settings,
        }
        for path, value in settings.items():
            options.set(path, value)
        self.run: Run = build_run(options.resolve(), world, UserParts(train_reader=_reader(options)))
        self.run.network.train()
        self._step = Step(self.run)
        with closing(self.run.data.loader.epoch(0, 0)) as batches:
            self._batch: Batch = next(iter(batches))

    def step(self) -> float:
        """Run a step; return its loss."""
        sizes = exchange_status(
            self.run.world, self._batch, self.run.head.class_num
        ).sizes  # as in the training loop
        loss = float(self._step.make(self._batch, sizes, is_logged=False).output.mean_loss)
        self.run.position.advance()
        return loss


def _reader(options: Options) -> Any:
    shape, classes = options.model.image_shape, options.head.class_num
    assert classes is not None

    def read() -> Iterator[tuple[np.ndarray, int]]:
        random = np.random.default_rng(0)
        while True:
            yield random.normal(size=shape).astype(np.float32), int(random.integers(classes))

    return read


if __name__ == "__main__":
    main()
