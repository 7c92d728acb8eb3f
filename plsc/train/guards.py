"""What stops or warns: a loss that is not finite, embeddings that collapse, a signal."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import torch
from torch import nn

from plsc.errors import TrainingError, TrainingInterrupted, as_worded
from plsc.parallel.sharding import local_part
from plsc.parallel.world import World
from plsc.train.state import Position

BAD_BATCH_NAME = "bad_batch.json"
_NAMES_SHOWN = 4

COLLAPSED = 0.95
"""Mean cosine between different samples from which on a network counts as collapsed.

A plain convolutional network without batch norm, trained with ArcFace from scratch, went over 0.998 and
to chance in verification while its loss kept falling; a healthy one stays well below 0.5.
"""
SLOW_STEP = 10.0  # seconds
_COLLAPSE_GRACE_STEPS = 20  # an untrained network may start out there


def stop_at_bad_loss(
    world: World, save_dir: Path, position: Position, loss: float, rate: float, names: list[str]
) -> None:
    """Raise TrainingError with the step, the learning rate and the samples; a collective.

    names: this rank's samples. All names of the global batch go into a file beside the checkpoints.
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
    """Raise TrainingError, on every rank alike, for trained weights that are not finite; a collective.

    A gradient may be inf where the loss was finite: the next loss would tell, but what is saved before that
    would be what a later run goes on from.
    """
    trained = [
        (name, local_part(p.detach())) for name, p in network.named_parameters() if p.requires_grad
    ]
    finite = [part.isfinite().all() for _, part in trained]
    # One look at the device, not one for each.
    is_bad = bool(finite) and not bool(torch.stack(finite).all())
    if not world.agree_max(int(is_bad))[0]:
        return
    mine = [name for (name, _), is_good in zip(trained, finite, strict=True) if not is_good]
    found = sorted({name for names in world.all_gather_object(mine) for name in names})
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise TrainingError(
        f"{found[0]}{more} of the network have a nan or inf after step {position.step}, though no loss was: "
        "a gradient overflowed. Nothing of it is saved; lower the learning rate, warm up or look at the "
        "network's backward pass, and resume from the last checkpoint"
    )


def collapse_warning(step: int, mean_cosine: float | None) -> str | None:
    """Return a warning when the embeddings of different samples point the same way."""
    if mean_cosine is None or mean_cosine < COLLAPSED or step < _COLLAPSE_GRACE_STEPS:
        return None
    return (
        f"warning: at step {step} the mean cosine between embeddings of different samples is "
        f"{mean_cosine:.3f}: the network is collapsing, and verification goes to chance though the "
        "loss may fall; add batch norm, lower the learning rate, or warm up"
    )


def slow_start(seconds: float, log_period: int) -> str | None:
    """Return a line for who waits for the first log line, if the first step took long."""
    if seconds < SLOW_STEP:
        return None
    return as_worded(
        f"the first step took {seconds:.0f} s; a line is logged every {log_period} steps (set_log_period()), "
        "and at the end of each epoch"
    )


def epoch_warning(epoch: int, steps: int, expected: int | None) -> str | None:
    """Return a warning when an epoch had other steps than expected; None for what was not said."""
    if expected is None or steps == expected:
        return None
    return (
        f"warning: epoch {epoch} of the reader had {steps} steps, but {expected} were expected; warm-up, log "
        "lines and resuming count with these: correct set_train_image_num"
    )


def nothing_left(step: int, epoch: int) -> str:
    """Return a line for a run that is over before its first step."""
    return as_worded(
        f"nothing is left to train: {step} steps and {epoch} epoch{'s' * (epoch != 1)} were made already; to "
        "go on, raise set_train_epochs() or set_train_steps()"
    )


def interrupted(number: int, step: int, checkpoint: Path | None) -> TrainingInterrupted:
    """Return the error that ends a run which a signal stopped; checkpoint: where its state is, if any."""
    where = "nothing was learnt yet, and nothing saved"
    if checkpoint is not None:
        where = (
            f"all state is in {checkpoint}, set_checkpoint_dir('{checkpoint}') goes on from there"
        )
    return TrainingInterrupted(
        f"stopped by {signal.Signals(number).name} after step {step}; {where}", number
    )
