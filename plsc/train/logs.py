"""Output of a training run on rank 0: log lines, a progress bar, metrics.jsonl and the loss plot."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from plsc.data.batch import BadSample
from plsc.data.samples import BadSampleList
from plsc.errors import TrainingError, shown
from plsc.parallel.world import World
from plsc.storage.publish import replacing

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"
_SHOWN = 10  # bad samples printed per rank: all samples of a dataset may be bad


class TimeLeft:
    """Estimates the remaining time of a run from the wall-clock time per step so far.

    Evaluation and stalls between the steps count. The first step does not: it includes start-up work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = self._last = 0.0
        self._steps = -1

    def advance(self) -> None:
        """Count a step that has just ended."""
        self._last = self._clock()
        if self._steps < 0:
            self._first = self._last
        self._steps += 1

    def seconds(self, steps_left: int) -> float | None:
        """Return the estimate for `steps_left` steps, None before two steps were measured."""
        return steps_left * (self._last - self._first) / self._steps if self._steps > 0 else None


def format_duration(seconds: float) -> str:
    """Return a duration as two units at most: ``42s``, ``5m12s``, ``3h05m`` or ``2d07h``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_rest = divmod(minutes, 60)
    days, hours_rest = divmod(hours, 24)
    if days:
        return f"{days}d{hours_rest:02d}h"
    if hours:
        return f"{hours}h{minutes_rest:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class RunLog:
    """Writes log lines and metrics on rank 0; on other ranks every method does nothing.

    Args:
        save_dir: folder of metrics.jsonl and loss.png.
        is_main: whether this is rank 0.
        start_step: step from which the run resumes; later lines of metrics.jsonl, from an earlier attempt,
            are removed.
        total_steps: length of the progress bar, None if unknown.
        epochs: number of epochs to print with the current one; None: print no number.
    """

    def __init__(
        self,
        save_dir: Path,
        is_main: bool,
        start_step: int,
        total_steps: int | None,
        epochs: int | None = None,
    ) -> None:
        self.folder = save_dir
        self._epochs = epochs
        self._time_left = TimeLeft()
        self._path = save_dir / METRICS_NAME
        self._plot = save_dir / PLOT_NAME
        self._file: TextIO | None = None
        self._bar: tqdm | None = None
        self._is_main = is_main
        self._has_steps = False
        if not is_main:
            return
        with self._explaining_errors():
            save_dir.mkdir(parents=True, exist_ok=True)
            _drop_later_lines(self._path, start_step)
            self._file = self._path.open("a", encoding="utf-8")
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True)

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Log a message, line by line."""
        for line in text.splitlines() if self._is_main else ():
            logger.log(level, shown(line))

    def advance(self) -> None:
        """Count a step for the progress bar and the estimate of the time left."""
        self._time_left.advance()
        if self._bar is not None:
            self._bar.update()

    def step(self, metrics: dict[str, Any], total_steps: int | None) -> None:
        """Write the metrics of a step to metrics.jsonl, and a log line with the progress of the run."""
        if not self._is_main:
            return
        self._write(metrics)
        self._has_steps = True
        values = {
            key: "overflow" if value is None else f"{value:#.4g}"
            for key, value in metrics.items()
            if key == "loss" or key.startswith("loss/")
        }
        values["lr"] = f"{metrics['lr']:.4g}"
        if metrics["accuracy"] is not None:
            values["accuracy"] = f"{metrics['accuracy']:.3f}"
        if metrics.get("loss_scale") is not None:
            values["loss_scale"] = f"{metrics['loss_scale']:g}"
            values["skipped_steps"] = str(metrics["skipped_steps"])
        steps_left = total_steps - metrics["step"] if total_steps else 0
        seconds = self._time_left.seconds(steps_left)
        parts = [
            self._progress(metrics["epoch"], metrics["step"], total_steps),
            *(f"{name} {value}" for name, value in values.items()),
            f"{metrics['images_per_second']:.0f} images/s",
            *([f"{format_duration(seconds)} left"] if steps_left > 0 and seconds is not None else []),
        ]
        self.message(" ".join(parts))

    def _progress(self, epoch: int, step: int, total_steps: int | None = None) -> str:
        """Return ``epoch 1/3 step 200/1241``; the epoch counts from 1 here, from 0 in metrics.jsonl."""
        epochs = f"/{self._epochs}" if self._epochs else ""
        steps = f"/{total_steps}" if total_steps else ""
        return f"epoch {epoch + 1}{epochs} step {step}{steps}"

    def evaluation(self, step: int, epoch: int, results: dict[str, dict[str, Any]]) -> None:
        """Write the results of an evaluation, by the name of the pair file."""
        if not self._is_main or not results:
            return
        self._write({"step": step, "epoch": epoch, "eval": results})
        for name, result in results.items():
            self.message(
                f"{self._progress(epoch, step)} {name}: accuracy {result['accuracy']:.4f} "
                f"+- {result['accuracy_std']:.4f}"
            )

    def plot(self) -> None:
        """Plot metrics.jsonl to loss.png if it has steps."""
        if self._is_main and self._has_steps:
            from plsc.evaluate.plots import plot_metrics  # importing matplotlib takes a third of a second

            plot_metrics(self._path, self._plot)

    def close(self) -> None:
        """Close metrics.jsonl and the progress bar."""
        if self._file is not None:
            self._file.close()
        if self._bar is not None:
            self._bar.close()

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            with self._explaining_errors():
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()

    @contextlib.contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"cannot write {self._path}: {error.strerror}; free space or check the permissions, or "
                "choose another folder with set_model_save_dir. Checkpoints saved before are intact"
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


