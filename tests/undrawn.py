"""Runs that do not draw their losses: a plot takes several times as long as a small run."""

from pathlib import Path
from unittest import mock

from plsc.evaluate import plots

drawing = plots.plot_metrics


def draw_nothing() -> None:
    """From now on a run of this process leaves an empty file in place of its plot."""
    mock.patch.object(plots, "plot_metrics", lambda metrics, path: Path(path).touch()).start()
