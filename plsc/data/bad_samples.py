"""Samples that cannot be used: what happens to them, and the list of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from plsc.data.augment import Operation
from plsc.data.sources.paths import printable
from plsc.errors import DataError
from plsc.seeds import hash_key

POLICIES = ("stop", "skip", "replace")
MAX_REPLACEMENTS = 16  # with a tenth of the samples bad, all fail once in 10^16 times
LIST_NAME = "bad_samples.txt"
MAX_LISTED = 100_000  # lines; further ones are counted only

_UNREADABLE_LIST = 64 * 2**20


@dataclass(frozen=True)
class BadSample:
    """A sample that was left out or replaced: its kind of fault, and a line that names it."""

    kind: str
    text: str

    @classmethod
    def from_error(cls, error: DataError) -> BadSample:
        """Return what an error said, on one line."""
        return cls(error.kind, " ".join(str(error).split()))


def replacement(seed: int, epoch: int, sample: int, attempt: int, num_samples: int) -> int:
    """Return the index of the sample that stands in for a bad one, from 1 the attempts' number."""
    return hash_key(seed, epoch, sample, Operation.REPLACE, attempt) % num_samples


class BadSampleList:
    """``bad_samples.txt``: a line ``kind<tab>name: reason`` for each bad sample, each once.

    A file that is there is gone on with, so that a resumed run does not list a sample twice.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LIST_NAME
        self.counts: Counter[str] = Counter()
        self._seen: set[int] = set()
        for line in self._lines_before():
            self._seen.add(hash(line))
            self.counts[printable(line.split("\t", 1)[0])[:40]] += 1

    def add(self, problems: list[BadSample]) -> None:
        """Append those that are new. Raises DataError if the file cannot be written."""
        lines = []
        for problem in problems:
            line = f"{problem.kind}\t{problem.text}"
            if hash(line) in self._seen:
                continue
            self.counts[problem.kind] += 1
            if len(self._seen) < MAX_LISTED:
                self._seen.add(hash(line))
                lines.append(line + "\n")
        if not lines:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}") from error

    def summary(self) -> str:
        """Return ``3 undecodable, 1 missing``; empty if there are none."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())

    def _lines_before(self) -> list[str]:
        try:
            if self.path.stat().st_size > _UNREADABLE_LIST:
                return []
            return self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
