"""Notes and warnings about likely mistakes in the options of a run."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from plsc.config import Config, find_option
from plsc.errors import TrainingInterrupted
from plsc.optim.schedule import Schedule
from plsc.optim.sparse import sparse_parameters
from plsc.parallel.machine import usable_cores
from plsc.run.position import Position

_MOST_CALLS = 2**20  # of a schedule function, to look for a rate above 0


def idle_note(options: Config, made_with: Mapping[str, Any] | None = None) -> str:
    """Return a line that lists options without effect, with the reasons, or an empty string.

    made_with: constructor arguments of a custom network. Options that are set to their default are ignored,
    because `set_mixed_precision` sets many.
    """
    idle: dict[str, str] = {}
    for path in ("model.dropout", "model.neck"):
        mine, usual = options.get(path), find_option(path).default
        is_other = made_with is not None and mine not in (usual, made_with.get(path.removeprefix("model.")))
        if is_other and path in options.explicit:
            idle[path] = "the custom network was constructed with another value"
    idle |= {path: f"{unmet.path} is {options.get(unmet.path)}" for path, unmet in options.without_effect()}
    listed = ", ".join(f"{path} ({reason})" for path, reason in idle.items())
    return f"note: these options have no effect in this run: {listed}" if idle else ""


def batch_note(global_batch: int, num_samples: int | None) -> str:
    """Return a line if a batch is larger than the dataset, else an empty string."""
    if num_samples is None or global_batch <= num_samples:
        return ""
    return (
        f"note: the global batch of {global_batch} images is larger than the dataset of {num_samples}: each "
        f"step uses every image {global_batch / num_samples:.1f} times"
    )


def warmup_note(warmup_steps: int, total_steps: int | None) -> str:
    """Return a line if the warm-up may not be shorter than the run, else an empty string."""
    if total_steps is None:
        return (
            f"note: the length of the reader is unknown, so the warm-up takes {warmup_steps} steps, however "
            "short the run is, and the default learning rate is constant after it; set data.train_image_num"
        )
    if warmup_steps < max(2, total_steps):
        return ""
    return (
        f"note: the warm-up takes {warmup_steps} steps and the run {total_steps}, so the learning rate "
        f"increases until the end; use a shorter warm-up, such as optim.warmup_steps {total_steps // 10}"
    )


def frozen_note(network: nn.Module) -> str:
    """Return a line if the network has no trainable parameters, else an empty string."""
    if any(parameter.requires_grad for parameter in network.parameters()):
        return ""
    return f"note: {type(network).__name__} has no trainable parameters; only the head is trained"


def idle_parameters(network: nn.Module) -> str:
    """Return a warning if trainable parameters have no gradient, else an empty string."""
    trained = [(name, p.grad is None) for name, p in network.named_parameters() if p.requires_grad]
    idle = [name for name, is_idle in trained if is_idle]
    if not idle:
        return ""
    return (
        f"{len(idle)} of {len(trained)} trainable parameters have no gradient and are not trained, such as "
        f"{idle[0]}: the output of the network is detached, or does not use them"
    )


def sparse_note(network: nn.Module) -> str:
    """Return a line if there are parameters with sparse gradients, else an empty string."""
    sparse = sparse_parameters(network)
    names = [name for name, parameter in network.named_parameters() if parameter in sparse]
    if not names:
        return ""
    return f"note: {', '.join(names)}: sparse gradients, updated without momentum and weight decay"


def threads_note(options: Config) -> str:
    """Return a line if there are more CPU threads than cores, else an empty string."""
    threads, cores = options.runtime.cpu_threads, usable_cores()
    if threads <= cores:
        return ""
    return (
        f"note: runtime.cpu_threads is {threads}, but this process may use only {cores} "
        "core(s); too many threads can make a step many times slower"
    )


def epoch_warning(position: Position, expected: int | None) -> str | None:
    """Return a warning if an epoch ends after another number of steps than expected, else None."""
    if expected is None or position.step_in_epoch == expected:
        return None
    return (
        f"epoch {position.epoch + 1} had {position.step_in_epoch} steps, but {expected} were expected; "
        "correct data.train_image_num: warm-up, log lines and resuming depend on it"
    )


def nothing_left(step: int, epoch: int) -> str:
    """Return a line for a resumed run that has no steps left."""
    return (
        f"nothing left to train: the run has finished {step} steps and {epoch} epochs; to continue, increase "
        "train.epochs or train.steps"
    )


def zero_rate(rate: Schedule, position: Position, total_steps: int | None, is_custom: bool) -> str:
    """Return a warning if the learning rate is 0 in all steps that are left, else an empty string."""
    step, first = position.step, position.updates
    # A named schedule that has reached 0 stays there; a function is called for each step.
    left = (total_steps or 0) - step if is_custom else 1
    if not 0 < left <= _MOST_CALLS or any(rate.factor(update) for update in range(first, first + left)):
        return ""
    return (
        f"the learning rate is 0 from step {step + 1} to the end of the run, so no step is made; increase "
        "the steps of the schedule, or choose another one"
    )


def interrupted(number: int, step: int, checkpoint: Path | None, missing: str = "") -> TrainingInterrupted:
    """Return the error after a signal; checkpoint: the saved state, missing: what is not saved, if any."""
    where = "" if missing else "nothing had been trained, so nothing was saved"
    if checkpoint is not None:
        where = f"the state was saved to {checkpoint}; resume with checkpoint.load_dir {checkpoint}"
    parts = (f"stopped by {signal.Signals(number).name} after step {step}", where, missing)
    return TrainingInterrupted("; ".join(filter(None, parts)), number)
