"""Progress of a run on rank 0: log lines and a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from plsc.train.callbacks import Callback, Context

SLOW_STEP = 10.0  # seconds


class Progress(Callback):
    """Logs the metrics and evaluations of a run, and shows a progress bar on a terminal; only on rank 0."""

    def __init__(self) -> None:
        self._time_left = TimeLeft()
        self._bar: tqdm | None = None
        self._first_step = 0

    def run_start(self, context: Context) -> None:
        """Open the progress bar."""
        self._first_step = context.step + 1
        if context.is_main and sys.stderr.isatty():
            total = context.total_steps
            self._bar = tqdm(total=total, initial=context.step, unit="step", dynamic_ncols=True)

    def after_step(self, context: Context) -> None:
        """Count a step for the progress bar and the estimate of the time left."""
        self._time_left.advance()
        if self._bar is not None:
            self._bar.update()
        if context.step == self._first_step:
            period = context.options.train.log_period
            context.world.log(slow_start(context.step_seconds, period) if period > 1 else None)

    def logged(self, context: Context) -> None:
        """Log the metrics, the progress and the time left."""
        metrics, total = context.metrics, context.total_steps
        values = {
            key: "overflow" if value is None else f"{value:#.4g}"
            for key, value in metrics.items()
            if key == "loss" or key.startswith("loss/")
        }
        values["lr"] = f"{metrics['lr']:.4g}"
        if metrics["accuracy"] is not None:
            values["accuracy"] = f"{metrics['accuracy']:.3f}"
        if metrics["accuracy_top5"] is not None:
            values["top5"] = f"{metrics['accuracy_top5']:.3f}"
        if metrics.get("loss_scale") is not None:
            values["loss_scale"] = f"{metrics['loss_scale']:g}"
            values["skipped_steps"] = str(metrics["skipped_steps"])
        steps_left = total - context.step if total else 0
        seconds = self._time_left.seconds(steps_left)
        parts = [
            _position(context, metrics["epoch"], total),
            *(f"{name} {value}" for name, value in values.items()),
            f"{metrics['images_per_second']:.0f} images/s",
            *([f"{format_duration(seconds)} left"] if steps_left > 0 and seconds is not None else []),
        ]
        context.world.log(" ".join(parts))

    def evaluated(self, context: Context) -> None:
        """Log the results."""
        for name, result in context.evaluation.items():
            context.world.log(f"{_position(context, context.current_epoch)} {name}: {result.summary()}")

    def run_end(self, context: Context) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    exception = run_end


def _position(context: Context, epoch: int, total_steps: int | None = None) -> str:
    """Return ``epoch 1/3 step 200/1241``; the epoch counts from 1 here, from 0 in metrics.jsonl."""
    train = context.options.train
    epochs = "" if train.steps else f"/{train.epochs}"
    steps = f"/{total_steps}" if total_steps else ""
    return f"epoch {epoch + 1}{epochs} step {context.step}{steps}"


def slow_start(seconds: float, log_period: int) -> str | None:
    """Return a line about the next log line if the first step took long."""
    if seconds < SLOW_STEP:
        return None
    return (
        f"the first step took {seconds:.0f} s; progress is logged every {log_period} steps "
        "(set_log_period()) and at the end of each epoch"
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
        """Return the estimate for so many steps, None before two steps were measured."""
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
