"""Runs that do not draw their losses: a plot takes several times as long as a small run."""

from pathlib import Path
from unittest import mock

from plsc.train import log

drawing = log.plot_losses


def draw_nothing() -> None:
    """From now on a run of this process leaves an empty file in place of its plot."""
    mock.patch.object(log, "plot_losses", lambda points, path: Path(path).touch()).start()