class BadSampleReport:
    """Collects the bad samples of all ranks; rank 0 writes them to ``bad_samples.txt``."""

    def __init__(self, world: World, log: RunLog, policy: str) -> None:
        self._world = world
        self._log = log
        self._done = "replaced" if policy == "replace" else "skipped"
        self._list = BadSampleList(log.folder) if world.is_main else None
        self._pending: list[BadSample] = []
        self._shown: set[str] = set()
        self._is_cut = False

    def add(self, problems: list[BadSample]) -> None:
        """Add the bad samples of a batch of this rank; the first few are logged, each only once."""
        for problem in problems:
            if problem.text in self._shown:
                continue
            if len(self._shown) < _SHOWN:
                self._shown.add(problem.text)
                logger.warning(f"{self._done}: {problem.text}")
            elif not self._is_cut:
                self._is_cut = True
                logger.warning("more bad samples were found; they are only listed in bad_samples.txt")
        self._pending.extend(problems)

    def gather(self) -> int:
        """Write the bad samples of all ranks since the last call to the file; a collective.

        Returns the number of different bad samples so far on rank 0, and 0 on other ranks.
        """
        everywhere = self._world.all_gather_object(self._pending)
        self._pending = []
        if self._list is None:
            return 0
        self._list.add([problem for part in everywhere for problem in part])
        return sum(self._list.counts.values())

    def log_summary(self) -> None:
        """Log the number of bad samples of each kind, if there are any."""
        if self._list is not None and self._list.counts:
            self._log.message(f"bad samples: {self._list.summary()}; listed in {self._list.path}")


@dataclass
class Mean:
    """The mean of a loss over images; `value` is defined once `count` is positive."""

    count: int = 0
    total: float = 0.0

    def add(self, loss: float, images: int) -> None:
        """Add the mean loss of a step with this number of images."""
        self.count += images
        self.total += loss * images

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count


class Meter:
    """Measures speed and loss over the steps since the last `report`."""

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

    def add_loss(self, loss: float) -> None:
        """Add the loss of this step or an earlier one; values that are not finite are ignored."""
        if math.isfinite(loss):
            self._losses.add(loss, 1)

    def report(self) -> dict[str, float | int | None]:
        """Return the means over the steps since the last report, and reset them.

        mean_loss is None if no loss was finite. images_per_second counts images of all ranks,
        skipped_images those of this rank.
        """
        steps = max(1, self._steps)
        report: dict[str, float | int | None] = {
            "mean_loss": self._losses.value if self._losses.count else None,
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
        self._losses = Mean()
