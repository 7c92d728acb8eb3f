"""Measures between two log lines: images per second, and where the time of a step goes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


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
        self.wait = self.step = (
            0.0  # seconds of the last step: until its batch was there, and in all
        )
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
