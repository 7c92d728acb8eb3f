"""Two steps of a small run with any options, and what two of them may change together, on any ranks.

Run as a script on two ranks, it checks the pairs of `CHANGES_OF_RANKS`, and exits with 1 if results differ.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from plsc.config import Options
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import build_run
from plsc.train.step import Step
from tests.distributed.worker import run_worker
from tests.overflowing import scale_in_any_mode

SHAPE = (3, 16, 16)
CLASSES, BATCH = 12, 8

CHANGES: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"precision.mode": "bfloat16"}, 2e-2),
    "micro_batches": ({"train.micro_batches": 2}, 0.0),
    "clip": ({"optim.clip_norm": 20.0}, 0.0),
    "adamw": (
        {"optim.optimizer": "adamw", "head.optimizer": "adamw", "optim.lr": 0.01 * BATCH / 1024},
        0.0,
    ),
    "fused": ({"optim.optimizer_arguments": {"fused": True}}, 1e-6),
    "foreach": ({"optim.optimizer_arguments": {"foreach": True, "fused": False}}, 1e-6),
    "loss scaling": (
        {"precision.scaling_arguments": {"init_loss_scaling": 1024.0}},
        0.0,
    ),
    "sampled": ({"head.sample_ratio": 0.5}, 0.0),
    "recomputation": ({"memory.recompute": "all"}, 0.0),
    "kept": ({"head.execution": {"keep_mb": 64.0}}, 1e-4),
}
"""By what part an option may change the first step's loss, by rounding; the second's thrice that."""

CHANGES_OF_RANKS: dict[str, tuple[dict[str, Any], float]] = {
    "synchronised": ({"model.sync_batch_norm": True}, 0.0),
}
"""Options that mean something on several ranks alone."""

CHANGES_OF_GPUS: dict[str, tuple[dict[str, Any], float]] = {
    "float16": (
        {"precision.mode": "float16", "precision.scaling_arguments": {"init_loss_scaling": 256.0}},
        2e-2,
    ),
    "plain kernels": ({"head.execution": {"kernels": "torch"}}, 1e-4),
    "compiled": ({"speed.compile": True}, 1e-3),
}
"""Options that mean something on a GPU alone, or cost too much elsewhere."""

_ROUNDING_OF_GPUS = 1e-3  # products of convolutions are in tf32, and sums in any order

MEANT = ("micro_batches", "clip", "adamw", "sampled", "synchronised")
"""The plain path has these, too: they change what is learnt."""

_ONE_OPTION = ("fused", "foreach")


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Noise in three batches."""

    def __init__(self) -> None:
        self.targets = [index % CLASSES for index in range(3 * BATCH)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = np.random.default_rng(index).integers(0, 256, SHAPE, dtype=np.uint8)
        return torch.from_numpy(pixels), self.targets[index]


def options_with(values: dict[str, Any]) -> Options:
    options = Options()
    common = {
        "model.name": "SmallResNet",
        "model.image_shape": SHAPE,
        "model.emb_size": 16,
        "head.class_num": CLASSES,
        "train.global_batch_size": BATCH,
        "train.with_test": False,
        "data.num_workers": 0,
        "optim.lr": 0.1 * BATCH / 1024,
        "optim.warmup_steps": 0,
        "optim.clip_norm": 0.0,
        "optim.schedule": "constant",
    }
    options.set_together({**common, **values})
    return options


def losses(values: dict[str, Any], world: World | None = None) -> list[float]:
    """Return the losses of two steps of a run with these options."""
    torch.manual_seed(0)
    user = UserParts(train_reader=Images())
    with pytest.MonkeyPatch.context() as patch:
        scale_in_any_mode(patch)
        run = build_run(options_with(values).resolve(), world or World.single(), user)
    run.network.train()
    step, found = Step(run), []
    for batch in itertools.islice(run.data.loader.epoch(0), 2):
        made = step.make(batch, exchange_status(run.world, batch, run.head.class_num).sizes, False)
        run.position.advance(made.is_skipped)
        found.append(float(made.output.mean_loss))
    return found


def pairs(changes: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names of all two options that may be set together."""
    every = itertools.combinations(changes, 2)
    return [pair for pair in every if pair != _ONE_OPTION]


_PLAIN: dict[str, list[float]] = {}


def check_pair(one: str, other: str, world: World | None = None) -> None:
    """Assert that two steps with both options are those of the plain path, within what each may change."""
    changes = CHANGES | CHANGES_OF_RANKS | CHANGES_OF_GPUS
    meant: dict[str, Any] = {}
    for name in (one, other):
        meant |= changes[name][0] if name in MEANT else {}
    plain = f"{meant} {world and world.device}"
    if plain not in _PLAIN:
        _PLAIN[plain] = losses(meant, world)
    expected = _PLAIN[plain]
    first, second = losses(changes[one][0] | changes[other][0], world)
    tolerance = changes[one][1] + changes[other][1]
    if world is not None and world.device.type == "cuda":
        tolerance += _ROUNDING_OF_GPUS
    assert first == pytest.approx(expected[0], rel=tolerance), (one, other)
    assert second == pytest.approx(expected[1], rel=3 * tolerance), (one, other)
    assert expected[1] != expected[0]


def main() -> None:
    """Check each pair with an option that means something on several ranks alone."""
    world = World.from_environment("cpu")
    assert world.size == 2
    for one, other in pairs(CHANGES | CHANGES_OF_RANKS):
        if {one, other} & set(CHANGES_OF_RANKS):
            check_pair(one, other, world)
    world.close()


if __name__ == "__main__":
    run_worker(main)
