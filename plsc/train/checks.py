"""Sanity checks: warnings about likely mistakes, and errors that stop a failed run."""

from __future__ import annotations

import json
import math
import platform
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plsc.config import Config, find_option
from plsc.errors import TrainingError, TrainingInterrupted
from plsc.parallel.backbone import local_part, original_class_name
from plsc.parallel.machine import usable_cores
from plsc.parallel.world import World
from plsc.train.heads import margin_arguments
from plsc.train.state import Position

BAD_BATCH_NAME = "bad_batch.json"
_NAMES_SHOWN = 4

SLOW_STEP = 10.0  # seconds

COLLAPSED = 3.0
"""Effective rank of a batch's embeddings below which a network counts as collapsed.

ResNet18 trained from scratch with ArcFace: 9 to 17 in runs that separate unseen classes, 1.1 to 2.7 in runs
that end near chance, while the loss falls in both (docs/not_learning.md).
"""
_MOST_PATIENCE = 2000
"""Maximum number of steps before a warning: after the warm-up the rank is low for a while in good runs."""
_SMALLEST_BATCH = 16  # with fewer images, classes or embedding dimensions the rank is always low
_RISEN, _SURE = (
    1.05,
    3.0,
)  # ratio of the medians of the two halves of the losses; standard deviations of their rank sum
_FEWEST_LOSSES, _MOST_LOSSES = 16, 10_000
_PAGE = "see docs/not_learning.md"
_STEPS = ("step", "multi_step")
_FALLING = ("polynomial", "cosine", "exponential")
_SCALING = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
)


def idle_note(options: Config, made_with: Mapping[str, Any] | None = None) -> str:
    """Return a line that lists options without effect and the reasons, or an empty string.

    made_with: constructor arguments of a custom network. Options that are set to their default do not count:
    `set_mixed_precision` sets many.
    """
    found = [
        f"{path} ({reason})"
        for paths, reason in _unused(options, made_with)
        for path in paths
        if path in options.explicit and options.get(path) != find_option(path).default
    ]
    return f"note: these options have no effect in this run: {', '.join(found)}" if found else ""


def batch_note(global_batch: int, num_samples: int | None) -> str:
    """Return a line if a batch is larger than the dataset, else an empty string."""
    if num_samples is None or global_batch <= num_samples:
        return ""
    return (
        f"note: the global batch of {global_batch} images is larger than the dataset of {num_samples}: each "
        f"step uses every image {global_batch / num_samples:.1f} times"
    )


def frozen_note(network: nn.Module) -> str:
    """Return a line if the network has no trainable parameters, else an empty string."""
    if any(parameter.requires_grad for parameter in network.parameters()):
        return ""
    return f"note: {original_class_name(network)} has no trainable parameters; only the head is trained"


def threads_note(options: Config) -> str:
    """Return a line if there are more CPU threads than cores, else an empty string."""
    threads, cores = options.runtime.cpu_threads, usable_cores()
    if threads <= cores:
        return ""
    return (
        f"note: runtime.cpu_threads is {threads}, but this process may use only {cores} "
        f"core{'s' * (cores != 1)}; too many threads can make a step many times slower"
    )


