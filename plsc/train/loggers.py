"""Destinations of a run's metrics: files and tracking tools, and the plot of the loss; only on rank 0."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from plsc.errors import TrainingError
from plsc.storage.publish import replacing
from plsc.train.callbacks import Callback, Context

METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"


class Logger(Protocol):
    """A destination of metrics."""

    def write(self, entry: dict[str, Any]) -> None:
        """Write the metrics of a step or the results of an evaluation; ``entry["step"]`` is the step."""

    def close(self) -> None:
        """Write what is left, and release all resources."""


class JsonLines:
    """Writes metrics.jsonl: one JSON object per line.

    Lines after `step`, from an earlier attempt of a resumed run, are removed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / METRICS_NAME
        _drop_later_lines(path, step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: dict[str, Any]) -> None:
        """Write a line."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Logging(Callback):
    """Writes the metrics and evaluations of a run to its loggers, and plots them after each epoch."""

    def __init__(self) -> None:
        self._loggers: list[Logger] = []
        self._has_steps = False

    def run_start(self, context: Context) -> None:
        """Open the loggers on rank 0."""
        if context.is_main:
            with _explaining_errors(context.folder):
                context.folder.mkdir(parents=True, exist_ok=True)
                self._loggers.append(JsonLines(context.folder, context.step))

    def logged(self, context: Context) -> None:
        """Write the metrics of a step."""
        self._write(context, context.metrics)
        self._has_steps = True

    def evaluated(self, context: Context) -> None:
        """Write the results of an evaluation."""
        results = {name: result.as_dict() for name, result in context.evaluation.items()}
        self._write(context, {"step": context.step, "epoch": context.current_epoch, "eval": results})

    def epoch_end(self, context: Context) -> None:
        """Plot metrics.jsonl to loss.png."""
        if context.is_main and self._has_steps:
            from plsc.evaluate.plots import plot_metrics  # importing matplotlib takes a third of a second

            plot_metrics(context.folder / METRICS_NAME, context.folder / PLOT_NAME)

    def run_end(self, context: Context) -> None:
        """Close the loggers."""
        for one in self._loggers:
            one.close()

    exception = run_end

    def _write(self, context: Context, entry: dict[str, Any]) -> None:
        with _explaining_errors(context.folder):
            for one in self._loggers:
                one.write(entry)


@contextlib.contextmanager
def _explaining_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write {folder / METRICS_NAME}: {error.strerror}; free space or check the permissions, "
            "or choose another folder with set_model_save_dir. Checkpoints saved before are intact"
        ) from error


def _drop_later_lines(path: Path, step: int) -> None:
    """Remove lines that an earlier attempt wrote after `step`, and incomplete lines."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and entry["step"] <= step:
            kept.append(line + "\n")
    with replacing(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
