"""Speed over the steps since the last log line, and the bad samples of all ranks."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from plsc.data.batch import BadSample
from plsc.data.samples import LIST_NAME, BadSampleList
from plsc.parallel.world import World

logger = logging.getLogger(__name__)
_SHOWN = 10  # bad samples printed per rank: all samples of a dataset may be bad


class BadSampleReport:
    """Collects the bad samples of all ranks; rank 0 writes them to a file in the folder, if there is one."""

    def __init__(self, world: World, folder: Path | None, policy: str, name: str = LIST_NAME) -> None:
        self._world = world
        self._done = "replaced" if policy == "replace" else "skipped"
        self._list = BadSampleList(folder, name) if world.is_main and folder is not None else None
        self._others = "not logged" if folder is None else f"only listed in {name}"
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
        """Log the number of bad samples of each kind, if there are any."""
        if self._list is not None and self._list.counts:
            self._world.log(f"bad samples: {self._list.summary()}; listed in {self._list.path}")


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
