"""What warns of likely mistakes, before a run and during it, and what stops one that went wrong."""

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
from plsc.train.state import Position

BAD_BATCH_NAME = "bad_batch.json"
_NAMES_SHOWN = 4

SLOW_STEP = 10.0  # seconds

COLLAPSED = 3.0
"""Effective rank of a batch's embeddings below which a network counts as collapsed.

ResNet18 trained from scratch with ArcFace: 9 to 17 in runs that tell unseen classes apart, 1.1 to 2.7 in runs
that end near chance, while the loss falls in both (docs/not_learning.md).
"""
_MOST_PATIENCE = 2000
"""Steps before it is reported: after the warm-up the rank of good runs is low for a while."""
_SMALLEST_BATCH = 16  # images, classes and embedding sizes of fewer have no such rank to lose
_RISEN, _SURE = (
    1.05,
    3.0,
)  # ratio of the medians of two halves of the losses; deviations of their ranks
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
    """Return a line that names the options without effect and why, or nothing if there are none.

    made_with: the arguments of the constructor of a custom network.

    One that is set to its default, as `set_mixed_precision` sets many, does not count.
    """
    found = [
        f"{path} ({reason})"
        for paths, reason in _unused(options, made_with)
        for path in paths
        if path in options.explicit and options.get(path) != find_option(path).default
    ]
    return f"note: set, but without effect in this run: {', '.join(found)}" if found else ""


def batch_note(global_batch: int, num_samples: int | None) -> str:
    """Return a line for a batch that shows the images of the set more than once, or nothing."""
    if num_samples is None or global_batch <= num_samples:
        return ""
    return (
        f"note: a step takes {global_batch} images, and the set has {num_samples}: it shows them "
        f"{global_batch / num_samples:.1f} times each"
    )


def frozen_note(network: nn.Module) -> str:
    """Return a line for a network of which nothing is trained, or nothing."""
    if any(parameter.requires_grad for parameter in network.parameters()):
        return ""
    return f"note: {original_class_name(network)} has no trainable parameter; only the head is trained"


def threads_note(options: Config) -> str:
    """Return a line for more threads than there are cores, or nothing."""
    threads, cores = options.runtime.cpu_threads, usable_cores()
    if threads <= cores:
        return ""
    return (
        f"note: runtime.cpu_threads is {threads}, but this process may use {cores} core{'s' * (cores != 1)}: "
        "threads that wait for each other can make a step many times as slow"
    )


