"""Losses on their way from the device: read at once on a CPU, one step late on a GPU."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from plsc.parallel.world import World
from plsc.train.guards import stop_at_bad_loss
from plsc.train.state import Position


@dataclass
class _Coming:
    """The loss of a step, and what to say if it is bad. arrived: None where it is here already."""

    value: Tensor
    arrived: torch.cuda.Event | None
    images: int
    position: Position
    rate: float
    names: Sequence[str]
    is_excused: bool


class LossReader:
    """Takes the losses of steps and gives them back as numbers, in order.

    save_dir: for the names of a bad batch; is_late: whether a loss may be read a step after it was made.
    """

    def __init__(self, world: World, save_dir: Path, is_late: bool) -> None:
        self._world = world
        self._save_dir = save_dir
        self.is_late = is_late
        self._coming: deque[_Coming] = deque()
        self._read: list[tuple[float, int]] = []

    def note(
        self,
        loss: Tensor,
        images: int,
        position: Position,
        rate: float,
        names: Sequence[str],
        is_excused: bool = False,
    ) -> None:
        """Take the loss of a step over so many images, at a position; names: this rank's samples.

        is_excused: the step is skipped, and its loss need not be finite.
        """
        value, arrived = loss.detach(), None
        if loss.is_cuda:
            value = torch.empty((), dtype=loss.dtype, pin_memory=True)
            value.copy_(loss.detach(), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._coming.append(
            _Coming(value, arrived, images, replace(position), rate, names, is_excused)
        )

    def read(self, everything: bool) -> list[tuple[float, int]]:
        """Return losses with the images they are of: all of them, or those that may not come later.

        Raises TrainingError, on every rank alike, for one that is not finite and not excused.
        """
        self.check(kept_back=1 if self.is_late and not everything else 0)
        losses, self._read = self._read, []
        return losses

    def check(self, kept_back: int = 0) -> None:
        """Look at the losses but for the last so many; they are still to be read. Raises as `read`."""
        while len(self._coming) > kept_back:
            coming = self._coming.popleft()
            if coming.arrived is not None:
                coming.arrived.synchronize()
            loss = float(coming.value)
            if not (math.isfinite(loss) or coming.is_excused):
                stop_at_bad_loss(
                    self._world,
                    self._save_dir,
                    coming.position,
                    loss,
                    coming.rate,
                    list(coming.names),
                )
            self._read.append((loss, coming.images))
