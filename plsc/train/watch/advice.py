"""Callbacks that warn about a run that does not learn or waits for its data, and suggest a remedy."""

from __future__ import annotations

import logging
import math
import platform
import statistics
from collections.abc import Sequence

from plsc.data.reader import ReaderLoader
from plsc.parallel.machine import usable_cores
from plsc.parallel.world import World
from plsc.run.build_data import Loader
from plsc.run.callbacks import Callback, Context
from plsc.run.run import Run

COLLAPSED = 3.0
"""Effective rank of a batch's embeddings below which a network counts as collapsed.

ResNet18 trained from scratch with ArcFace: 9 to 17 in runs that separate unseen classes, 1.1 to 2.7 in runs
that end near chance, while the loss falls in both (docs/not_learning.md).
"""
_MOST_PATIENCE = 2000
"""Maximum number of steps before a warning: the rank is also low after the warm-up of good runs."""
_SMALLEST_BATCH = 16  # with fewer images, classes or embedding dimensions the rank is always low
_RISEN = 1.05  # ratio of the medians of the two halves of the losses
_SURE = 3.0  # standard deviations of their rank sum
_FEWEST_LOSSES, _MOST_LOSSES = 16, 10_000
_PAGE = "see docs/not_learning.md"


class LearningCheck(Callback):
    """Warns, once per reason, if a run does not learn; the result is identical on all ranks.

    Args:
        smallest: the smaller of the embedding size and the number of classes.
        warmup_steps: warm-up steps of the learning rate.
        total_steps: steps of the run, None if unknown.
        watches_loss: whether to warn about an increasing loss: only for a network that is trained from
            scratch without margin warm-up.
    """

    def __init__(self, smallest: int, warmup_steps: int, total_steps: int | None, watches_loss: bool) -> None:
        self._smallest = smallest
        self._warmup_steps = warmup_steps
        self._patience = max(2 * warmup_steps, min(_MOST_PATIENCE, (total_steps or 2000) // 2))
        self._watches_loss = watches_loss
        self._losses: list[float] = []
        self._low_since: int | None = None
        self._reported: set[str] = set()

    @staticmethod
    def of(run: Run, is_resumed: bool) -> LearningCheck:
        """Return the check of a run."""
        starts_afresh = not is_resumed and run.options.model.pretrained is None
        return LearningCheck(
            min(run.options.model.emb_size, run.head.class_num),
            run.rate.warmup_steps,
            run.total_steps,
            watches_loss=starts_afresh and not run.options.head.margin_warmup_steps,
        )

    def after_step(self, context: Context) -> None:
        """Add the losses that are known."""
        for loss, _ in context.losses:
            if math.isfinite(loss):
                self.add_loss(context.epoch, loss)

    def logged(self, context: Context) -> None:
        """Log the warnings."""
        batch = context.output.batch // context.options.train.micro_batches
        rank = context.metrics["effective_rank"]
        for line in (self.spread(context.step, rank, batch), self.rising(context.epoch)):
            context.world.log(line, logging.WARNING)

    def epoch_end(self, context: Context) -> None:
        """Log the warning about the loss of the first epoch."""
        context.world.log(self.rising(context.epoch), logging.WARNING)

    def add_loss(self, epoch: int, loss: float) -> None:
        """Add the loss of a step; only losses of the first epoch count, or the first few of the run."""
        count = len(self._losses)
        if self._watches_loss and count < (_MOST_LOSSES if epoch == 0 else _FEWEST_LOSSES):
            self._losses.append(loss)

    def rising(self, epoch: int) -> str | None:
        """Return a warning if the loss increases during the first epoch."""
        half = len(self._losses) // 2
        if not self._watches_loss or half < _FEWEST_LOSSES // 2:
            return None
        self._watches_loss = epoch == 0
        first, second = self._losses[:half], self._losses[half:]
        before, after = statistics.median(first), statistics.median(second)
        if after < _RISEN * before or _rank_difference(first, second) < _SURE:
            return None
        self._watches_loss = False
        return (
            f"the loss increases: its median is {before:.4g} over the first {half} steps and "
            f"{after:.4g} over the next {len(second)}; use a tenth of the learning rate ({_PAGE})"
        )

    def spread(self, step: int, effective_rank: float | None, batch: int) -> str | None:
        """Return a warning if the embeddings of a batch are all equal or nearly collinear."""
        if effective_rank is None or batch < 2:
            return None
        if effective_rank == 0 and "equal" not in self._reported:
            self._reported |= {"equal", "collapsed"}
            return (
                f"at step {step} the network returns the same embedding for all {batch} images of the "
                "batch; check for dead activations, weights that are all zero, or constant input images "
                f"({_PAGE})"
            )
        is_low = effective_rank < COLLAPSED and step > self._warmup_steps
        if not is_low:
            self._low_since = None
            return None
        self._low_since = self._low_since or step
        is_small = min(batch, self._smallest) < _SMALLEST_BATCH
        is_early = step - self._low_since < self._patience
        if is_small or is_early or "collapsed" in self._reported:
            return None
        self._reported.add("collapsed")
        return (
            f"the embeddings have collapsed since step {self._low_since}: their effective rank is "
            f"{effective_rank:.1f} (8 or more in a good run), and the network will not separate unseen "
            "classes even if the loss falls. Start again with a third of the rate, optim.clip_norm 5, "
            f"or a longer warm-up ({_PAGE})"
        )


def _rank_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return by how many standard deviations `second` exceeds `first` (Mann-Whitney U test).

    Ties count as not exceeding.
    """
    order = sorted([(loss, 0) for loss in second] + [(loss, 1) for loss in first])
    ranks = sum(rank for rank, (_, half) in enumerate(order, 1) if half == 0)
    m, n = len(first), len(second)
    above = ranks - n * (n + 1) / 2 - m * n / 2
    return above / math.sqrt(m * n * (m + n + 1) / 12)


class DataWait(Callback):
    """Measures how long the first steps wait for their batches, and suggests a remedy once.

    workers: workers per rank. is_generator: whether one process makes all batches, for any `workers`.
    """

    SHARE = 0.05  # smallest share of a step that is reported
    SKIPPED = 5  # steps at the start of the run and of each epoch, while workers fill their queue
    MEASURED = 40  # steps

    def __init__(self, world: World, workers: int, is_generator: bool) -> None:
        self._world = world
        self._workers = workers
        self._is_generator = is_generator
        self._passed = self._measured = 0
        self._wait = self._step = 0.0

    @staticmethod
    def of(loader: Loader, world: World) -> DataWait:
        """Return the measurement for a loader."""
        if isinstance(loader, ReaderLoader):
            return DataWait(world, int(loader.ahead), is_generator=True)
        return DataWait(world, loader.num_workers, is_generator=False)

    def after_step(self, context: Context) -> None:
        """Add a step, and log the hint."""
        line = self.add(context.step_in_epoch, context.data_seconds, context.step_seconds)
        context.world.log(line)

    def add(self, step_in_epoch: int, wait: float, step: float) -> str | None:
        """Add a step and return a tuning hint if there is one; a collective at the last measured step.

        step_in_epoch: counts from 1. wait, step: seconds of waiting for the batch, and of the whole step.
        """
        self._passed += 1
        if min(self._passed, step_in_epoch) <= self.SKIPPED or self._measured == self.MEASURED:
            return None
        self._measured += 1
        self._wait += wait
        self._step += step
        if self._measured < self.MEASURED:
            return None
        mine = (self._wait / self.MEASURED, self._step / self.MEASURED, platform.node())
        everywhere = self._world.all_gather_object(mine)
        wait, step, host = max(everywhere, key=lambda one: one[0] / one[1])
        neighbours = sum(one[2] == host for one in everywhere)
        return self._advise(wait, step, max(1, usable_cores() // neighbours))

    def _advise(self, wait: float, step: float, cores: int) -> str | None:
        if wait < self.SHARE * step:
            return None
        workers = self._workers
        # Time of a worker per batch, if all are busy, divided by the rest of the step; plus 10 %.
        reading = step * workers if workers else wait
        wanted = max(workers + 1, math.ceil(1.1 * reading / max(step - wait, 1e-6)))
        if self._is_generator and workers:
            remedy = "a generator reader runs in one process: make it faster, or use a map-style Dataset"
        elif self._is_generator:
            remedy = "data.num_workers 1 runs the reader in the background"
        elif workers < cores:
            remedy = f"try data.num_workers {min(wanted, cores)}"
        else:
            remedy = "every core has a worker already; see docs/data.md for other remedies"
        return (
            f"data loading is slow: a step of {1e3 * step:.3g} ms waits {1e3 * wait:.3g} ms "
            f"({wait / step:.0%}) for its batch, with {workers} worker{'s' * (workers != 1)} and {cores} "
            f"core{'s' * (cores != 1)} per rank; {remedy}"
        )
