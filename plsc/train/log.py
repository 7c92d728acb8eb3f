"""Where the metrics of a run go: files and TensorBoard, and the callbacks that write to them."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.nn.utils import get_total_norm

from plsc.config.option import is_finite_number
from plsc.config.train import listed_names
from plsc.errors import refusing
from plsc.parallel.backbone import gradient_values
from plsc.storage.disk import open_regular, read_regular, replacing
from plsc.train.callbacks import Callback, Context, Logger
from plsc.version import install

METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"
_MOST_BYTES = 2**34  # of a file that a run continues


def scalars(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of an entry except the step, by name.

    The ``loss`` of a step is named ``loss_step``, an accuracy of an evaluation ``eval/lfw/accuracy``.
    """
    numbers: dict[str, float] = {}
    for key, value in entry.items():
        name = prefix + key if prefix else _STEP_NAMES.get(key, key)
        if isinstance(value, Mapping):
            numbers |= scalars(value, f"{name}/")
        elif isinstance(value, (int, float)) and math.isfinite(value) and name != "step":
            numbers[name.encode("utf-8", "replace").decode()] = value  # a path may not be UTF-8
    return numbers


_STEP_NAMES = {key: f"{key}_step" for key in ("loss", "accuracy", "accuracy_top5")}  # next to loss_epoch


