"""What a run logs: lines or a progress bar on the terminal, bad samples, metrics in files and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from plsc.config.option import is_finite_number
from plsc.data.batch import LIST_NAME, BadSample, BadSampleList
from plsc.errors import refusing
from plsc.parallel.world import World
from plsc.storage.disk import open_regular, read_regular, replacing
from plsc.train.callbacks import Callback, Context, Logger
from plsc.version import install

logger = logging.getLogger(__name__)


QUIET = 30.0  # seconds after which a step is logged that is not due, where there is no bar
_BAR = "{desc} {percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} {remaining} left{postfix}"
_COUNT = "{desc} step {n_fmt}{postfix}"  # of unknown length


class Progress(Callback):
    """Logs the metrics and evaluations of a run, and shows a progress bar on a terminal; on rank 0.

    epochs: those of the run; None if it ends after a number of steps.
    """

    def __init__(self, epochs: int | None) -> None:
        self._of = "" if epochs is None else f"/{epochs}"
        self._bar: tqdm | None = None
        self._spoke = time.monotonic()

    def run_start(self, context: Context) -> None:
        """Open the progress bar."""
        self._spoke = time.monotonic()
        if context.is_main and sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
            total = context.total_steps
            shape = _BAR if total else _COUNT
            self._bar = tqdm(total=total, initial=context.step, dynamic_ncols=True, bar_format=shape)

    def after_step(self, context: Context) -> None:
        """Show the step, or log it if no line was logged for long."""
        if self._bar is not None:
            self._bar.set_description_str(self._epoch_of(context.current_epoch), refresh=False)
            self._bar.set_postfix_str(self._numbers(context, self._loss(context)), refresh=False)
            self._bar.update()
        elif not context.is_logged and time.monotonic() - self._spoke > QUIET:
            self._log(context, context.current_epoch, self._loss(context))

    def logged(self, context: Context) -> None:
        """Log the progress and the mean loss since the last line."""
        self._log(context, context.metrics["epoch"], context.metrics["mean_loss"])

    def _log(self, context: Context, epoch: int, loss: float | None) -> None:
        self._spoke = time.monotonic()
        steps = f"{context.step}/{context.total_steps}" if context.total_steps else f"{context.step}"
        context.world.log(f"{self._epoch_of(epoch)} step {steps} {self._numbers(context, loss)}")

    def _loss(self, context: Context) -> float | None:
        """Return the last known mean loss: that of a step is unknown if losses are read late."""
        return context.metrics.get("mean_loss") if context.mean_loss is None else context.mean_loss

    def evaluated(self, context: Context) -> None:
        """Log the results."""
        for name, result in context.evaluation.items():
            epoch = self._epoch_of(context.current_epoch)
            context.world.log(f"{epoch} step {context.step} {name}: {result.summary()}")

    def run_end(self, context: Context) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    exception = run_end

    def _epoch_of(self, epoch: int) -> str:
        """Return ``epoch 1/3``; the epoch counts from 1 here, from 0 in metrics.jsonl."""
        return f"epoch {epoch + 1}{self._of}"

    def _numbers(self, context: Context, loss: float | None) -> str:
        """Return ``loss 5.876 accuracy 0.912 lr 0.1 429 images/s``, as far as known."""
        metrics = context.metrics
        parts = [f"loss {'overflow' if loss is None else f'{loss:#.4g}'}"]
        for key, text in _NUMBERS.items():
            if metrics.get(key) is not None:
                parts.append(text.format(metrics[key]))
        return " ".join(parts)


_NUMBERS = {
    "accuracy": "accuracy {:.3f}",
    "accuracy_top5": "top-5 {:.3f}",
    "lr": "lr {:.4g}",
    "loss_scale": "loss_scale {:g}",
    "skipped_steps": "skipped_steps {}",
    "images_per_second": "{:.0f} images/s",
}


class Meter:
    """Measures the speed over the steps since the last `report`."""

    def __init__(self) -> None:
        self.wait = self.step = 0.0  # seconds of the last step: waiting for its batch, and in total
        self._clear()

    def start_step(self) -> None:
        """Start timing a step, before its batch is requested."""
        self._started = time.perf_counter()

    def batch_arrived(self) -> None:
        """Record the time since the start of the step as waiting for data."""
        self.wait = time.perf_counter() - self._started
        self._data_seconds += self.wait

    def end_step(self, images: int, skipped: int) -> None:
        """Count a step: images of the global batch, and bad images skipped on this rank."""
        self.step = time.perf_counter() - self._started
        self._step_seconds += self.step
        self._steps += 1
        self._images += images
        self._skipped += skipped

    def report(self) -> dict[str, float | int]:
        """Return the means over the steps since the last report, and reset them.

        images_per_second counts images of all ranks, skipped_images those of this rank.
        """
        steps = max(1, self._steps)
        report: dict[str, float | int] = {
            "images_per_second": self._images / max(self._step_seconds, 1e-9),
            "data_seconds": self._data_seconds / steps,
            "step_seconds": self._step_seconds / steps,
            "skipped_images": self._skipped,
        }
        self._clear()
        return report

    def _clear(self) -> None:
        self._started = time.perf_counter()
        self._steps = self._images = self._skipped = 0
        self._data_seconds = self._step_seconds = 0.0


_SHOWN = 10  # bad samples printed per rank: all samples of a dataset may be bad


class BadSampleReport:
    """Collects the bad samples of all ranks; rank 0 writes them to a file in the folder, if there is one."""

    def __init__(self, world: World, folder: Path | None, name: str = LIST_NAME) -> None:
        self._world = world
        self._list = BadSampleList(folder, name) if world.is_main and folder is not None else None
        self._others = "not logged" if folder is None else f"only listed in {name}"
        self._pending: list[BadSample] = []
        self._shown: set[str] = set()
        self._is_cut = False
        self._summary = ""  # the last one logged

    def add(self, problems: list[BadSample]) -> None:
        """Add the bad samples of a batch of this rank; the first few are logged, each only once."""
        for problem in problems:
            if problem.text in self._shown:
                continue
            if len(self._shown) < _SHOWN:
                self._shown.add(problem.text)
                logger.warning(f"skipped: {problem.text}")
            elif not self._is_cut:
                self._is_cut = True
                logger.warning(f"more bad samples were found; they are {self._others}")
        self._pending.extend(problems)

    def gather(self) -> int:
        """Write the bad samples of all ranks since the last call to the file; a collective.

        Returns the number of different bad samples so far on rank 0, and 0 on other ranks.
        """
        everywhere = self._world.all_gather_object([vars(problem) for problem in self._pending])
        self._pending = []
        if self._list is None:
            return 0
        self._list.add([BadSample(**problem) for part in everywhere for problem in part])
        return sum(self._list.counts.values())

    def log_summary(self) -> None:
        """Log the number of bad samples of each kind, if it has changed."""
        summary = "" if self._list is None else self._list.summary()
        if self._list is not None and summary != self._summary:
            self._summary = summary
            self._world.log(f"bad samples: {summary}; listed in {self._list.path}")


METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"
_MOST_BYTES = 2**34  # of a file that a run continues
_MOST_PLOTTED = 1e30  # of a foreign file; matplotlib fails with more


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
        self._points: dict[int, tuple[float, float]] = {}
        for entry in _drop_later_lines(self.path, step):
            self._add(entry)
        self._file = open_regular(self.path, mode="ab")

    def write(self, entry: dict[str, Any]) -> None:
        """Write a line."""
        self._file.write(f"{json.dumps(entry)}\n".encode())
        self._file.flush()
        self._add(entry)
        if "loss_epoch" in entry and self._points:
            plot_losses(self._points, self.path.with_name(PLOT_NAME))

    def _add(self, entry: dict[str, Any]) -> None:
        loss, rate = [entry.get(key, math.nan) for key in ("mean_loss", "lr")]
        if is_finite_number(loss) and is_finite_number(rate) and max(abs(loss), abs(rate)) < _MOST_PLOTTED:
            self._points[entry["step"]] = loss, rate

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


def _drop_later_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove lines that an earlier attempt wrote after `step`, and incomplete lines; return the others."""
    kept, entries, text = [], [], ""
    with suppress(FileNotFoundError):
        text = read_regular(path, _MOST_BYTES, path.parent).decode(errors="replace")
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and 0 <= entry["step"] <= step:
            kept.append(line + "\n")
            entries.append(entry)
    with replacing(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
    return entries


def plot_losses(points: Mapping[int, tuple[float, float]], path: Path) -> None:
    """Plot ``{step: (mean loss, learning rate)}``. Raises DataError if the file cannot be written."""
    from matplotlib import rc_context  # takes a third of a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    from plsc.evaluate.plots import STYLE

    steps = sorted(points)
    with rc_context(STYLE), replacing(path) as temporary:
        figure = Figure((6.4, 4.2), layout="tight")
        panels = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2, 1)})
        for column, label in enumerate(("Mean loss", "Learning rate")):
            values = [points[step][column] for step in steps]
            panels[column].plot(steps, values, color="#333333", marker="o" if len(steps) == 1 else None)
            panels[column].set_ylabel(label)
        panels[-1].set_ylim(0, None)
        panels[-1].set_xlabel("Step")
        panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.align_ylabels(panels)
        figure.savefig(temporary, format="png")


_ACCURACIES = ("accuracy", "accuracy_top5")


class Logging(Callback):
    """Writes metrics, evaluations and means of epochs to the loggers, on rank 0.

    names: of LOGGERS. custom: the user's loggers.
    """

    def __init__(self, names: Sequence[str], custom: Sequence[Logger]) -> None:
        self._names, self._custom = names, custom
        self._open: dict[str, Logger] = {}
        self._epoch = EpochMeans()
        self._context: Context | None = None

    def run_start(self, context: Context) -> None:
        """Open the loggers on rank 0."""
        self._context = context
        if not context.is_main:
            return
        context.folder.mkdir(parents=True, exist_ok=True)
        for name in self._names:
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
