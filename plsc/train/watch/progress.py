"""Progress of a run: log lines and a progress bar on rank 0, a log file on every other rank."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper

from tqdm import tqdm

from plsc.parallel.world import other_ranks
from plsc.run.callbacks import Callback, Context
from plsc.storage.regular import open_regular

SLOW_STEP = 10.0  # seconds
_BAR = "{desc} {percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix}"
_COUNT = "{desc} step {n_fmt}{postfix}"  # of unknown length
_plsc = logging.getLogger("plsc")


class _LogFile(logging.FileHandler):
    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(open_regular(self.baseFilename, mode="ab"), self.encoding)


class Progress(Callback):
    """Logs the metrics and evaluations of a run, and shows a progress bar on a terminal.

    Ranks other than 0 append the same lines, and their own warnings, to ``log-rank<r>.txt``.
    """

    def __init__(self) -> None:
        self._time_left = TimeLeft()
        self._bar: tqdm | None = None
        self._file: logging.Handler | None = None
        self._first_step = 0

    def run_start(self, context: Context) -> None:
        """Open the progress bar or the log file."""
        self._first_step = context.step + 1
        if not context.is_main:
            context.folder.mkdir(parents=True, exist_ok=True)
            self._file = _LogFile(context.folder / f"log-rank{context.rank}.txt", encoding="utf-8")
            self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            for log in (_plsc, other_ranks):
                log.addHandler(self._file)
        elif sys.stderr.isatty() and _plsc.isEnabledFor(logging.INFO):
            total = context.total_steps
            shape = _BAR if total else _COUNT
            self._bar = tqdm(total=total, initial=context.step, dynamic_ncols=True, bar_format=shape)

    def after_step(self, context: Context) -> None:
        """Show the step in the progress bar; count it for the estimate of the time left."""
        self._time_left.advance()
        if self._bar is not None:
            loss = context.mean_loss  # unknown after an overflow, or if losses are read late
            if loss is None:
                loss = context.metrics.get("mean_loss")
            self._bar.set_description_str(_epoch_of(context, context.current_epoch), refresh=False)
            self._bar.set_postfix_str(self._numbers(context, loss), refresh=False)
            self._bar.update()
        if context.step == self._first_step:
            period = context.options.train.log_period
            context.world.log(slow_start(context.step_seconds, period) if period > 1 else None)

    def logged(self, context: Context) -> None:
        """Log the progress, the mean loss since the last line, and the time left."""
        metrics, total = context.metrics, context.total_steps
        steps = f"/{total}" if total else ""
        epoch = _epoch_of(context, metrics["epoch"])
        context.world.log(
            f"{epoch} step {context.step}{steps} {self._numbers(context, metrics['mean_loss'])}"
        )

    def evaluated(self, context: Context) -> None:
        """Log the results."""
        for name, result in context.evaluation.items():
            epoch = _epoch_of(context, context.current_epoch)
            context.world.log(f"{epoch} step {context.step} {name}: {result.summary()}")

    def run_end(self, context: Context) -> None:
        """Close the progress bar or the log file."""
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            for log in (_plsc, other_ranks):
                log.removeHandler(self._file)
            self._file.close()

    def exception(self, context: Context) -> None:
        """Write the error to the log file; close the progress bar or the log file."""
        other_ranks.error("%s: %s", type(context.error).__name__, context.error)
        self.run_end(context)

    def _numbers(self, context: Context, loss: float | None) -> str:
        """Return ``loss 5.876 accuracy 0.912 lr 0.1 429 images/s 23s left``, as far as known."""
        metrics = context.metrics
        parts = [f"loss {'overflow' if loss is None else f'{loss:#.4g}'}"]
        for key, text in _NUMBERS.items():
            if metrics.get(key) is not None:
                parts.append(text.format(metrics[key]))
        steps_left = (context.total_steps or 0) - context.step
        seconds = self._time_left.seconds(steps_left)
        if steps_left > 0 and seconds is not None:
            parts.append(f"{format_duration(seconds)} left")
        return " ".join(parts)


_NUMBERS = {
    "accuracy": "accuracy {:.3f}",
    "accuracy_top5": "top-5 {:.3f}",
    "left_out": "left out {:.3f}",
    "hard_recall": "hard recall {:.3f}",
    "lr": "lr {:.4g}",
    "loss_scale": "loss_scale {:g}",
    "skipped_steps": "skipped_steps {}",
    "images_per_second": "{:.0f} images/s",
}


def _epoch_of(context: Context, epoch: int) -> str:
    """Return ``epoch 1/3``; the epoch counts from 1 here, from 0 in metrics.jsonl."""
    train = context.options.train
    return f"epoch {epoch + 1}" + ("" if train.steps else f"/{train.epochs}")


def slow_start(seconds: float, log_period: int) -> str | None:
    """Return a line about the next log line if the first step took long."""
    if seconds < SLOW_STEP:
        return None
    return (
        f"the first step took {seconds:.0f} s; progress is logged every {log_period} steps "
        "(train.log_period) and at the end of each epoch"
    )


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
