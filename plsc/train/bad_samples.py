"""What the ranks say about bad samples: a few lines at once, all of them in one file."""

from __future__ import annotations

from pathlib import Path

from plsc.data.samples import BadSample, BadSampleList
from plsc.parallel.world import World
from plsc.train.logs import RunLog

_SHOWN = 10  # lines on the terminal, a rank; a dataset may be bad altogether


class BadSampleReport:
    """Collects what each rank met; rank 0 writes ``bad_samples.txt`` in the run's folder."""

    def __init__(self, world: World, folder: Path, log: RunLog, policy: str) -> None:
        self._world = world
        self._log = log
        self._done = "replaced" if policy == "replace" else "skipped"
        self._list = BadSampleList(folder) if world.is_main else None
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
                self._log.problem(f"{self._done}: {problem.text}")
            elif not self._is_cut:
                self._is_cut = True
                self._log.problem("further ones are in bad_samples.txt alone")
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
