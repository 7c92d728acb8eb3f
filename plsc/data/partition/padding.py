"""Copies of lines that fill the last places, taken from where the lines were written."""

from __future__ import annotations

import os
import threading

import numpy as np

from plsc.data.partition.order import lines_per_rank, padding_lines
from plsc.data.partition.parts import Parts, Run


def warning_of_repeats(lines: int, nranks: int) -> str | None:
    """Return a warning, one line, if more places are filled with repeats than there are lines."""
    each = lines_per_rank(lines, nranks)
    repeats = each * nranks - lines
    if repeats <= lines:
        return None
    return (
        f"warning: {nranks} parts hold {each} line{'s' if each > 1 else ''} each, of which "
        f"{repeats / (each * nranks):.0%} are repeats: there are {lines} lines only; a smaller --nranks has "
        "fewer"
    )


class Padding:
    """Remembers where the lines that will be copied are written, then copies them."""

    def __init__(self, seed: int, lines: int, nranks: int) -> None:
        self._first = lines
        self._numbers = padding_lines(seed, lines, nranks)
        self._wanted = np.unique(self._numbers)
        self._places: dict[int, tuple[int, int, int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._numbers)

    def note(self, run: Run, numbers: np.ndarray, lengths: np.ndarray) -> None:
        """Look through the lines of a run, given with those at hand, for lines that will be copied."""
        if not len(self):
            return
        hits = np.flatnonzero(np.isin(numbers[run.begin : run.end], self._wanted))
        if not len(hits):
            return
        stops = run.offset + np.cumsum(lengths[run.begin : run.end])
        with self._lock:
            for hit in hits.tolist():
                length = int(lengths[run.begin + hit])
                place = run.rank, int(stops[hit]) - length, length
                self._places[int(numbers[run.begin + hit])] = place

    def copy(self, parts: Parts) -> None:
        """Append the copies; every line has been written by then."""
        for position, number in enumerate(self._numbers.tolist(), start=self._first):
            rank, offset, length = self._places[number]
            (run,) = parts.claim(position, np.array([length]))
            source = os.open(parts.paths[rank], os.O_RDONLY | os.O_CLOEXEC)
            try:
                parts.copy_line(run, source, offset, length)
            finally:
                os.close(source)
