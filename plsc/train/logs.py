"""What a run tells: metrics.jsonl, the loss plot, and lines or a progress bar, from one rank."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
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
_SHOWN = 10  # bad samples on the terminal per rank; a dataset may be bad altogether


class RunLog:
    """Writes for rank 0; on other ranks every method does nothing.

    save_dir: folder of metrics.jsonl and loss.png; start_step: step the run resumes from, whose later
    lines, if there are some of an earlier attempt, are dropped; total_steps: for the bar, None if the
    length is unknown.
    """

    def __init__(self, save_dir: Path, is_main: bool, start_step: int, total_steps: int | None) -> None:
        self.folder = save_dir
        self._path = save_dir / METRICS_NAME
        self._plot = save_dir / PLOT_NAME
        self._file: TextIO | None = None
        self._bar: tqdm | None = None
        self._is_main = is_main
        self._has_steps = False
        if not is_main:
            return
        with self._telling_of_failure():
            save_dir.mkdir(parents=True, exist_ok=True)
            _drop_later_lines(self._path, start_step)
            self._file = self._path.open("a", encoding="utf-8")
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Log a message of rank 0, line by line."""
        for line in text.splitlines() if self._is_main else ():
            logger.log(level, shown(line))

    def advance(self) -> None:
        """One step is made."""
        if self._bar is not None:
            self._bar.update()

    def step(self, metrics: dict[str, Any], total_steps: int | None) -> None:
        """Write a logged step to metrics.jsonl and to the terminal."""
        if not self._is_main:
            return
        self._write(metrics)
        self._has_steps = True
        losses = {
            key: "overflow" if value is None else f"{value:.4f}"
            for key, value in metrics.items()
            if key == "loss" or key.startswith("loss/")
        }
        shown = {**losses, "lr": f"{metrics['lr']:.4g}"}
        if metrics["accuracy"] is not None:
            shown["accuracy"] = f"{metrics['accuracy']:.3f}"
        if metrics.get("loss_scale") is not None:
            shown["scale"] = f"{metrics['loss_scale']:g}"
            shown["skipped"] = str(metrics["skipped_steps"])
        shown["images/s"] = f"{metrics['images_per_second']:.0f}"
        of = f"/{total_steps}" if total_steps else ""
        values = " ".join(f"{name} {value}" for name, value in shown.items())
        self.say(f"epoch {metrics['epoch']} step {metrics['step']}{of} {values}")

    def evaluation(self, step: int, epoch: int, results: dict[str, dict[str, Any]]) -> None:
        """Write the results of an evaluation, by name of the pair file."""
        if not self._is_main or not results:
            return
        self._write({"step": step, "epoch": epoch, "eval": results})
        for name, result in results.items():
            self.say(
                f"epoch {epoch} step {step} {name}: accuracy {result['accuracy']:.4f} "
                f"+- {result['accuracy_std']:.4f}"
            )

    def plot(self) -> None:
        """Draw metrics.jsonl into loss.png, once a step was logged."""
        if self._is_main and self._has_steps:
            from plsc.evaluate.plots import plot_metrics  # matplotlib takes a third of a second

            plot_metrics(self._path, self._plot)

    def close(self) -> None:
        """Close the file and the bar."""
        if self._file is not None:
            self._file.close()
        if self._bar is not None:
            self._bar.close()

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            with self._telling_of_failure():
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()

    @contextlib.contextmanager
    def _telling_of_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"cannot write {self._path}: {error.strerror}; see to the folder, or "
                "set_model_save_dir to another; checkpoints that were saved are whole"
            ) from error


def _drop_later_lines(path: Path, step: int) -> None:
    """Remove what an earlier attempt wrote after `step`, and a torn last line."""
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
    """Collects the bad samples of all ranks; rank 0 writes ``bad_samples.txt`` next to the log."""

    def __init__(self, world: World, log: RunLog, policy: str) -> None:
        self._world = world
        self._log = log
        self._done = "replaced" if policy == "replace" else "skipped"
        self._list = BadSampleList(log.folder) if world.is_main else None
        self._pending: list[BadSample] = []
        self._shown: set[str] = set()
        self._is_cut = False

    def note(self, problems: list[BadSample]) -> None:
        """Take what a batch of this rank met; the first few are printed, each in one epoch alone."""
        for problem in problems:
            if problem.text in self._shown:
                continue
            if len(self._shown) < _SHOWN:
                self._shown.add(problem.text)
                logger.warning(f"{self._done}: {problem.text}")
            elif not self._is_cut:
                self._is_cut = True
                logger.warning("further ones are in bad_samples.txt alone")
        self._pending.extend(problems)

    def gather(self) -> int:
        """Bring what all ranks met since the last time into the file; a collective.

        Returns how many different bad samples the run has met, on rank 0; 0 on the others.
        """
        everywhere = self._world.all_gather_object(self._pending)
        self._pending = []
        if self._list is None:
            return 0
        self._list.add([problem for part in everywhere for problem in part])
        return sum(self._list.counts.values())

    def say(self) -> None:
        """Print how many there are of each kind, if there are some."""
        if self._list is not None and self._list.counts:
            self._log.say(f"bad samples: {self._list.summary()}; listed in {self._list.path}")


@dataclass
class Mean:
    """The mean of a loss over images; `value` only if there were any."""

    count: int = 0
    total: float = 0.0

    def add(self, loss: float, images: int) -> None:
        """Count a step's loss over so many images."""
        self.count += images
        self.total += loss * images

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count


class Meter:
    """Sums over the steps since the last `report`."""

    def __init__(self) -> None:
        self.wait = self.step = 0.0  # seconds of the last step: until its batch was there, and in all
        self._clear()

    def start_step(self) -> None:
        """A step begins: its batch is asked for."""
        self._started = time.perf_counter()

    def batch_arrived(self) -> None:
        """The batch is here; what the step took until now was spent waiting for data."""
        self.wait = time.perf_counter() - self._started
        self._data_seconds += self.wait

    def end_step(self, images: int, skipped: int) -> None:
        """Count a step: images of the global batch, bad images skipped on this rank."""
        self.step = time.perf_counter() - self._started
        self._step_seconds += self.step
        self._steps += 1
        self._images += images
        self._skipped += skipped

    def add_loss(self, loss: float) -> None:
        """Count a loss that was read, of this step or one before; one that is not finite is left out."""
        if math.isfinite(loss):
            self._losses.add(loss, 1)

    def report(self) -> dict[str, float | int | None]:
        """Return the means over the steps since the last report, and start anew.

        mean_loss is None if no loss was finite.
        images_per_second counts the images of all ranks, skipped_images those of this rank.
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
