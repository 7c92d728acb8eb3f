"""Limits of a run: a maximum time, and the few steps of `fast_dev_run`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from plsc.parallel.world import World
from plsc.run.callbacks import Callback, Context
from plsc.state.start import Directories, Start
from plsc.train.bad_loss import BAD_BATCH_NAME
from plsc.train.watch.progress import format_duration


class MaxTime(Callback):
    """Stops the run after the step in which `seconds` of training are over, those before a resume included.

    Only the clock of rank 0 counts.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._used = self._started = 0.0

    def run_start(self, context: Context) -> None:
        """Start the clock."""
        self._started = self._clock() - self._used
        self.after_step(context)

    def after_step(self, context: Context) -> None:
        """Stop the run if its time is over."""
        self._used = self._clock() - self._started
        if context.is_main and self._used >= self._seconds:
            context.stop(f"the maximum time of {format_duration(self._seconds)} is over")

    epoch_end = after_step

    def state_dict(self) -> dict[str, Any]:
        """Return the time that was used."""
        return {"used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the time that was used."""
        self._used = float(state["used"])


def in_temporary_folder(start: Start, world: World) -> Start:
    """Return the start with a temporary folder and without a store; a collective."""
    folder = world.broadcast_object(tempfile.mkdtemp(prefix="plsc-") if world.is_main else "")
    note = "train.fast_dev_run: a few batches of training and of each evaluation; nothing is saved"
    return replace(start, local=Path(folder), url=None, note=note)


def remove_temporary(directories: Directories) -> None:
    """Delete the temporary folder, unless it has the batch of a loss that was not finite."""
    if directories.is_owner and not (directories.local / BAD_BATCH_NAME).exists():
        shutil.rmtree(directories.local, ignore_errors=True)
