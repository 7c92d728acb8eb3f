"""Callbacks that hand metrics, means of epochs, the gradient norm and pictures to the loggers."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.nn.utils import get_total_norm

from plsc.config.option import is_finite_number
from plsc.config.train import listed_names
from plsc.errors import TrainingError, without_secrets
from plsc.parallel.backbone import gradient_values
from plsc.run.callbacks import Callback, Context, Logger
from plsc.run.loggers import LOGGERS
from plsc.run.targets import HeldOutSet, Target
from plsc.storage.publish import replacing
from plsc.storage.regular import check_inside

PICTURES = "pictures"  # folder of pictures, in the folder of the run
_RUN_ID = re.compile(r"[\w-]{1,128}")
_UNSAFE = re.compile(r"[^\w.-]")  # in file names
_GRID = (8, 8)  # rows and columns
_ACCURACIES = ("accuracy", "accuracy_top5")


class Logging(Callback):
    """Writes metrics, evaluations, means of epochs and pictures to the loggers, on rank 0.

    Args:
        custom: the user's loggers, in addition to those of `train.loggers`.
        is_same_run: whether a resumed run saves to the folder of its checkpoint; then it continues the runs
            of tracking tools.
    """

    def __init__(self, custom: Sequence[Logger] = (), is_same_run: bool = True) -> None:
        self._custom = custom
        self._is_same_run = is_same_run
        self._open: dict[str, Logger] = {}
        self._run_ids: dict[str, str] = {}
        self._epoch = EpochMeans()
        self._context: Context | None = None

    def run_start(self, context: Context) -> None:
        """Open the loggers on rank 0."""
        self._context = context
        if not context.is_main:
            return
        context.folder.mkdir(parents=True, exist_ok=True)
        options = without_secrets(context.options.as_dict())
        for name in listed_names(context.options.train.loggers):
            with _explaining_errors(name, context.folder):
                run_id = self._run_ids.get(name, "")
                self._open[name] = LOGGERS[name](context.folder, context.step, options, run_id)
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
        self._write(context, context.metrics)
        self._write_pictures(context)

    def evaluated(self, context: Context) -> None:
        """Write the results of an evaluation."""
        results = {name: result.as_dict() for name, result in context.evaluation.items()}
        self._write(context, {**_position(context), "eval": results})
        self._write_pictures(context)

    def epoch_end(self, context: Context) -> None:
        """Write the means of the epoch."""
        self._epoch.add_losses(context.losses)
        self._write(context, {**_position(context), **self._epoch.means()})

    def run_end(self, context: Context) -> None:
        """Close the loggers."""
        for name, logger in self._open.items():
            with _explaining_errors(name, context.folder):
                logger.close()

    def exception(self, context: Context) -> None:
        """Close the loggers; a failure is logged, so that the run ends with its own exception."""
        for name, logger in self._open.items():
            if hasattr(logger, "exit_code"):
                stopped = 128 + signal.SIGINT if isinstance(context.error, KeyboardInterrupt) else 1
                logger.exit_code = getattr(context.error, "exit_code", stopped)
            try:
                logger.close()
            except Exception as error:  # of any library
                context.world.log(f"closing the logger {name} failed: {error}", logging.WARNING)

    def state_dict(self) -> dict[str, Any]:
        """Return the run ids of tracking tools, and the means of an unfinished epoch."""
        state: dict[str, Any] = {}
        run_ids = {name: getattr(one, "run_id", "") for name, one in self._open.items() if name in LOGGERS}
        if any(run_ids.values()):
            state["run_ids"] = {name: run_id for name, run_id in run_ids.items() if run_id}
        if self._context is not None and self._context.step_in_epoch:
            state["epoch"] = self._epoch.state(self._context.losses)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the run ids and the means."""
        saved = {name: values for name, values in state.items() if isinstance(values, dict)}
        self._epoch.load(saved.get("epoch", {}))
        if self._is_same_run:
            self._run_ids = {
                name: run_id
                for name, run_id in saved.get("run_ids", {}).items()
                if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id)
            }

    def _write(self, context: Context, entry: dict[str, Any]) -> None:
        for name, logger in self._open.items():
            with _explaining_errors(name, context.folder):
                logger.write(entry)

    def _write_pictures(self, context: Context) -> None:
        if context.pictures:
            pictures = {name: str(path) for name, path in context.pictures.items()}
            self._write(context, {**_position(context), "pictures": pictures})
            context.pictures = {}


def _position(context: Context) -> dict[str, Any]:
    return {"step": context.step, "epoch": context.current_epoch}


@contextlib.contextmanager
def _explaining_errors(name: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        raise TrainingError(
            f"the logger {name} cannot write {where}: {error.strerror or error}; free space or check the "
            "permissions, or choose another folder as checkpoint.save_dir. Checkpoints saved before are "
            "intact"
        ) from error


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


class Pictures(Callback):
    """Draws the first batch of each epoch and the hardest pairs of each evaluation, on rank 0."""

    def __init__(self, targets: Sequence[Target | HeldOutSet]) -> None:
        pair_files = (target for target in targets if isinstance(target, Target))
        self._targets = [(target, target.pictures) for target in pair_files if target.pictures]

    def batch_start(self, context: Context) -> None:
        """Draw the first images of the first batch of this rank, after augmentation."""
        if context.is_main and context.step_in_epoch == 0 and not context.batch.is_input:
            images: Any = context.batch.final_images()
            images = images[: _GRID[0] * _GRID[1]]
            path = _picture_path(context, f"batch_{context.epoch}.png")
            with replacing(path) as temporary:
                Image.fromarray(grid_of(images)).save(temporary, "PNG")
            context.log_picture("batch", path)

    def evaluated(self, context: Context) -> None:
        """Draw the hardest pairs of each pair file."""
        for target, images in self._targets if context.is_main else ():
            from plsc.evaluate.plots import plot_hardest_pairs  # matplotlib is slow to import

            cosines = context.evaluation[target.name].cosines
            path = _picture_path(context, f"{_UNSAFE.sub('_', target.name)}_hardest_{context.step}.png")
            plot_hardest_pairs(images, target.is_same, cosines, path)
            context.log_picture(f"hardest pairs/{target.name}", path)


def _picture_path(context: Context, name: str) -> Path:
    folder = context.folder / PICTURES
    folder.mkdir(exist_ok=True)
    check_inside(folder, context.folder)
    return folder / name


def grid_of(images: Tensor) -> np.ndarray:
    """Return images [n, C, H, W], uint8 or normalised floats, side by side: uint8 [rows * H, 8 * W, 3]."""
    if images.is_floating_point():
        images = (images * 128 + 127.5).clamp(0, 255).byte()
    pixels = images.cpu().numpy()
    pixels = pixels if pixels.shape[1] == 3 else pixels[:, :1].repeat(3, axis=1)
    rows, columns = -(-len(pixels) // _GRID[1]), min(len(pixels), _GRID[1])
    height, width = pixels.shape[2:]
    grid = np.full((rows * columns, 3, height, width), 255, np.uint8)
    grid[: len(pixels)] = pixels
    return (
        grid.reshape(rows, columns, 3, height, width)
        .transpose(0, 3, 1, 4, 2)
        .reshape(rows * height, columns * width, 3)
    )