class JsonLines:
    """Writes metrics.jsonl, one JSON object per line, and at the end of each epoch the plot loss.png.

    Lines after `step`, from an earlier attempt of a resumed run, are removed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / METRICS_NAME
        _drop_later_lines(self.path, step)
        self._file = open_regular(self.path, mode="ab")
        self._has_loss = False

    def write(self, entry: dict[str, Any]) -> None:
        """Write a line."""
        self._file.write(f"{json.dumps(entry)}\n".encode())
        self._file.flush()
        self._has_loss |= entry.get("mean_loss") is not None
        if "loss_epoch" in entry and self._has_loss:
            from plsc.evaluate.plots import plot_metrics  # importing matplotlib takes a third of a second

            plot_metrics(self.path, self.path.with_name(PLOT_NAME))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes TensorBoard events to the folder. Events after `step` are hidden by TensorBoard."""

    def __init__(self, folder: Path, step: int) -> None:
        with refusing("the logger tensorboard", f"run {install('tensorboard')}"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, entry: dict[str, Any]) -> None:
        """Write scalars."""
        for name, value in scalars(entry).items():
            self._writer.add_scalar(name, value, entry["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


LOGGERS: dict[str, Callable[[Path, int], Logger]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
}
"""The loggers by name; called with the folder of the run, and the step that it resumes (0: from scratch)."""


def _drop_later_lines(path: Path, step: int) -> None:
    """Remove lines that an earlier attempt wrote after `step`, and incomplete lines."""
    kept, text = [], ""
    with suppress(FileNotFoundError):
        text = read_regular(path, _MOST_BYTES, path.parent).decode(errors="replace")
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and entry["step"] <= step:
            kept.append(line + "\n")
    with replacing(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")


_ACCURACIES = ("accuracy", "accuracy_top5")


class Logging(Callback):
    """Writes metrics, evaluations and means of epochs to the loggers, on rank 0.

    custom: the user's loggers, in addition to those of `train.loggers`.
    """

    def __init__(self, custom: Sequence[Logger] = ()) -> None:
        self._custom = custom
        self._open: dict[str, Logger] = {}
        self._epoch = EpochMeans()
        self._context: Context | None = None

    def run_start(self, context: Context) -> None:
        """Open the loggers on rank 0."""
        self._context = context
        if not context.is_main:
            return
        context.folder.mkdir(parents=True, exist_ok=True)
        for name in listed_names(context.options.train.loggers):
            self._open[name] = LOGGERS[name](context.folder, context.step)
        self._open |= {f"{type(one).__name__} {number}": one for number, one in enumerate(self._custom)}

    def epoch_start(self, context: Context) -> None:
        """Start new means, unless the run resumes within the epoch."""
        if context.step_in_epoch == 0:
            self._epoch = EpochMeans()
        self._epoch.start()

    def after_step(self, context: Context) -> None:
        """Add the step to the means of the epoch."""
        self._epoch.add_losses(context.losses)
        self._epoch.add_step(context.output.batch, context.step_seconds, context.data_seconds)

    def logged(self, context: Context) -> None:
        """Write the metrics of a step."""
        self._epoch.add_accuracies(context.metrics, context.output.batch)
        self._write(context.metrics)

    def evaluated(self, context: Context) -> None:
        """Write the results of an evaluation."""
        results = {name: result.as_dict() for name, result in context.evaluation.items()}
        self._write({**_position(context), "eval": results})

    def epoch_end(self, context: Context) -> None:
        """Write the means of the epoch."""
        self._epoch.add_losses(context.losses)
        self._write({**_position(context), **self._epoch.means()})

    def run_end(self, context: Context) -> None:
        """Close the loggers."""
        for logger in self._open.values():
            logger.close()

    def exception(self, context: Context) -> None:
        """Close the loggers; a failure is logged, so that the run ends with its own exception."""
        for name, logger in self._open.items():
            try:
                logger.close()
            except Exception as error:  # of any library
                context.world.log(f"closing the logger {name} failed: {error}", logging.WARNING)

    def state_dict(self) -> dict[str, Any]:
        """Return the means of an unfinished epoch."""
        context = self._context
        if context is None or context.step_in_epoch == 0:
            return {}
        return {"epoch": self._epoch.state(context.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the means."""
        self._epoch.load(state.get("epoch", {}))

    def _write(self, entry: dict[str, Any]) -> None:
        for logger in self._open.values():
            logger.write(entry)


def _position(context: Context) -> dict[str, Any]:
    return {"step": context.step, "epoch": context.current_epoch}


class EpochMeans:
    """Loss, accuracy and speed over the steps of an epoch, those before a resume included."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._started = time.monotonic()

    def start(self) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def add_step(self, images: int, step_seconds: float, data_seconds: float) -> None:
        """Add a step with so many images over all ranks."""
        self._add(steps=1, images=images, step_seconds=step_seconds, data_seconds=data_seconds)

    def add_losses(self, losses: Sequence[tuple[float, int]]) -> None:
        """Add (mean loss, images) of steps; losses that are not finite are ignored."""
        for loss, images in losses:
            if math.isfinite(loss):
                self._add(loss=loss * images, loss_images=images)

    def add_accuracies(self, metrics: Mapping[str, Any], images: int) -> None:
        """Add the accuracies of a logged step, if they are measured."""
        for name in _ACCURACIES:
            if metrics[name] is not None:
                self._add(**{name: metrics[name] * images, f"{name}_images": images})

    def means(self) -> dict[str, float | None]:
        """Return the metrics of the epoch; the loss is None if no loss was finite."""
        sums = self._sums
        means: dict[str, float | None] = {"loss_epoch": None}
        for name in ("loss", *_ACCURACIES):
            if sums[f"{name}_images"]:
                means[f"{name}_epoch"] = sums[name] / sums[f"{name}_images"]
        if sums["steps"]:
            means["images_per_second_epoch"] = sums["images"] / max(sums["step_seconds"], 1e-9)
            means["data_seconds_epoch"] = sums["data_seconds"] / sums["steps"]
        return {**means, "seconds": self._seconds()}

    def state(self, pending: Sequence[tuple[float, int]]) -> dict[str, float]:
        """Return the sums; pending: losses that will be added after this step boundary."""
        whole = EpochMeans()
        whole._sums.update(self._sums)
        whole.add_losses(pending)
        return {**whole._sums, "seconds": self._seconds()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the sums of `state`."""
        self._sums.update({name: value for name, value in state.items() if is_finite_number(value)})

    def _seconds(self) -> float:
        return self._sums["seconds"] + time.monotonic() - self._started

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            self._sums[name] += value


class GradientNorm(Callback):
    """Logs the 2-norm of the gradient of the network, before clipping, in logged steps; a collective."""

    def after_backward(self, context: Context) -> None:
        """Add ``gradient_norm`` to the log line."""
        if context.is_logged:
            gradients = [p.grad for p in context.network.parameters() if p.grad is not None]
            context.log("gradient_norm", float(get_total_norm(map(gradient_values, gradients))))