def _unused(options: Config, made_with: Mapping[str, Any] | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield options that this run does not look at, and the reason."""
    optim, precision, head = options.optim, options.precision, options.head
    if made_with is not None:
        paths = tuple(
            path
            for path in ("model.dropout", "model.neck")
            if made_with.get(path.removeprefix("model.")) != options.get(path)
        )
        yield paths, "the custom network was not made with it"
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
    if head.loss_type.removeprefix("dist_") in ("softmax", "normface"):
        yield ("head.margin_warmup_steps",), f"head.loss_type is {head.loss_type}"
    if ":" in optim.optimizer and not has_own_rows:
        yield ("optim.lr", "optim.weight_decay"), "the optimizer's factory decides"
    if optim.optimizer.lower() != "sgd" and not (has_own_rows and head.optimizer == "sgd"):
        yield ("optim.momentum", "optim.nesterov"), "no optimizer here is sgd"
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

    names: this rank's samples. All names of the global batch go into a file next to the checkpoints.
    """
    everywhere = [name for part in world.all_gather_object(names) for name in part]
    path = save_dir / BAD_BATCH_NAME
    if world.is_main:
        report = {"step": position.step, "loss": str(loss), "lr": rate, "samples": everywhere}
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    shown = ", ".join(everywhere[:_NAMES_SHOWN])
    more = len(everywhere) - _NAMES_SHOWN
    raise TrainingError(
        f"the loss is {loss} at step {position.step} (epoch {position.epoch}, learning rate "
        f"{rate:g}); samples of the batch: {shown}{f' and {more} more' if more > 0 else ''}, listed in "
        f"{path}; lower the learning rate or warm up, look at these images, and resume from the last "
        "checkpoint"
    )


def stop_at_bad_weights(world: World, position: Position, network: nn.Module) -> None:
    """Raise TrainingError, identical on all ranks, for trained weights that are not finite; a collective.

    A gradient may be inf where the loss was finite: the next loss would tell, but what is saved before that
    would be what a later run resumes.
    """
    trained = [(name, local_part(p.detach())) for name, p in network.named_parameters() if p.requires_grad]
    finite = [part.isfinite().all() for _, part in trained]
    # One look at the device, not one for each.
    is_bad = bool(finite) and not bool(torch.stack(finite).all())
    if not world.all_reduce_max(int(is_bad))[0]:
        return
    mine = [name for (name, _), is_good in zip(trained, finite, strict=True) if not is_good]
    found = sorted({name for names in world.all_gather_object(mine) for name in names})
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise TrainingError(
        f"{found[0]}{more} of the network have a nan or inf after step {position.step}, though no loss was: "
        "a gradient overflowed. Nothing of it is saved; lower the learning rate, warm up or look at the "
        "network's backward pass, and resume from the last checkpoint"
    )


class LearningCheck:
    """Warns, once for each reason, of a run that does not learn; every rank finds the same.

    smallest: of embedding size and numbers of classes; warmup_steps: of the learning rate; total_steps: of
    the run, None if unknown; watches_loss: whether a loss that rises tells anything, as it does where the
    network and the margin begin afresh.
    """

    def __init__(self, smallest: int, warmup_steps: int, total_steps: int | None, watches_loss: bool) -> None:
        self._smallest = smallest
        self._warmup_steps = warmup_steps
        self._patience = max(2 * warmup_steps, min(_MOST_PATIENCE, (total_steps or 2000) // 2))
        self._watches_loss = watches_loss
        self._losses: list[float] = []
        self._low_since: int | None = None
        self._said: set[str] = set()

    def add_loss(self, epoch: int, loss: float) -> None:
        """Take the loss of a step; those of the first epoch count, and the first few after a short one."""
        count = len(self._losses)
        if self._watches_loss and count < (_MOST_LOSSES if epoch == 0 else _FEWEST_LOSSES):
            self._losses.append(loss)

    def rising(self, epoch: int) -> str | None:
        """Return a warning when the losses of the first epoch rise."""
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
            f"the loss rises: its median is {before:.4g} over the first {half} steps and "
            f"{after:.4g} over the next {len(second)}; use a tenth of the learning rate; {_PAGE}"
        )

    def spread(self, step: int, effective_rank: float | None, batch: int) -> str | None:
        """Return a warning when the embeddings of a logged step's batch are equal, or nearly on a line."""
        if effective_rank is None or batch < 2:
            return None
        if effective_rank == 0 and "equal" not in self._said:
            self._said |= {"equal", "collapsed"}
            return (
                f"at step {step} the network gives the same embedding for all {batch} images of the "
                "batch; look for dead activations, weights that are all zero or constant input images; "
                f"{_PAGE}"
            )
        is_low = effective_rank < COLLAPSED and step > self._warmup_steps
        if not is_low:
            self._low_since = None
            return None
        self._low_since = self._low_since or step
        is_small = min(batch, self._smallest) < _SMALLEST_BATCH
        is_early = step - self._low_since < self._patience
        if is_small or is_early or "collapsed" in self._said:
            return None
        self._said.add("collapsed")
        return (
            f"since step {self._low_since} the embeddings spread over fewer than {COLLAPSED:g} "
            f"directions ({effective_rank:.1f} now; 8 or more in a good run): they collapse, and "
            "unseen classes will not be told apart though the loss falls; start again with a third of the "
            f"learning rate, set_clip_norm(5) or a longer warm-up; {_PAGE}"
        )


def _rank_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return by how many standard deviations second ranks above first (Mann and Whitney's U).

    Equal losses count against it.
    """
    order = sorted([(loss, 0) for loss in second] + [(loss, 1) for loss in first])
    ranks = sum(rank for rank, (_, half) in enumerate(order, 1) if half == 0)
    m, n = len(first), len(second)
    above = ranks - n * (n + 1) / 2 - m * n / 2
    return above / math.sqrt(m * n * (m + n + 1) / 12)


class DataWait:
    """Measures the first steps of a run, and says once if they wait for their batches, and what to try.

    workers: per rank; is_generator: whether one process makes all batches, however many workers are set.
    """

    SHARE = 0.05  # of a step: a smaller wait is not reported
    SKIPPED = 5  # steps at the start of the run and of an epoch: workers begin to read ahead then
    MEASURED = 40  # steps

    def __init__(self, world: World, workers: int, is_generator: bool) -> None:
        self._world = world
        self._workers = workers
        self._is_generator = is_generator
        self._passed = self._measured = 0
        self._wait = self._step = 0.0

    def add(self, step_in_epoch: int, wait: float, step: float) -> str | None:
        """Count a step, from 1 in its epoch, and its seconds until the batch was there and in all.

        Return the advice, if there is some. A collective at the last measured step, the same on all ranks.
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
        # What a batch costs a worker, if all are busy, over what the rest of the step takes; a tenth more.
        reading = step * workers if workers else wait
        wanted = max(workers + 1, math.ceil(1.1 * reading / max(step - wait, 1e-6)))
        if self._is_generator and workers:
            remedy = "a generator runs in one process: use a cheaper one, or a map-style Dataset"
        elif self._is_generator:
            remedy = "set_num_workers(1) lets the reader run ahead"
        elif workers < cores:
            remedy = f"try set_num_workers({min(wanted, cores)})"
        else:
            remedy = "there is a worker for each core already; see docs/data.md for what else helps"
        return (
            f"a step waits {1e3 * wait:.3g} of its {1e3 * step:.3g} ms ({wait / step:.0%}) for its batch; "
            f"{workers} worker{'s' * (workers != 1)} and {cores} core{'s' * (cores != 1)} per rank; {remedy}"
        )


def slow_start(seconds: float, log_period: int) -> str | None:
    """Return a line for who waits for the first log line, if the first step took long."""
    if seconds < SLOW_STEP:
        return None
    return (
        f"the first step took {seconds:.0f} s; a line is logged every {log_period} steps (set_log_period()), "
        "and at the end of each epoch"
    )


def epoch_warning(position: Position, expected: int | None) -> str | None:
    """Return a warning for the end of an epoch of other steps than expected, None if that was not known."""
    if expected is None or position.step_in_epoch == expected:
        return None
    return (
        f"epoch {position.epoch} of the reader had {position.step_in_epoch} steps, but {expected} "
        "were expected; warm-up, log lines and resuming count with these: correct set_train_image_num"
    )


def nothing_left(step: int, epoch: int) -> str:
    """Return a line for a run that is over before its first step."""
    return (
        f"nothing is left to train: {step} steps and {epoch} epoch{'s' * (epoch != 1)} were made already; to "
        "go on, raise set_train_epochs() or set_train_steps()"
    )


def interrupted(number: int, step: int, checkpoint: Path | None) -> TrainingInterrupted:
    """Return the error that ends a run which a signal stopped; checkpoint: where its state is, if any."""
    where = "nothing was learnt yet, and nothing saved"
    if checkpoint is not None:
        where = f"all state is in {checkpoint}, set_checkpoint_dir('{checkpoint}') goes on from there"
    return TrainingInterrupted(f"stopped by {signal.Signals(number).name} after step {step}; {where}", number)
