"""The position of a run in its epochs, and the length of these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plsc.checkpoint import Manifest


@dataclass
class Position:
    """The position of a run: number of steps and of finished epochs.

    So the next step has the index `step`, and its epoch the index `epoch`, from 0. Log lines count from 1.

    updates: steps that changed the weights, that is, were not skipped; the learning rate depends on it.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    updates: int = 0

    def advance(self, is_skipped: bool = False) -> None:
        """Count a step."""
        self.step += 1
        self.step_in_epoch += 1
        self.updates += not is_skipped

    def next_epoch(self) -> None:
        """Finish the epoch."""
        self.epoch += 1
        self.step_in_epoch = 0


@dataclass(frozen=True)
class Length:
    """The length of a run: epochs of `per_epoch` steps, None if unknown, from a step and an epoch on.

    These are 0, unless a resume has changed the length of an epoch.
    """

    step: int
    epoch: int
    per_epoch: int | None

    @staticmethod
    def of(per_epoch: int | None, checkpoint: tuple[Path, Manifest] | None) -> Length:
        """Return the length of a new run, or of one that resumes a checkpoint."""
        if checkpoint is None:
            return Length(0, 0, per_epoch)
        manifest = checkpoint[1]
        if per_epoch is not None and manifest.scalars.get("steps_per_epoch") == per_epoch:
            step, epoch = (manifest.scalars.get(f"length_{name}", 0) for name in ("step", "epoch"))
            return Length(step, epoch, per_epoch)
        if per_epoch is not None and manifest.step_in_epoch >= per_epoch:  # a limit is used up
            return Length(manifest.step, manifest.epoch + 1, per_epoch)
        return Length(manifest.step - manifest.step_in_epoch, manifest.epoch, per_epoch)

    def until(self, epochs: int) -> int | None:
        """Return the number of steps after which so many epochs are over; None if it is unknown."""
        if self.per_epoch is None:
            return None
        left = epochs - self.epoch
        return self.step + left * self.per_epoch if left >= 0 else min(self.step, epochs * self.per_epoch)
