"""Time and memory of a sharded backbone: `torchrun --nproc-per-node=2 benchmarks/backbone_sharding.py`

Makes full training steps on random images with a replicated and a sharded backbone. Both run in the same
processes and take turns, one block of steps each. Rank 0 prints a line of JSON per way: milliseconds per step
and per step of the backbone's optimizer (medians over the blocks); bytes per rank of parameters, gradients
and optimizer state; bytes that a rank passes to collectives per step.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from measuring import print_json
from traffic import count_bytes

from plsc.config import Options
from plsc.parallel.backbone import local_part
from plsc.parallel.world import World
from plsc.run.run import Run, build_run
from plsc.run.user_parts import UserParts

WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"parallel.backbone": "sharded"},
    "pairs": {"parallel.backbone": "sharded", "parallel.shard_size": 2},
}


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16, help="images per rank")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    parser.add_argument("--blocks", type=int, default=5)
    return parser.parse_args()


def build(arguments: argparse.Namespace, world: World, way: str, folder: str) -> Run:
    """Return a run with random images; its reader is never called."""

    def reader() -> Iterator[Any]:
        yield from ()

    options = Options()
    settings = {
        "model.name": arguments.model,
        "model.image_shape": (3, arguments.image, arguments.image),
        "head.class_num": arguments.classes,
        "optim.optimizer": arguments.optimizer,
        "train.batch_size": arguments.batch,
        "checkpoint.save_dir": folder,
        "data.num_workers": 0,
        **WAYS[way],
    }
    for path, value in settings.items():
        options.set(path, value)
    return build_run(options.resolve(), world, UserParts(train_reader=reader))


def step(run: Run, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Run a step; return the seconds of the backbone's optimizer."""
    run.optimizer.zero_grad(set_to_none=True)
    run.heads(run.trained_network(images, labels, True), labels).loss.backward()
    began = time.perf_counter()
    run.optimizer.step()
    seconds = time.perf_counter() - began
    run.heads.update()
    return seconds


def bytes_of(run: Run) -> dict[str, int]:
    """Return the bytes of the backbone's parameters, gradients and optimizer state on this rank."""
    parameters = list(run.network.parameters())
    states = [value for state in run.optimizer.state.values() for value in state.values()]

    def bytes_here(tensors: Sequence[torch.Tensor]) -> int:
        return sum(local_part(one).nbytes for one in tensors)

    return {
        "parameters": bytes_here(parameters),
        "gradients": bytes_here([p.grad for p in parameters if p.grad is not None]),
        "state": bytes_here([value for value in states if isinstance(value, torch.Tensor)]),
    }


def main() -> None:
    """Measure and print."""
    arguments = parse()
    world = World.from_environment("cpu")
    shape = (arguments.batch, 3, arguments.image, arguments.image)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(world.rank))
    labels = torch.arange(arguments.batch) % arguments.classes
    counted: collections.Counter[str] = collections.Counter()
    ways = [way for way in WAYS if way != "pairs" or world.size > 2]
    with tempfile.TemporaryDirectory() as folder:
        runs = {way: build(arguments, world, way, folder) for way in ways}
    count_bytes(counted)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    given: dict[str, dict[str, int]] = {}
    for block in range(arguments.blocks + 1):
        for way, run in runs.items():
            counted.clear()
            began, updating = time.perf_counter(), 0.0
            for _ in range(arguments.steps):
                updating += step(run, images, labels)
            seconds = (time.perf_counter() - began) / arguments.steps
            if block:  # the first block is a warm-up
                times[way].append((seconds, updating / arguments.steps))
            given[way] = {name: total // arguments.steps for name, total in counted.items()}
            world.barrier()
    if world.is_main:
        for way, run in runs.items():
            seconds, updating = (statistics.median(values) for values in zip(*times[way], strict=True))
            print_json(
                "backbone sharding",
                way=way,
                ranks=world.size,
                **{name: value for name, value in vars(arguments).items() if name != "blocks"},
                step_ms=round(seconds * 1e3, 1),
                optimizer_ms=round(updating * 1e3, 1),
                bytes=bytes_of(run),
                given=given[way],
                notes=run.notes[0],
            )
    world.close()


if __name__ == "__main__":
    main()
