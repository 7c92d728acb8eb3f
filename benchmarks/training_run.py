"""A training run on random images, whose steps other benchmarks measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from plsc.config import Options
from plsc.data.batch import Batch
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import Run, build_run
from plsc.train.step import Step


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
