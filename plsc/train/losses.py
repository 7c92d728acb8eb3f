"""The losses of steps, read as numbers without waiting for the device, and their means."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from plsc.data.batch import Batch
from plsc.heads.host_copies import Arriving
from plsc.run.position import Position


@dataclass
class Mean:
    """The mean of losses over images; losses that are not finite are ignored."""

    images: int = 0
    total: float = 0.0

    def add(self, loss: float, images: int) -> None:
        """Add the mean loss of a step with this number of images."""
        if math.isfinite(loss):
            self.images += images
            self.total += loss * images

    @property
    def value(self) -> float | None:
        """The mean; None without a finite loss."""
        return self.total / self.images if self.images else None

    def take(self) -> float | None:
        """Return the mean, and start again."""
        value = self.value
        self.images, self.total = 0, 0.0
        return value


@dataclass
class Pending:
    """The loss of a step, with details for the error if it is not finite."""

    value: Arriving
    images: int
    position: Position
    rate: float
    batch: Batch
    is_excused: bool


class LossReader:
    """Queue of the losses of steps, which are read as numbers in order, and their means.

    Attributes:
        is_late: whether a loss may be read one step later.
        last: the last loss that is known.
        since_log, since_save: means since the last log line and the last checkpoint.

    stop: raises TrainingError for a loss that is not finite; called on all ranks.
    """

    def __init__(self, stop: Callable[[Pending, float], NoReturn], is_late: bool) -> None:
        self._stop = stop
        self.is_late = is_late
        self._coming: deque[Pending] = deque()
        self._read: list[tuple[float, int]] = []
        self.last = math.nan
        self.since_log, self.since_save = Mean(), Mean()

    def add(
        self,
        loss: Tensor,
        images: int,
        position: Position,
        rate: float,
        batch: Batch,
        is_excused: bool = False,
    ) -> None:
        """Add the mean loss of a step over so many images; batch: the batch of this rank.

        is_excused: the step is skipped, so its loss need not be finite.
        """
        value = Arriving(loss.detach())
        self._coming.append(Pending(value, images, replace(position), rate, batch, is_excused))

    def read(self, everything: bool) -> list[tuple[float, int]]:
        """Return (loss, images) of the steps; with `everything`, also of the last step if reading is late.

        Raises TrainingError on all ranks for a loss that is not finite and not excused.
        """
        self.check(kept_back=1 if self.is_late and not everything else 0)
        losses, self._read = self._read, []
        return losses

    def check(self, kept_back: int = 0) -> None:
        """Check all losses except the last `kept_back`, and keep them for `read`. Raises the same errors."""
        while len(self._coming) > kept_back:
            coming = self._coming.popleft()
            loss = float(coming.value.read())
            if not (math.isfinite(loss) or coming.is_excused):
                self._stop(coming, loss)
            self._read.append((loss, coming.images))
            self.last = loss
            self.since_log.add(loss, coming.images)
            self.since_save.add(loss, coming.images)