def _unused(options: Config, made_with: Mapping[str, Any] | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield groups of options that this run ignores, with the reason."""
    optim, precision, head = options.optim, options.precision, options.head
    if made_with is not None:
        paths = tuple(
            path
            for path in ("model.dropout", "model.neck")
            if made_with.get(path.removeprefix("model.")) != options.get(path)
        )
        yield paths, "the custom network was constructed with another value"
    has_own_rows = head.loss_type.startswith("dist_")
    schedule = f"optim.schedule is {optim.schedule}"
    if optim.schedule not in _STEPS:
        yield ("optim.step_boundaries", "optim.lr_decay_factor"), schedule
    if optim.schedule not in _FALLING:
        yield ("optim.decay_steps", "optim.end_lr_factor"), schedule
    if optim.schedule != "cosine":
        yield ("optim.cosine_cycles",), schedule
    if optim.schedule != "polynomial":
        yield ("optim.decay_power",), schedule
    if not any("margin" in name for name in margin_arguments(head.loss_type.removeprefix("dist_"))):
        yield ("head.margin_warmup_steps",), f"head.loss_type is {head.loss_type}"
    if ":" in optim.optimizer and not has_own_rows:
        yield ("optim.lr", "optim.weight_decay"), "the optimizer's factory decides"
    if optim.optimizer.lower() != "sgd" and not (has_own_rows and head.optimizer == "sgd"):
        yield ("optim.momentum", "optim.nesterov"), "neither optimizer is sgd"
    if optim.clip_norm == 0:
        yield ("optim.clip_scope",), "optim.clip_norm is 0"
    if options.memory.checkpoint_stages.strip() == "none":
        yield ("memory.checkpoint_every",), "memory.checkpoint_stages is none"
    if options.parallel.backbone == "replicated":
        units = ("parallel.shard_size", "parallel.shard_units")
        yield units, "parallel.backbone is replicated"
    else:
        yield ("speed.bucket_mb",), "parallel.backbone is sharded"
    mode = f"precision.mode is {precision.mode}"
    if precision.mode == "float32":
        yield ("precision.white_list", "precision.black_list"), mode
    if precision.mode != "float16" and precision.loss_scaling == "auto":
        yield tuple(f"precision.{name}" for name in _SCALING), mode


def stop_at_bad_loss(
    world: World, save_dir: Path, position: Position, loss: float, rate: float, names: list[str]
) -> None:
    """Raise TrainingError with the step, the learning rate and the samples; a collective.

    names: names of this rank's samples. The names of the global batch are written to bad_batch.json.
    """
    everywhere = [name for part in world.all_gather_object(names) for name in part]
    path = save_dir / BAD_BATCH_NAME
    if world.is_main:
        report = {"step": position.step, "loss": str(loss), "lr": rate, "samples": everywhere}
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    shown = ", ".join(everywhere[:_NAMES_SHOWN])
    more = len(everywhere) - _NAMES_SHOWN
    raise TrainingError(
        f"the loss is {loss} at step {position.step} (epoch {position.epoch + 1}, learning rate "
        f"{rate:g}); samples of the batch: {shown}{f' and {more} more' if more > 0 else ''}, listed in "
        f"{path}. Lower the learning rate or use a longer warm-up, check these images, and resume from the "
        "last checkpoint"
    )


def stop_at_bad_weights(world: World, position: Position, network: nn.Module) -> None:
    """Raise TrainingError on all ranks for trained weights that are not finite; a collective.

    A gradient can be inf although the loss was finite. The next loss would show it, but a checkpoint saved
    before that would be unusable.
    """
    trained = [(name, local_part(p.detach())) for name, p in network.named_parameters() if p.requires_grad]
    finite = [part.isfinite().all() for _, part in trained]
    # One synchronisation with the device, not one per parameter.
    is_bad = bool(finite) and not bool(torch.stack(finite).all())
    if not world.all_reduce_max(int(is_bad))[0]:
        return
    mine = [name for (name, _), is_good in zip(trained, finite, strict=True) if not is_good]
    found = sorted({name for names in world.all_gather_object(mine) for name in names})
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise TrainingError(
        f"{found[0]}{more} of the network have a nan or inf after step {position.step}, although the loss "
        "was finite: a gradient overflowed, and this state is not saved. Lower the learning rate, use a "
        "longer warm-up or check the network's backward pass, and resume from the last checkpoint"
    )


class LearningCheck:
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
            "classes even if the loss falls. Start again with a third of the learning rate, set_clip_norm(5) "
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


class DataWait:
    """Measures how long the first steps wait for their batches, and suggests a remedy once.

    workers: workers per rank. is_generator: whether a single process makes all batches, whatever `workers`.
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
            remedy = "set_num_workers(1) runs the reader in the background"
        elif workers < cores:
            remedy = f"try set_num_workers({min(wanted, cores)})"
        else:
            remedy = "every core has a worker already; see docs/data.md for other remedies"
        return (
            f"data loading is slow: a step of {1e3 * step:.3g} ms waits {1e3 * wait:.3g} ms "
            f"({wait / step:.0%}) for its batch, with {workers} worker{'s' * (workers != 1)} and {cores} "
            f"core{'s' * (cores != 1)} per rank; {remedy}"
        )


def slow_start(seconds: float, log_period: int) -> str | None:
    """Return a line about the next log line if the first step took long."""
    if seconds < SLOW_STEP:
        return None
    return (
        f"the first step took {seconds:.0f} s; progress is logged every {log_period} steps "
        "(set_log_period()) and at the end of each epoch"
    )


def epoch_warning(position: Position, expected: int | None) -> str | None:
    """Return a warning if an epoch ends after another number of steps than expected, else None."""
    if expected is None or position.step_in_epoch == expected:
        return None
    return (
        f"epoch {position.epoch + 1} of the reader had {position.step_in_epoch} steps, but {expected} were "
        "expected; correct set_train_image_num, as warm-up, log lines and resuming depend on it"
    )


def nothing_left(step: int, epoch: int) -> str:
    """Return a line for a resumed run that has no steps left."""
    return (
        f"nothing left to train: the run has finished {step} steps and {epoch} epoch{'s' * (epoch != 1)}; to "
        "continue, increase set_train_epochs() or set_train_steps()"
    )


def interrupted(number: int, step: int, checkpoint: Path | None) -> TrainingInterrupted:
    """Return the error for a run that a signal stopped; checkpoint: its saved state, if any."""
    where = "nothing had been trained, so nothing was saved"
    if checkpoint is not None:
        where = f"the state was saved to {checkpoint}; resume with set_checkpoint_dir('{checkpoint}')"
    return TrainingInterrupted(f"stopped by {signal.Signals(number).name} after step {step}; {where}", number)
